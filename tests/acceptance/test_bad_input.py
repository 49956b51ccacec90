"""Bad input through the real program: one line that says what is wrong and what to do, exit code 2, and nothing half-made.

What a command refuses without a cluster is tested beside the commands, in tests/cli.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcnr.bus.api import call
from dcnr.client.connect import connection
from tests.acceptance.networks import SEQ, VOCABULARY, small
from tests.acceptance.running import Cluster, register
from tests.cli.conftest import command, environment, strays

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]

GOOD = small("refused", "float32")
LONG = GOOD.replace(f"seq_len: {SEQ}", "seq_len: 200000")
NARROW = GOOD.replace(f"vocab_size: {VOCABULARY}", "vocab_size: 5").replace(f"out_dim: {VOCABULARY}, bias", "out_dim: 5, bias")
FILES = {
    "broken YAML": ("name: [refused\n", "this is not YAML"),
    "unknown node type": (GOOD.replace("type: gelu", "type: gelo"), "gelo"),
    "unknown key": (GOOD.replace("rate: 0.1", "rat: 0.1", 1), "rat"),
    "cycle": (GOOD.replace("{from: embedder,", "{from: final_ln,"), "cycle"),
    "shape mismatch": (GOOD.replace("in_dim: 64", "in_dim: 63"), "63"),
}
"""What is wrong with a file: its text, and what the message must name."""
TRAINING = {
    "vocabulary mismatch": (NARROW, [], "node 'embedder' of network 'refused' of 5 (set vocab_size to"),
    "text too short for the network": (LONG, [], "node 'embedder' of network 'refused' reads windows of 200000, which take 200001"),
    "empty validation split": (
        GOOD,
        ["--dataset", "bare", "--set", "validate_every=5"],
        "the validation split has 0 tokens, and node 'embedder' of network 'refused'",
    ),
    "unknown dataset": (GOOD, ["--dataset", "nothing"], "no dataset 'nothing'"),
    "seed too large": (GOOD, ["--seed", str(2**64)], "Invalid value for '--seed'"),
    "taken session name": (GOOD, ["--session", "taken"], "session 'taken' exists"),
}
"""What only the orchestrator can see: the network's text, the options of `dcnr train`, and what the message must name."""


def refused(data_dir: Path, url: str, *arguments: str) -> str:
    """The one line with which the program refuses."""
    env = environment(data_dir, NATS_URL=url)
    done = subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    *progress, said = done.stderr.splitlines()
    assert said.startswith("error: "), done.stderr
    assert all(line.startswith("starting ") for line in progress), done.stderr
    return said


async def made(cluster: Cluster) -> list[object]:
    """All that users may have made: networks, sessions, and files of the data directory but for its logs."""
    async with connection(cluster.url) as bus:
        listed: list[object] = [await call(bus, "network.list"), await call(bus, "session.list")]
    files = (path.relative_to(cluster.data_dir) for path in cluster.data_dir.rglob("*"))
    return [*listed, *sorted(path for path in files if path.parts[0] not in {"logs", "nats"})]


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"nats://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("wrong", FILES)
async def test_a_wrong_file_is_not_registered(cluster: Cluster, tmp_path: Path, wrong: str) -> None:
    """The line has the place in the file."""
    text, message = FILES[wrong]
    path = tmp_path / "wrong.yml"
    path.write_text(text)
    before = await made(cluster)
    said = refused(cluster.data_dir, cluster.url, "network", "create", str(path))
    assert f"{path}:" in said
    assert message in said
    assert await made(cluster) == before


@pytest.mark.parametrize("wrong", TRAINING)
async def test_a_training_that_cannot_be_leaves_nothing(cluster: Cluster, tmp_path: Path, wrong: str) -> None:
    """Neither a session, nor its network, nor a replacement of a network of that name."""
    text, options, message = TRAINING[wrong]
    path = tmp_path / "refused.yml"
    path.write_text(text)
    if wrong == "taken session name":
        await register(cluster.url, small("other", "float32"))
        async with connection(cluster.url) as bus:
            await call(bus, "session.create", network="other", dataset="text", steps=1, batch=1, session="taken", start=False)
    if wrong == "empty validation split":
        cluster.dcnr("dataset", "derive", "bare", "--from", "text", "--validation", "0")
    before = await made(cluster)
    dataset = [] if "--dataset" in options else ["--dataset", "text"]
    assert message in refused(cluster.data_dir, cluster.url, "train", str(path), *dataset, *options)
    assert await made(cluster) == before


async def test_an_unknown_network_is_not_trained(cluster: Cluster) -> None:
    """It is named."""
    before = await made(cluster)
    assert "no network 'nothing'" in refused(cluster.data_dir, cluster.url, "train", "nothing", "--dataset", "text")
    assert await made(cluster) == before


@pytest.mark.parametrize("arguments", [["train", "{file}", "--dataset", "d"], ["up", "--agents", "1"]], ids=lambda a: a[0])
def test_no_server_is_said_with_its_address(tmp_path: Path, closed_url: str, arguments: list[str]) -> None:
    """And no process is left. (An orchestrator and an agent wait for their server.)"""
    (tmp_path / "good.yml").write_text(GOOD)
    said = refused(tmp_path / "data", closed_url, *(argument.format(file=tmp_path / "good.yml") for argument in arguments))
    assert closed_url.removeprefix("nats://") in said
    assert strays(tmp_path / "data") == []


@pytest.mark.parametrize("url", ["not a url", "nats://127.0.0.1:port", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_said(tmp_path: Path, url: str) -> None:
    """As it was given."""
    assert url in refused(tmp_path, url, "session", "list")
