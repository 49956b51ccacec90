"""A data directory and its store: they know each other, and a store that lost everything is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.bus.memory import MemoryBroker
from dcnr.bus.nats import connect
from dcnr.bus.server import NatsServer
from dcnr.errors import PeerError
from dcnr.orchestrator import identity
from dcnr.orchestrator.identity import FILE, KEY, StoreVanished, identify
from dcnr.orchestrator.leader import BUCKET
from dcnr.orchestrator.store import BUCKETS


@pytest.fixture(autouse=True)
def _one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LOOKS", 1)


async def test_the_first_start_of_all_makes_an_id_that_stays(tmp_path: Path) -> None:
    """In the store and in the directory; the second start finds both."""
    bus = MemoryBroker().connect()
    first = await identify(bus, tmp_path)
    entry = await (await bus.kv(BUCKET)).get(KEY)
    assert entry is not None
    assert first == entry.value.decode() == (tmp_path / FILE).read_text()
    assert await identify(bus, tmp_path) == first


async def test_another_directory_takes_over_the_id_of_the_store(tmp_path: Path) -> None:
    """A standby on another host, and a directory from before there were ids."""
    bus = MemoryBroker().connect()
    assert await identify(bus, tmp_path / "one") == await identify(bus, tmp_path / "two")
    assert (tmp_path / "one" / FILE).read_text() == (tmp_path / "two" / FILE).read_text()


async def test_an_emptied_store_is_told_with_what_to_do_and_stays_empty(tmp_path: Path) -> None:
    """Time after time; nothing is made that would look like a beginning."""
    broker = MemoryBroker()
    await identify(broker.connect(), tmp_path)
    broker.buckets.clear()
    for _ in range(2):
        with pytest.raises(StoreVanished, match=r"emptied or replaced .* \(restore .* --accept-empty-store.* DCNR_ACCEPT_EMPTY_STORE=1"):
            await identify(broker.connect(), tmp_path)
    assert broker.buckets == {}


async def test_the_store_of_another_cluster_is_told(tmp_path: Path) -> None:
    """Both are named."""
    await identify(MemoryBroker().connect(), tmp_path)
    other = MemoryBroker().connect()
    theirs = await identify(other, tmp_path / "theirs")
    with pytest.raises(StoreVanished, match=rf"another cluster \({theirs[:8]}\).* \(point NATS_URL"):
        await identify(other, tmp_path)


@pytest.mark.parametrize("bucket", BUCKETS.values())
async def test_a_single_bucket_that_is_missing_is_named(tmp_path: Path, bucket: str) -> None:
    """Half of what was known is no beginning either."""
    broker = MemoryBroker()
    await identify(broker.connect(), tmp_path)
    del broker.buckets[bucket]
    with pytest.raises(StoreVanished, match=f"has lost {bucket}"):
        await identify(broker.connect(), tmp_path)


async def test_a_directory_without_an_id_makes_no_bucket_anew(tmp_path: Path) -> None:
    """It would hide the loss from the directory that knows of it, and forget what was there."""
    broker = MemoryBroker()
    await identify(broker.connect(), tmp_path / "old")
    lost = next(iter(BUCKETS.values()))
    del broker.buckets[lost]
    for directory in ("fresh", "old"):
        with pytest.raises(StoreVanished, match=f"has lost {lost}"):
            await identify(broker.connect(), tmp_path / directory)


async def test_a_person_may_accept_the_loss_once(tmp_path: Path) -> None:
    """Then there is a new id, and the next loss is told again."""
    broker = MemoryBroker()
    old = await identify(broker.connect(), tmp_path)
    broker.buckets.clear()
    new = await identify(broker.connect(), tmp_path, accept=True)
    assert new != old
    assert await identify(broker.connect(), tmp_path) == new
    assert await identify(broker.connect(), tmp_path, accept=True) == new
    broker.buckets.clear()
    with pytest.raises(StoreVanished):
        await identify(broker.connect(), tmp_path)


async def test_an_id_that_is_none_is_an_error_with_its_place(tmp_path: Path) -> None:
    """On either side."""
    bus = MemoryBroker().connect()
    (tmp_path / FILE).write_bytes(b"\xff\x00")
    with pytest.raises(PeerError, match=FILE):
        await identify(bus, tmp_path)
    (tmp_path / FILE).unlink()
    await (await bus.kv(BUCKET)).put(KEY, b"a b")
    with pytest.raises(PeerError, match=f"{BUCKET}/{KEY}"):
        await identify(bus, tmp_path)


@pytest.mark.nats
async def test_a_real_server_that_lost_its_store_is_told_from_one_that_was_restarted(tmp_path: Path) -> None:
    """The same store after a restart is the same cluster; an empty one on the same port is none."""
    server = NatsServer(tmp_path / "store")
    await server.start()
    port = int(server.url.rsplit(":", 1)[1])
    bus = await connect(server.url, "t")
    known = await identify(bus, tmp_path)
    await bus.close()
    await server.stop()
    for store, same in ((tmp_path / "store", True), (tmp_path / "empty", False)):
        server = NatsServer(store, port=port)
        await server.start()
        bus = await connect(server.url, "t")
        if same:
            assert await identify(bus, tmp_path) == known
        else:
            with pytest.raises(StoreVanished):
                await identify(bus, tmp_path)
        await bus.close()
        await server.stop()
