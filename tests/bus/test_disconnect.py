"""News of closed connections: those of a real server are understood, others are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nats
import pytest

from dcnr.bus import subjects
from dcnr.bus.disconnect import TYPE, closed_connection, pnode_of
from dcnr.bus.nats import connect
from dcnr.bus.server import ACCOUNTS, find_binary
from dcnr.errors import PeerError
from dcnr.ids import PNodeId
from tests.bus.contract import until

_CLIENT = """
import asyncio, nats, sys
async def main():
    await nats.connect(sys.argv[1], name="a-control")
    print("there", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
ROOT = Path(__file__).parents[2]


def news(**changes: Any) -> bytes:
    """What a server says, with some fields changed."""
    return json.dumps({"type": TYPE, "client": {"name": "a-control", "id": 7}, "reason": "Client Closed", **changes}).encode()


def connect_and_be_killed(url: str) -> None:
    """A client that has no time to say good-bye."""
    process = subprocess.Popen([sys.executable, "-c", _CLIENT, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()


@pytest.mark.nats
async def test_everyone_hears_of_a_client_that_was_killed(nats_url: str) -> None:
    """The bundled server says whose connection it was, without anyone having to ask."""
    bus, heard = await connect(nats_url, "test"), list[bytes]()
    await bus.subscribe(subjects.DISCONNECTS, heard.append)
    connect_and_be_killed(nats_url)
    await until(lambda: "a-control" in map(closed_connection, heard))
    await bus.close()


@pytest.mark.nats
async def test_a_plain_client_needs_no_credentials_and_has_jetstream(nats_url: str) -> None:
    """Whatever account the bundled server puts it into."""
    client = await nats.connect(nats_url)
    account = await client.jetstream().account_info()
    assert account.limits.max_streams == -1
    await client.close()


@pytest.mark.parametrize("file", ["open.conf", "tls.conf"])
def test_the_files_for_users_grant_the_same(file: str) -> None:
    """Exports, imports and accounts; tls.conf has users of its own, and lets nobody else in."""
    text = (ROOT / "deploy" / "nats" / file).read_text()
    granted = [line.strip() for line in ACCOUNTS.splitlines() if "DISCONNECT" in line or "jetstream" in line or "system_account" in line]
    assert len(granted) == 4
    assert [line for line in granted if line not in text] == []
    assert ("no_auth_user" in text) == (file == "open.conf")


@pytest.mark.nats
@pytest.mark.parametrize("file", ["embedded.conf", "cluster.conf", "leaf.conf"])
def test_the_files_for_users_are_valid(file: str) -> None:
    """As the server itself sees them."""
    environ = {**os.environ, "NODE": "n1", "HOST": "127.0.0.1", "HUB": "nats-leaf://127.0.0.1:7422"}
    command = [str(find_binary(os.environ)), "-t", "-c", str(ROOT / "deploy" / "nats" / file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "is valid" in done.stdout + done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        news(type="io.nats.server.advisory.v1.client_connect"),
        news(client={"name": 7}),
        news(client="a"),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    """Anyone may publish there."""
    with pytest.raises(PeerError, match="news of a closed connection"):
        closed_connection(data)


def test_only_control_connections_belong_to_pnodes() -> None:
    """An agent has another one for tensors, and not everybody has a name."""
    assert closed_connection(news()) == "a-control"
    assert closed_connection(news(client={"id": 7})) == ""
    assert pnode_of("gpu-1-control") == PNodeId("gpu-1")
    assert [pnode_of(name) for name in ("gpu-1-tensors", "gpu-1", "", "-control", "a b-control")] == [None] * 5
