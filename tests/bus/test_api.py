"""Requests and answers, and errors that cross the wire as themselves."""

from __future__ import annotations

import pytest

from dcnr.bus import api, codec, subjects
from dcnr.bus.memory import MemoryBroker
from dcnr.errors import (
    AlreadyExists,
    BackendUnavailable,
    BusUnavailable,
    DcnrError,
    DoesNotFit,
    NetworkFileError,
    NotFound,
    PeerError,
    Problem,
    UserError,
    WorldError,
)


async def test_fields_reach_the_orchestrator_and_its_answer_comes_back() -> None:
    """Plain values both ways."""
    bus = MemoryBroker().connect()

    async def show(data: bytes) -> bytes:
        return api.ok({"asked": api.arguments(data), "n": 1})

    await bus.serve(subjects.api("session.show"), show)
    fields = {"session": "s", "deep": [1, {"a": None}]}
    assert await api.call(bus, "session.show", **fields) == {"asked": fields, "n": 1}
    await bus.close()


async def test_a_number_that_no_message_can_hold_is_the_users_error() -> None:
    """It comes from an option of a command, and nothing is sent."""
    bus = MemoryBroker().connect()
    with pytest.raises(UserError, match=f"{2**64} is too large"):
        await api.call(bus, "session.create", seed=2**64)
    await bus.close()


async def test_a_text_that_no_message_can_hold_is_the_users_error() -> None:
    """A shell passes on bytes that are no UTF-8 as surrogates."""
    bus = MemoryBroker().connect()
    with pytest.raises(UserError, match="character 3 of a text is no Unicode character"):
        await api.call(bus, "generate", prompt=b"ab\xff".decode(errors="surrogateescape"))
    await bus.close()


@pytest.mark.parametrize("kind", [NotFound, AlreadyExists, UserError, DoesNotFit, BackendUnavailable, WorldError, PeerError, DcnrError])
async def test_an_error_is_raised_at_the_caller_as_what_it_is(kind: type[DcnrError]) -> None:
    """With its message and remedy."""
    bus = MemoryBroker().connect()

    async def fail(_: bytes) -> bytes:
        return api.failure(kind("no network 'x'", "see: dcnr network list"))

    await bus.serve(subjects.api("v"), fail)
    with pytest.raises(DcnrError) as raised:
        await api.call(bus, "v")
    assert type(raised.value) is kind
    assert (raised.value.message, raised.value.remedy) == ("no network 'x'", "see: dcnr network list")
    await bus.close()


async def test_problems_of_a_network_file_arrive_as_a_user_error() -> None:
    """All of them, as text."""
    bus = MemoryBroker().connect()

    problems = [Problem("f.yml", 3, 5, "n", "no such type", "use linear"), Problem("f.yml", 9, 1, None, "x", "y")]

    async def fail(_: bytes) -> bytes:
        return api.failure(NetworkFileError(problems))

    await bus.serve(subjects.api("v"), fail)
    with pytest.raises(UserError, match=r"(?s)f\.yml:3:5: node 'n'.*f\.yml:9:1"):
        await api.call(bus, "v")
    await bus.close()


async def test_without_an_orchestrator_the_user_learns_what_to_start() -> None:
    """At once."""
    with pytest.raises(BusUnavailable, match="dcnr up"):
        await api.call(MemoryBroker().connect(), "cluster.info")


@pytest.mark.parametrize("answer", [b"\x00", codec.pack([1]), codec.pack({"ok": 3}), codec.pack({"error": {"kind": 1}})])
async def test_a_strange_answer_is_a_peer_error(answer: bytes) -> None:
    """Not a KeyError."""
    bus = MemoryBroker().connect()

    async def strange(_: bytes) -> bytes:
        return answer

    await bus.serve(subjects.api("v"), strange)
    with pytest.raises(PeerError):
        await api.call(bus, "v")
    await bus.close()


def test_a_request_that_is_no_map_is_a_peer_error() -> None:
    """The orchestrator answers it with a failure."""
    with pytest.raises(PeerError):
        api.arguments(codec.pack([1, 2]))
