"""Everything that a client can ask of a cluster, asked of a real orchestrator; and that what comes back is typed and checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dcnr.bus.api import ok
from dcnr.bus.memory import MemoryBroker
from dcnr.client.answers import Registered
from dcnr.client.cluster import Cluster, NetworkFile, is_file, made_up, read_network
from dcnr.errors import AlreadyExists, NotFound, PeerError, UserError
from dcnr.ids import is_id
from tests.client.conftest import SMALL


@pytest.mark.parametrize(("name", "expected"), [("tiny", False), ("tiny.yml", True), ("networks/tiny", True), ("a-b_c", False)])
def test_names_and_files_are_told_apart(name: str, expected: bool) -> None:
    """A registered name holds neither dot nor slash."""
    assert is_file(name) is expected


def test_a_network_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, or no text."""
    bad = tmp_path / "bad.yml"
    bad.write_bytes(b"name: \xff")
    for path, message in ((tmp_path / "no.yml", r"no\.yml"), (tmp_path, "is a folder"), (bad, "byte 6")):
        with pytest.raises(UserError, match=message):
            read_network(path)


@pytest.mark.parametrize("stem", ["tiny", "my network (2)", "x" * 200])
def test_made_up_names_are_names(stem: str) -> None:
    """Whatever the file is called, and each time another one."""
    assert is_id(made_up(stem))
    assert made_up(stem) != made_up(stem)


async def test_networks_are_registered_listed_shown_and_forgotten(cluster: Cluster) -> None:
    """As records; the orchestrator's refusals are raised here."""
    made = await cluster.register(SMALL)
    assert made == Registered(made.name, 5, made.parameters)
    with pytest.raises(AlreadyExists):
        await cluster.register(SMALL)
    assert (await cluster.register(SMALL, replace=True)) == made
    (row,) = await cluster.networks()
    shown = await cluster.network("small")
    assert (row.name, row.vnodes, row.revision) == (shown.name, shown.vnodes, shown.revision) == ("small", 5, 2)
    assert NetworkFile(shown.file, shown.file_name) == SMALL
    await cluster.delete_network("small")
    assert await cluster.networks() == []
    with pytest.raises(NotFound, match="small"):
        await cluster.network("small")


async def test_pnodes_are_listed_shown_and_drained(cluster: Cluster) -> None:
    """With what they host."""
    async with asyncio.timeout(20):
        while [one.state for one in await cluster.pnodes()] != ["alive", "alive"]:
            await asyncio.sleep(0.01)
    assert (await cluster.info()).pnodes == 2
    session = await cluster.train(SMALL, "text", 100_000, batch=4)
    async for _ in session:
        break
    shown = [await cluster.pnode(name) for name in "ab"]
    assert sorted(node for one in shown for node in one.nodes[session.name]) == ["act", "embed", "loss"]
    assert sorted(one.vnode for pnode in shown for one in pnode.memory) == ["act", "embed", "loss"]
    assert (await cluster.drain("b")).reason == "draining"
    await session.suspend()


async def test_training_brings_a_file_or_names_a_network(cluster: Cluster, tmp_path: Path) -> None:
    """A path, a text, or a name that is registered by then; names of sessions are made up from it."""
    path = tmp_path / "mine.yml"
    path.write_text(SMALL.text)
    for network, begins in ((path, "mine-"), (str(path), "mine-"), (SMALL, "small-"), ("small", "small-")):
        session = await cluster.train(network, "text", 1, batch=4)
        assert session.name.startswith(begins)
        assert [row.step async for row in session] == [1]
    assert {one.network for one in await cluster.sessions()} == {"small"}


@pytest.mark.parametrize(
    ("network", "dataset", "session", "message"),
    [
        ("nix", "text", None, "no network 'nix'"),
        (SMALL, "nix", None, "no dataset 'nix'"),
        (NetworkFile("nodes: 3", "bad.yml"), "text", None, r"bad\.yml"),
        ("nowhere.yml", "text", None, "no network file 'nowhere"),
        (SMALL, "text", "no dots.", "not a valid session name"),
    ],
)
async def test_what_is_wrong_is_raised_before_anything_begins(
    cluster: Cluster, network: NetworkFile | str, dataset: str, session: str | None, message: str
) -> None:
    """With the remedy, and no session is left."""
    with pytest.raises(UserError, match=message):
        await cluster.train(network, dataset, 1, session)
    assert await cluster.sessions() == []


async def test_an_answer_of_another_version_is_an_error(broker: MemoryBroker) -> None:
    """It names what is missing; what is too much is left out."""
    server, client = broker.connect(), broker.connect()
    row: dict[str, object] = {"name": "n", "vnodes": 1, "parameters": 2, "revision": 3}

    async def answer(data: bytes) -> bytes:
        return ok({"networks": [row]})

    await server.serve("dcnr.api.network.list", answer)
    row["new"] = "unknown"
    (found,) = await Cluster(client).networks()
    assert (found.name, found.revision) == ("n", 3)
    del row["vnodes"]
    with pytest.raises(PeerError, match="NetworkInfo: vnodes"):
        await Cluster(client).networks()
    await client.close()
    await server.close()
