"""What is encoded comes back equal; what is not ours is refused with a reason, whatever it is."""

from __future__ import annotations

import dataclasses
import zlib
from contextlib import suppress
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcnr.bus import codec
from dcnr.bus.messages import (
    Chunk,
    Complete,
    Credit,
    Decision,
    Deploy,
    Deployed,
    Echo,
    EvalLoss,
    Failed,
    Heartbeat,
    Hop,
    Hosted,
    Loss,
    Meet,
    Message,
    PeerLink,
    PNodeInfo,
    Refused,
    Save,
    Saved,
    SavedPart,
    SaveFailed,
    SessionMetrics,
    StepDone,
    StepMetrics,
    StepReport,
    Undeploy,
    ValidationMetrics,
)
from dcnr.errors import PeerError
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId

P, S, E, N = PNodeId("p-1"), SessionId("s_1"), Epoch(3), NetworkId("net")
INFO = PNodeInfo(P, "inc", "host", "cpu", "cpu", 8 << 30, 1, 2, 77, "0.1")
HOP = Hop(N, S, E, 1, 2, 0, "bwd", NodeId("a"), 0, ((NodeId("b"), 0), (NodeId("c"), 1)), P, "bfloat16", (12, 64, 128), nbytes=196608)
HYPER: dict[str, str | int | float | bool | None] = {"lr": 1e-3, "name": "adam", "clip": None, "nesterov": False, "n": 3}
DECISION = Decision(S, E, 7, False, 1e-3, 0.5, 0.25, 2.5, 1.0, 65536.0, {"scale": 65536.0, "good": 1}, save=True)
MESSAGES: list[Message] = [
    HOP,
    Chunk(P, 9, 512, 1024),
    Credit(P, 9, -1),
    Meet(P, (("10.0.0.1", 4000), ("::1", 1)), "00ff", encrypted=True),
    Heartbeat(
        INFO,
        (Hosted(S, E, 4, 22, 100), Hosted(S, E, 7, 1, 1, 2, 9, True, DECISION)),
        stopping=True,
        age=7.5,
        links=(PeerLink(P, "tcp", 2.5),),
    ),
    Deploy(N, S, E, "name: x\n", True, {"a": P}, (INFO,), HYPER, {"scale": 65536.0}, 2**63, 100, 4, 16, 0, "file:///x", None, False),
    Undeploy(S, E),
    Save(S, E, 7),
    DECISION,
    Complete(S, E, 7),
    Deployed(P, S, E, 7, 123),
    Refused(P, S, E, "needs 8 GiB, has 1 GiB"),
    Loss(P, S, E, 7, 0, NodeId("loss"), 3, 2.5),
    EvalLoss(P, S, E, 7, NodeId("loss"), 3, 2.5),
    StepReport(P, S, E, 7, 0, {"a.weight": 0.5}, True, ((NodeId("loss"), 0, 2.5),)),
    StepDone(P, S, E, 7, 2.5, 1.0, False, 1e-3, 1.0, {"good": 1}),
    Saved(P, S, E, 7, SavedPart("k", "ab", 12, ("a.weight",)), None),
    Saved(P, S, E, 7, SavedPart("k", "ab", 12, ()), {"good": 1, "scale": 0.5}),
    SaveFailed(P, S, E, 7, "disk full"),
    Failed(P, S, E, "broke", "Traceback", world=True),
    Echo(P, 1),
    ValidationMetrics(S, 7, 2.5, 12.18, 0.9, 1000, True, E),
    StepMetrics(S, 1, 2.5, 1e-3, 1.0, 1.0, False, 100.0, 9.5, E),
    StepMetrics(S, 2, 2.5, 1e-3, 1.0, 1.0, False, 100.0, 9.5, E, mfu=0.45),
    SessionMetrics(S, "running", 1, ""),
    SessionMetrics(S, "suspended", 1, "asked for"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Message) -> None:
    """With the same types, tuples as tuples."""
    assert codec.decode(codec.encode(message)) == message


def test_every_message_class_is_covered() -> None:
    """A new message gets an example here."""
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


def test_a_long_network_file_fits_a_small_server() -> None:
    """Text of several hundred KB travels compressed, and comes back."""
    node = "  - id: block_{}_ffn_up\n    type: linear\n    config: {{in_features: 512, out_features: 2048}}\n"
    text = "".join(node.format(i) for i in range(4000))
    deploy = next(message for message in MESSAGES if isinstance(message, Deploy))
    message = dataclasses.replace(deploy, network_file=text)
    data = codec.encode(message)
    assert len(text) > 300_000
    assert len(data) < 60_000
    assert codec.decode(data) == message


@given(st.binary(max_size=3000))
def test_a_payload_comes_back_aligned_and_without_a_copy(payload: bytes) -> None:
    """It starts at a multiple of 64 and is a view of the message."""
    data = codec.encode_with_payload(HOP, payload)
    message, view = codec.decode_with_payload(data)
    assert message == HOP
    assert view == payload
    assert (len(data) - len(payload)) % codec.ALIGNMENT == 0
    assert view.obj is data


@given(st.binary(max_size=200))
def test_noise_is_a_peer_error_and_nothing_else(data: bytes) -> None:
    """Also behind our own magic."""
    for read in (codec.decode, codec.decode_with_payload, codec.unpack):
        for noise in (data, b"Z" + data, b"DCN1" + data):
            try:
                read(noise)
            except PeerError:
                continue
            assert read is codec.unpack  # any msgpack value is fine there


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_message_is_decoded_or_refused(at: int, value: int) -> None:
    """One wrong byte never escapes as another exception."""
    data = bytearray(codec.encode_with_payload(HOP, b"1234"))
    data[at % len(data)] = value
    with suppress(PeerError):
        codec.decode_with_payload(bytes(data))


def _hop_with(**fields: Any) -> bytes:
    values = {field.name: getattr(HOP, field.name) for field in dataclasses.fields(HOP)} | fields
    return bytes(msgpack.packb(["Hop", list(values.values())]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a message"),
        (bytes(msgpack.packb(["Nope", []])), "unknown message type 'Nope'"),
        (bytes(msgpack.packb({"a": 1})), r"expected \[type name, fields\]"),
        (bytes(msgpack.packb(["Credit", ["p"]])), "transfer: Field required"),
        (bytes(msgpack.packb(["Credit", ["p", 1, 2, 3]])), "Unexpected positional argument"),
        (_hop_with(step="x"), "Hop: step: "),
        (_hop_with(targets=[["b", "no"]]), r"Hop: targets\.0\.1: "),
        (_hop_with(phase="sideways"), "Hop: phase: "),
        (_hop_with(sender="a.b"), "Hop: sender is not an id"),
        (_hop_with(network="x y"), "Hop: network is not an id"),
        (b"Z" + zlib.compress(b"1" * 100)[:-8], "cut short"),
        (b"Znope", "not a message"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, said: str) -> None:
    """The field and the reason."""
    with pytest.raises(PeerError, match=said):
        codec.decode(data)


def test_an_id_inside_a_record_is_checked() -> None:
    """A heartbeat's PNode becomes a subject too."""
    bad = Heartbeat(dataclasses.replace(INFO, pnode=PNodeId("a.>")), ())
    with pytest.raises(PeerError, match=r"info\.pnode is not an id"):
        codec.decode(codec.encode(bad))


def test_a_bomb_is_not_expanded() -> None:
    """Compressed data is bounded."""
    with pytest.raises(PeerError, match="longer than"):
        codec.unpack(b"Z" + zlib.compress(bytes(65 << 20)))


def test_a_message_from_before_a_field_was_added_is_read_with_its_default() -> None:
    """Fields with defaults stand last, and may be missing."""
    values = [getattr(HOP, field.name) for field in dataclasses.fields(HOP)]
    assert codec.decode(bytes(msgpack.packb(["Hop", values[:13]]))) == dataclasses.replace(HOP, nbytes=0)
