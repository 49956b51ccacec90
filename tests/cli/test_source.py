"""A network comes from a file or from the orchestrator, and what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.bus.api import ok
from dcnr.bus.memory import MemoryBroker
from dcnr.cli.source import Source, fetch_source, read_source, shipped
from dcnr.client.cluster import Cluster
from dcnr.errors import NetworkFileError, NotFound, UserError


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message has the path."""
    with pytest.raises(NotFound, match=r"nowhere\.yml"):
        read_source(str(tmp_path / "nowhere.yml"))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """With the byte where it stops being UTF-8."""
    path = tmp_path / "bad.yml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(UserError, match="byte 6"):
        read_source(str(path))


def test_the_graph_is_checked() -> None:
    """Errors carry the file's name as the user wrote it."""
    with pytest.raises(NetworkFileError, match=r"some\.yml"):
        _ = Source("nodes: 3", "some.yml").graph


async def test_a_registered_network_is_fetched() -> None:
    """Text and file name as they were registered."""
    broker = MemoryBroker()
    server, client = broker.connect(), broker.connect()

    async def answer(data: bytes) -> bytes:
        return ok({"name": "n", "file": "name: n", "file_name": "n.yml", "vnodes": 0, "parameters": 0, "revision": 1})

    await server.serve("dcnr.api.network.show", answer)
    assert await fetch_source(Cluster(client), "n") == Source("name: n", "n.yml")
    await client.close()
    await server.close()


def test_the_demo_network_is_shipped() -> None:
    """It is found beside the package, checked out or installed."""
    assert read_source(str(shipped("tiny.yml"))).graph.name == "tiny"


def test_a_lost_shipped_file_is_an_error() -> None:
    """Not an obscure one."""
    with pytest.raises(NotFound, match=r"lost\.yml"):
        shipped("lost.yml")
