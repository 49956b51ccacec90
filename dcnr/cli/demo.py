"""`dcnr demo`: a whole story in minutes, with nothing to prepare.

The text is the source of the running Python's own standard library: real, and there on every machine.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from dcnr.cli.client import run
from dcnr.cli.generate import stream, write
from dcnr.cli.output import Command, data_dir_option, example
from dcnr.cli.source import shipped
from dcnr.cli.train import TrainPlan, start_training
from dcnr.client.cluster import Cluster
from dcnr.ids import SessionId
from dcnr.text.preprocess import standard_library_files

TEXT_BYTES = 3 << 20
AGENTS = 3
STEPS = 600
BATCH = 16
SETTINGS = ("lr=3e-3", "schedule=cosine", "warmup_steps=20", "clip_norm=1.0")
PROMPT = "def"
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7


@click.command(cls=Command, epilog=example("dcnr demo"))
@data_dir_option
def demo(data_dir: Path) -> None:
    """Start a cluster of three agents, train a small transformer on Python's standard library, and let it write some."""
    run(_demo(data_dir / "demo"))


async def _demo(data_dir: Path) -> None:
    network, session = shipped("tiny.yml"), SessionId(f"demo-{secrets.token_hex(3)}")
    click.echo(f"text:     {write_text(data_dir / 'standard_library.txt')}")
    click.echo(f"network:  {network}")
    click.echo(f"cluster:  nats-server, orchestrator and {AGENTS} agents, logs in {data_dir / 'logs'}")
    click.echo(f"training: {STEPS} steps of {BATCH} rows, session {session}")

    async def sample(cluster: Cluster) -> None:
        click.echo(f"\nthe network continues {PROMPT!r}:\n")
        fields = {"session": session, "prompt": PROMPT, "max_tokens": SAMPLE_TOKENS, "temperature": TEMPERATURE}
        await stream(cluster, fields, write, PROMPT)

    await start_training(demo_plan(data_dir, network, session), sample)
    click.echo("\nnow with a text of yours: dcnr train networks/tiny.yml --text PATH --local 3")


def demo_plan(data_dir: Path, network: Path, session: SessionId) -> TrainPlan:
    """What `dcnr train` would be told."""
    return TrainPlan(
        network=str(network),
        dataset=None,
        text=(str(data_dir / "standard_library.txt"),),
        steps=STEPS,
        batch=BATCH,
        micro_batches=2,
        seed=0,
        settings=SETTINGS,
        no_fuse=False,
        pnodes=0,
        local=AGENTS,
        session=session,
        backend="auto",
        data_dir=data_dir,
        as_json=False,
    )


def write_text(path: Path) -> str:
    """Put the first files of the standard library, `TEXT_BYTES` of them, into one; says what it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = size = 0
    with path.open("wb") as out:
        for file in standard_library_files():
            data = file.read_bytes()
            if size + len(data) <= TEXT_BYTES and _is_utf8(data):
                size += out.write(data)
                files += 1
    return f"{files} files of Python's standard library, {size / (1 << 20):.1f} MiB"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
