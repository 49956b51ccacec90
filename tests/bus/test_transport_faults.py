"""What faults do to transports: a send ends, what is delivered is whole, and nothing is left of a peer that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dcnr.bus import chunks
from dcnr.bus.lanes import segment
from dcnr.bus.lanes.base import Array
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Hop
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.bus.transport import HopTransport
from dcnr.errors import WorldError
from dcnr.ids import NodeId, PNodeId
from tests.bus.contract import until
from tests.bus.lanes.weather import Weather
from tests.bus.peers import HERE, HOP, ME, NET, info, peer

B, C = PNodeId("b"), PNodeId("c")
MIB = 1 << 20
LANES = {"shm": ("here", False), "chunks": ("elsewhere", False), "tcp": ("elsewhere", True)}
"""Where the peer is, and whether it may be connected to."""


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests do not touch segments of running clusters."""
    where = tmp_path / "shm"
    where.mkdir()
    monkeypatch.setattr(segment, "directory", lambda: where)
    return where


@asynccontextmanager
async def sender(url: str, direct: bool) -> AsyncIterator[tuple[HopTransport, list[tuple[Hop, Array]]]]:
    """Our end, and what came back to it."""
    bus, got = await connect(url, ME), list[tuple[Hop, Array]]()
    transport = HopTransport(bus, ME, "here", lambda hop, array: got.append((hop, array)), direct)
    await transport.listen(NET, [HERE])
    yield transport, got
    await transport.close()
    await bus.close()


async def ready(transport: HopTransport, lane: str) -> None:
    """The lane to `b` is the one that is meant."""
    if lane == "tcp":
        async with asyncio.timeout(20):
            await transport.met(B)
    assert transport.links()[0].lane == lane


def hop_to(name: PNodeId, micro: int = 0) -> Hop:
    """To the VNode that this peer hosts."""
    return replace(HOP, micro=micro, targets=((NodeId(name), 0),))


async def there_and_back(transport: HopTransport, got: list[tuple[Hop, Array]], number: int, size: int = 2 * MIB) -> None:
    """A tensor of a number arrives, and comes back as it was."""
    await transport.send(B, hop_to(B, number), np.full(size, number, np.uint8))
    await until(lambda: any(hop.micro == number for hop, _ in got), 20)
    (back,) = [array for hop, array in got if hop.micro == number]
    np.testing.assert_array_equal(back, np.full(size, number, np.uint8))


@pytest.mark.parametrize("lane", LANES)
async def test_a_peer_that_is_killed_fails_its_sends_when_that_is_known_and_leaves_nothing(
    nats_url: str, own_directory: Path, lane: str
) -> None:
    """1. it works; 2. SIGKILL in the middle; 3. named no more: every send ends at once; 4. nothing is left of it; 5. the next one works."""
    host, direct = LANES[lane]
    async with sender(nats_url, direct) as (transport, got):
        async with peer(nats_url, B, host, own_directory) as process:
            transport.set_peers([info(B, host)])
            await ready(transport, lane)
            await there_and_back(transport, got, 1)
            process.kill()
            sends = [asyncio.create_task(transport.send(B, hop_to(B, 2), np.zeros(24 * MIB, np.uint8))) for _ in range(4)]
            await asyncio.to_thread(process.wait)
        got.clear()
        transport.set_peers([])
        async with asyncio.timeout(5):
            results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [WorldError] * 4
        await until(lambda: list(own_directory.iterdir()) == [])
        async with peer(nats_url, B, host, own_directory):
            transport.set_peers([info(B, host, "2")])
            await ready(transport, lane)
            await there_and_back(transport, got, 3)


@pytest.mark.parametrize("lane", LANES)
async def test_a_peer_that_is_stopped_holds_no_other_and_goes_on_afterwards(nats_url: str, own_directory: Path, lane: str) -> None:
    """SIGSTOP for a moment: sends to it wait, those to another do not, and all arrive once."""
    host, direct = LANES[lane]
    async with (
        sender(nats_url, direct) as (transport, got),
        peer(nats_url, B, host, own_directory) as process,
        peer(nats_url, C, host, own_directory),
    ):
        transport.set_peers([info(B, host), info(C, host)])
        await ready(transport, lane)
        await there_and_back(transport, got, 1)
        process.send_signal(signal.SIGSTOP)
        stuck = [asyncio.create_task(transport.send(B, hop_to(B, micro), np.full(16 * MIB, micro, np.uint8))) for micro in (2, 3, 4)]
        await transport.send(C, hop_to(C, 5), np.full(2 * MIB, 5, np.uint8))
        await until(lambda: len(got) == 2, 20)
        assert not any(task.done() for task in stuck)
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(30):
            await asyncio.gather(*stuck)
        await until(lambda: len(got) == 5, 20)
        assert sorted(int(array[0]) for _, array in got) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lane", LANES)
async def test_a_server_that_is_killed_and_restarted_in_the_middle_costs_nothing_but_time(
    tmp_path: Path, own_directory: Path, lane: str
) -> None:
    """Headers and credits get lost with it; every tensor arrives once, unharmed, also those of the next outage."""
    host, direct = LANES[lane]
    server = NatsServer(tmp_path / "nats")
    await server.start()
    async with sender(server.url, direct) as (transport, got), peer(server.url, B, host, own_directory):
        transport.set_peers([info(B, host)])
        await ready(transport, lane)
        for outage in range(2):
            numbers = range(20 * outage, 20 * outage + 20)
            sends = [asyncio.create_task(transport.send(B, hop_to(B, number), np.full(3 * MIB, number, np.uint8))) for number in numbers]
            await until(lambda begin=20 * outage: len(got) > begin, 20)  # type: ignore[misc]
            server.kill()
            await server.stop()
            server = NatsServer(tmp_path / "nats", port=int(server.url.rsplit(":", 1)[1]))
            await server.start()
            async with asyncio.timeout(40):
                await asyncio.gather(*sends)
            await until(lambda end=numbers[-1] + 1: len(got) == end, 40)  # type: ignore[misc]
            assert sorted(hop.micro for hop, _ in got) == list(range(numbers[-1] + 1))
            assert all((array == hop.micro).all() for hop, array in got)
    await server.stop()


async def test_a_started_transport_is_started_once_even_if_the_server_was_away() -> None:
    """What failed is tried again; what had worked is not subscribed to twice, so that no tensor arrives twice."""
    broker = MemoryBroker()
    bus = broker.connect("b")
    receiver = HopTransport(bus, B, "elsewhere", lambda *_: None, direct=False)
    subscribe, failures = bus.subscribe, 2

    async def flaky(subject: str, on_message: object) -> object:
        nonlocal failures
        if subject.endswith("credit") and failures:
            failures -= 1
            raise WorldError("no server")
        return await subscribe(subject, on_message)  # type: ignore[arg-type]

    bus.subscribe = flaky  # type: ignore[method-assign, assignment]
    for _ in range(2):
        with pytest.raises(WorldError):
            await receiver.listen(NET, [NodeId("there")])
    await receiver.listen(NET, [NodeId("there")])
    patterns = [interest.pattern for interest in broker.interests]
    assert len(patterns) == len(set(patterns))
    await receiver.close()


async def test_peers_that_come_and_go_leave_nothing(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 peers under as many names, each gone in the middle of its tensors: memory, files, tasks and interests stay what they were."""
    monkeypatch.setattr(chunks, "ABANDONED_AFTER", 0.1)
    broker = MemoryBroker()
    weather = Weather(seed=7, loss=0.02)
    broker.fate = weather
    ours = HopTransport(broker.connect("a"), ME, "here", lambda *_: None, direct=False)
    await ours.listen(NET, [HERE])
    process, counts = psutil.Process(), list[tuple[int, int, int, int]]()
    for number in range(300):
        name, host = PNodeId(f"p{number}"), ("here", "elsewhere")[number % 2]
        bus = broker.connect(name)
        theirs = HopTransport(bus, name, host, lambda *_: None, direct=False)
        theirs.set_peers([info(ME, "here")])
        ours.set_peers([info(name, host)])
        await theirs.listen(NET, [NodeId(name)])
        sends = [
            *(asyncio.create_task(ours.send(name, hop_to(name), np.zeros(size, np.uint8))) for size in (100, 600_000, 2 * MIB)),
            asyncio.create_task(theirs.send(ME, HOP, np.zeros(600_000, np.uint8))),
        ]
        await asyncio.wait(sends, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        await theirs.close()
        await bus.close()
        ours.set_peers([])
        async with asyncio.timeout(5):
            await asyncio.gather(*sends, return_exceptions=True)
        if number % 50 == 49:
            await asyncio.sleep(0.2)  # as long as what came late is kept
            ours.set_peers([info(B, "elsewhere")])
            ours.set_peers([])
            await until(lambda: list(own_directory.iterdir()) == [])
            counts.append((process.num_fds(), len(asyncio.all_tasks()), len(broker.interests), _kept(ours)))
    assert len(set(counts[1:])) == 1, counts
    await ours.close()


def _kept(transport: HopTransport) -> int:
    """How much a transport and its lanes remember of peers."""
    owners = (transport, transport._port, transport._shm, transport._shm._announcements, transport._chunks, transport._pace)
    kept = [value for owner in owners for name, value in vars(owner).items() if name not in {"_by_name", "_subscriptions", "_tasks"}]
    return sum(len(value) for value in kept if isinstance(value, dict | list | set))


@pytest.mark.parametrize("lane", LANES)
async def test_memory_files_and_interests_stay_the_same_over_restarts(nats_url: str, own_directory: Path, lane: str) -> None:
    """A peer of one name that is killed again and again in the middle, as an agent under a supervisor."""
    host, direct = LANES[lane]
    process, counts = psutil.Process(), list[tuple[int, int, int]]()
    async with sender(nats_url, direct) as (transport, got):

        def count() -> tuple[int, int, int]:
            return process.num_fds(), len(asyncio.all_tasks()), _kept(transport)

        for incarnation in range(3):
            async with peer(nats_url, B, host, own_directory) as other:
                transport.set_peers([info(B, host, str(incarnation))])
                await ready(transport, lane)
                await there_and_back(transport, got, incarnation)
                sends = [asyncio.create_task(transport.send(B, hop_to(B, 100), np.zeros(8 * MIB, np.uint8))) for _ in range(3)]
                await until(lambda: any(hop.micro == 100 for hop, _ in got), 20)
                os.kill(other.pid, signal.SIGKILL)
            transport.set_peers([])
            await asyncio.gather(*sends, return_exceptions=True)
            got.clear()
            await until(lambda: list(own_directory.iterdir()) == [])
            counts.append(count())
        await until(lambda: all(last <= first + 1 for last, first in zip(count(), counts[0], strict=True)), 20)
