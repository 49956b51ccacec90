"""The NATS bus keeps the contract on servers with large and small messages, and comes back after every kind of break."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from structlog.testing import capture_logs

from dcnr.bus import nats
from dcnr.bus.base import Bus, Way
from dcnr.bus.nats import PENDING_SIZE, NatsBus, connect
from dcnr.bus.server import NatsServer
from dcnr.errors import BusUnavailable, UserError, WorldError
from tests.bus.clusters import free_ports, nats_cluster
from tests.bus.contract import BusContract, Connect, fresh, until


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that takes 64 KB a message."""
    server = NatsServer(tmp_path_factory.mktemp("small"), max_payload=64 << 10)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that the test may break."""
    server = NatsServer(tmp_path / "own")
    await server.start()
    yield server
    await server.stop()


async def _clients(url: str) -> AsyncIterator[Connect]:
    buses: list[NatsBus] = []

    async def client() -> Bus:
        buses.append(await connect(url, "test"))
        return buses[-1]

    yield client
    for bus in buses:
        await bus.close()


class TestNatsBus(BusContract):
    """The common cases on a server with 1 MB a message."""

    @pytest.fixture
    async def connect(self, nats_url: str) -> AsyncIterator[Connect]:
        """Clients of the session's server."""
        async for client in _clients(nats_url):
            yield client


class TestNatsBusWithSmallMessages(BusContract):
    """The common cases on a server with 64 KB a message."""

    @pytest.fixture
    async def connect(self, small_server: NatsServer) -> AsyncIterator[Connect]:
        """Clients of the small server."""
        async for client in _clients(small_server.url):
            yield client


async def _restarted(server: NatsServer, store: Path) -> NatsServer:
    again = NatsServer(store, port=int(server.url.rsplit(":", 1)[1]))
    await again.start()
    return again


async def test_connect_says_within_3_s_that_nobody_answers() -> None:
    """Both where nothing listens and where something listens that is silent."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for url in ("nats://127.0.0.1:1", f"nats://127.0.0.1:{silent.getsockname()[1]}"):
            async with asyncio.timeout(3):
                with pytest.raises(BusUnavailable, match="dcnr up"):
                    await connect(url, "test")


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", "nats://[::1:4222"])
async def test_an_address_that_is_none_is_named(url: str) -> None:
    """Typing errors in NATS_URL."""
    with pytest.raises(UserError, match="is not the address of a NATS server"):
        await connect(url, "test")


async def test_a_password_in_the_address_is_not_shown() -> None:
    """Errors end up in logs."""
    with pytest.raises(BusUnavailable) as raised:
        await connect("nats://user:secret@127.0.0.1:1", "test")
    assert "secret" not in str(raised.value)


async def test_subscriptions_and_kv_survive_a_killed_server(own_server: NatsServer, tmp_path: Path) -> None:
    """SIGKILL, restart on the same store: messages flow again and acknowledged writes are there."""
    bus, got = await connect(own_server.url, "test"), list[bytes]()
    await bus.subscribe("again", got.append)
    kv = await bus.kv("kept")
    await kv.put("a", b"1")
    own_server.kill()
    await until(lambda: not bus.is_connected)
    await own_server.stop()
    again = await _restarted(own_server, tmp_path / "own")
    await until(lambda: bus.is_connected)
    await bus.publish("again", b"x")
    await until(lambda: got == [b"x"])
    entry = await kv.get("a")
    assert entry is not None
    assert entry.value == b"1"
    await bus.close()
    await again.stop()


async def test_publishing_into_an_outage_ends_in_an_error_not_in_memory(own_server: NatsServer) -> None:
    """What nats-py may hold is bounded; then `publish` says so."""
    bus = await connect(own_server.url, "test")
    await own_server.stop()
    await until(lambda: not bus.is_connected)

    async def flood() -> None:
        for _ in range(100):
            await bus.publish("x", bytes(256 << 10))

    with pytest.raises(WorldError):
        await flood()
    await bus.close()


async def test_a_client_closed_by_the_server_is_rebuilt_with_its_subscriptions(own_server: NatsServer) -> None:
    """A protocol error closes a nats-py client for good."""
    bus, got = await connect(own_server.url, "test"), list[bytes]()
    await bus.subscribe("again", got.append)
    client = bus._client
    await client._send_command(b"NONSENSE\r\n")
    await client._flush_pending()
    await until(lambda: client.is_closed)
    await until(lambda: bus._client is not client and bus.is_connected)
    await until_heard(bus, got)
    await bus.close()


async def test_a_client_whose_reading_has_ended_is_rebuilt(own_server: NatsServer) -> None:
    """It looks connected, and hears nothing for ever."""
    bus, got = await connect(own_server.url, "test"), list[bytes]()
    await bus.subscribe("again", got.append)
    client = bus._client
    assert client._reading_task is not None
    client._reading_task.cancel()
    await until(lambda: bus._client is not client and bus.is_connected)
    await until_heard(bus, got)
    await bus.close()


@asynccontextmanager
async def recorded(url: str) -> AsyncIterator[tuple[str, bytearray]]:
    """A door to the server at `url`, and all that clients said through it."""
    said = bytearray()
    port = int(url.rsplit(":", 1)[1])

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bytearray) -> None:
        while data := await reader.read(1 << 16):
            note += data
            writer.write(data)
        writer.close()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, up_writer, said), carry(up_reader, writer, bytearray()), return_exceptions=True)

    door = await asyncio.start_server(enter, "127.0.0.1", 0)
    async with door:
        yield f"nats://127.0.0.1:{door.sockets[0].getsockname()[1]}", said


async def test_how_the_server_is_reached(nats_url: str) -> None:
    """The address of ours that it sees: there peers of other machines find us."""
    bus = await connect(nats_url, "test")
    assert bus.way == Way("127.0.0.1", encrypted=False)
    await bus.close()


async def test_a_subscription_is_at_the_server_before_subscribe_returns(nats_url: str) -> None:
    """The server answers in order, so a PING that came after the SUB was answered: nats-py's flush alone sends it before."""
    async with recorded(nats_url) as (url, said):
        bus = await connect(url, "test")
        for _ in range(3):
            subject = fresh("active.")
            subscription = await bus.subscribe(subject, lambda _: None)
            assert said.rindex(b"PING") > said.index(b"SUB " + subject.encode())
            await subscription.stop()
        await bus.close()


@pytest.mark.parametrize("error", [None, NoRespondersError])
async def test_a_request_that_is_cancelled_ends_so_even_if_the_answer_comes_in_the_same_moment(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """`asyncio.wait_for` under nats-py may swallow it; whoever cancelled would wait for ever."""
    bus = await connect(nats_url, "test")

    async def swallowing(*_: object) -> Msg:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if error is not None:
            raise error
        return Msg(bus._client, data=b"late")

    monkeypatch.setattr(bus._client, "request", swallowing)
    task = asyncio.create_task(bus.request("x", b"", 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bus.request("x", b"", 60)
    await bus.close()


async def until_heard(bus: NatsBus, got: list[bytes]) -> None:
    """Publish until a subscription hears; what is sent before the interest is back gets lost."""
    async with asyncio.timeout(5):
        while not got:
            await bus.publish("again", b"x")
            await asyncio.sleep(0.02)


async def test_a_hung_server_is_noticed_even_with_unsent_data(own_server: NatsServer, tmp_path: Path) -> None:
    """SIGSTOP with a full socket: the client lets go of the link, finds the next server, and publish and close never hang."""
    bus = await connect(own_server.url, "test")
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(2):
            while True:
                await bus.publish("flood", bytes(512 << 10))
    except TimeoutError:
        pass
    await until(lambda: bus._down, 15)
    os.kill(own_server.pid, signal.SIGCONT)
    await until(lambda: bus.is_connected)
    async with asyncio.timeout(3):
        await bus.close()


async def test_close_returns_within_3_s_from_a_hung_server(own_server: NatsServer) -> None:
    """Ctrl-C must always work."""
    bus = await connect(own_server.url, "test")
    await bus.subscribe(fresh("x."), lambda _: None)
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        for _ in range(40):
            await bus.publish("flood", bytes(100 << 10))
        async with asyncio.timeout(3):
            await bus.close()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)


async def test_a_patient_connection_waits_for_its_server_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may be started before the server; one line every few seconds, not one for each attempt."""
    monkeypatch.setattr(nats, "RECONNECT_WAIT", 0.01)
    (port,) = free_ports(1)
    attempts = 0

    async def count(*_: object) -> bool:
        nonlocal attempts
        attempts += 1
        return False

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(nats, "_anyone_listens", count)
        waiting = asyncio.create_task(connect(f"nats://127.0.0.1:{port}", "early", patient=True))
        await until(lambda: attempts > 5)
    lines = [line for line in logs if line["event"].endswith("yet; trying again")]
    assert len(lines) == 1
    server = NatsServer(tmp_path / "late", port=port)
    await server.start()
    bus = await waiting
    assert bus.is_connected
    await bus.close()
    await server.stop()


@pytest.mark.parametrize("patient", [False, True])
async def test_refused_credentials_and_bad_addresses_are_errors_however_patient(tmp_path: Path, patient: bool) -> None:
    """Waiting mends neither; the password is not shown."""
    with pytest.raises(UserError, match="is not the address"):
        await connect("nats://host:port", "test", patient)
    async with nats_cluster(tmp_path, 1, 'authorization { user: "u", password: "good" }') as servers:
        with pytest.raises(UserError, match="Authorization Violation") as raised:
            await connect(servers.url(0, user="u:wrong@"), "test", patient)
        assert not isinstance(raised.value, BusUnavailable)
        assert "wrong" not in str(raised.value)
        bus = await connect(servers.url(0, user="u:good@"), "test", patient)
        await bus.close()


async def _answer(bus: Bus) -> bytes:
    """Of "echo": the library may lose the new connection once more before it stands, and who asks just then is told so."""
    while True:
        with suppress(WorldError):
            return await bus.request("echo", b"x", 5)
        await asyncio.sleep(0.01)


async def test_a_server_that_dies_five_times_in_a_row_under_traffic(own_server: NatsServer, tmp_path: Path) -> None:
    """Each time subscriptions and requests come back by themselves, and what is heard is a part of what was said, in order."""
    bus, other, got = await connect(own_server.url, "one"), await connect(own_server.url, "two"), list[int]()
    await other.subscribe("traffic", lambda data: got.append(int(data)))

    async def echo(data: bytes) -> bytes:
        return data

    await other.serve("echo", echo)
    number = 0

    async def talk() -> None:
        nonlocal number
        while True:
            number += 1
            with suppress(WorldError):
                await bus.publish("traffic", b"%d" % number)
            await asyncio.sleep(0.002)

    talking, server = asyncio.create_task(talk()), own_server
    for _ in range(5):
        heard = len(got)
        await until(lambda heard=heard: len(got) > heard + 10)  # type: ignore[misc]
        server.kill()
        await until(lambda: not bus.is_connected and not other.is_connected)
        await server.stop()
        server = await _restarted(server, tmp_path / "own")
        mark = number
        await until(lambda mark=mark: bool(got) and got[-1] > mark)  # type: ignore[misc]
        assert await asyncio.wait_for(_answer(bus), 20) == b"x"
    talking.cancel()
    assert got == sorted(set(got))
    for one in (bus, other):
        await one.close()
    await server.stop()


async def test_a_request_during_an_outage_fails_at_once(own_server: NatsServer) -> None:
    """Also one that waits for its answer when the connection is lost; nothing waits for its time-out."""
    bus = await connect(own_server.url, "test")
    await bus.subscribe("silent", lambda _: None)
    waiting = asyncio.create_task(bus.request("silent", b"", 60))
    with pytest.raises(WorldError, match="no answer"):  # by now the first one is on its way
        await bus.request("silent", b"", 0.05)
    own_server.kill()
    async with asyncio.timeout(5):
        with pytest.raises(WorldError, match="was lost"):
            await waiting
        with pytest.raises(WorldError, match="no connection"):
            await bus.request("silent", b"", 60)
    await bus.close()


async def test_what_is_held_during_an_outage_is_bounded_and_nobody_waits(own_server: NatsServer) -> None:
    """Small control messages without end: each is taken or refused at once, and no more than `PENDING_SIZE` is kept."""
    bus = await connect(own_server.url, "test")
    await own_server.stop()
    await until(lambda: not bus.is_connected)
    refused = 0
    async with asyncio.timeout(20):
        for _ in range(PENDING_SIZE // 4096 + 100):
            try:
                await bus.publish("control", bytes(4096))
            except WorldError:
                refused += 1
    assert refused > 50
    assert bus._client.pending_data_size <= PENDING_SIZE + 8192
    await bus.close()


async def test_a_subscription_that_failed_is_not_half_there(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tries again would hear everything twice."""
    monkeypatch.setattr(nats, "FLUSH_TIMEOUT", 0.05)
    bus, got = await connect(own_server.url, "test"), list[bytes]()
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    with pytest.raises(WorldError):
        await bus.subscribe("once", got.append)
    os.kill(own_server.pid, signal.SIGCONT)
    monkeypatch.setattr(nats, "FLUSH_TIMEOUT", 5)
    await bus.subscribe("once", got.append)
    await bus.subscribe("end", got.append)
    await bus.publish("once", b"x")
    await bus.publish("end", b"end")
    await until(lambda: b"end" in got)
    assert got == [b"x", b"end"]
    await bus.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGUSR2], ids=["killed", "lame duck"])
async def test_clients_of_a_server_that_ends_go_to_another_of_the_cluster(tmp_path: Path, how: signal.Signals) -> None:
    """With their subscriptions, also to servers that they were not told of, with the same credentials."""
    async with nats_cluster(tmp_path, 3, 'authorization { user: "u", password: "p" }') as servers:
        one = await connect(servers.url(0, user="u:p@"), "one")
        two = await connect(f"{servers.url(1, user='u:p@')},{servers.url(2, user='u:p@')}", "two")
        got = list[bytes]()
        await one.subscribe("again", got.append)
        await until_heard(two, got)
        lost = one._lost
        servers.end(0, how)
        await until(lost.done, 30)
        await until(lambda: one.is_connected)
        got.clear()
        await until_heard(two, got)
        for bus in (one, two):
            await bus.close()
