"""What the common contract does not see: markers of expired keys, buckets made by others, servers without JetStream."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import nats
import pytest
from nats.js.api import KeyValueConfig

from dcnr.bus.nats import connect
from dcnr.bus.server import find_binary
from dcnr.errors import UserError, WorldError
from tests.bus.contract import until


def plain_server(ports: Path) -> subprocess.Popen[bytes]:
    """A server with nothing switched on."""
    command = [str(find_binary(os.environ)), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(ports)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def test_an_expired_keys_marker_is_an_absent_key(nats_url: str) -> None:
    """nats-py's own `get` shows an entry without a value. An empty value is a value."""
    client = await nats.connect(nats_url)
    theirs = await client.jetstream().create_key_value(KeyValueConfig("expiring", limit_marker_ttl=60))
    await theirs.create("lease", b"x", msg_ttl=1)
    await theirs.put("empty", b"")
    bus = await connect(nats_url, "t")
    kv = await bus.kv("expiring")
    assert await kv.get("lease") is not None
    async with asyncio.timeout(5):
        while await kv.get("lease") is not None:
            await asyncio.sleep(0.05)
    assert [(entry.key, entry.value) for entry in await kv.entries()] == [("empty", b"")]
    await bus.close()
    await client.close()


async def test_a_key_that_is_none_is_refused(nats_url: str) -> None:
    """Wildcards and spaces."""
    bus = await connect(nats_url, "t")
    kv = await bus.kv("names")
    with pytest.raises(UserError, match="not a valid key"):
        await kv.put("a b", b"")
    await bus.close()


async def test_a_server_without_jetstream_says_what_to_do(tmp_path: Path) -> None:
    """Someone's own server."""
    process = plain_server(tmp_path)
    await until(lambda: any(path.read_text() for path in tmp_path.glob("*.ports")))
    url = next(tmp_path.glob("*.ports")).read_text().split('"')[3]
    bus = await connect(url, "t")
    with pytest.raises(WorldError, match="JetStream"):
        await bus.kv("b")
    await bus.close()
    process.terminate()
    process.wait()
