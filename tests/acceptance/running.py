"""Real clusters for acceptance: `dcnr up` as users start it, commands as processes, and runs whose every step row is kept."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode
from dcnr.bus.messages import Message, SessionMetrics, StepMetrics
from dcnr.client.connect import connection
from dcnr.data.dataset import Dataset
from dcnr.ids import SessionId
from dcnr.storage.checkpoint import Manifest, read_manifest, read_tensors
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer
from tests.cli.conftest import command, environment, start_up, strays

PATIENCE = 90.0
"""Seconds that one run may take on a busy machine."""
TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(2000))
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where it answers and what it works on."""

    url: str
    data_dir: Path

    def dcnr(self, *arguments: str) -> str:
        """Standard output of a command, as a process of its own, that must succeed."""
        env = environment(self.data_dir, NATS_URL=self.url)
        done = subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def up(data_dir: Path, agents: int, backend: str = "cpu") -> Iterator[Cluster]:
    """Server, orchestrator and agents; afterwards not one of their processes is left."""
    process, ready = start_up(data_dir, "--agents", str(agents), "--backend", backend)
    try:
        yield Cluster(ready["url"], data_dir)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert strays(data_dir) == []


def make_dataset(data_dir: Path, vocab_size: int, text: str = TEXT) -> None:
    """Dataset and tokenizer `text`; characters for a vocabulary of at most 256."""
    path = data_dir / "text.txt"
    path.write_text(text)
    add_tokenizer(data_dir, "text", Tokenizer.train([path], "char" if vocab_size <= 256 else "bpe", vocab_size))
    Dataset.create(data_dir, "text", [path], "text", seq_len=8)


class Run:
    """One session, heard from before it begins."""

    def __init__(self, bus: Bus, session: str) -> None:
        self.session = session
        self._bus = bus
        self._news: asyncio.Queue[Message] = asyncio.Queue()
        self.rows: list[StepMetrics] = []

    def on_message(self, data: bytes) -> None:
        """Bus callback."""
        self._news.put_nowait(decode(data))

    async def ask(self, verb: str, **fields: Any) -> Row:
        """A verb of the API about this session."""
        return await call(self._bus, f"session.{verb}", session=self.session, **fields)

    async def until_step(self, step: int) -> None:
        """Until that step was measured."""
        async with asyncio.timeout(PATIENCE):
            while not self.rows or self.rows[-1].step < step:
                await self._next()

    async def until(self, wanted: str) -> None:
        """Until the session is in state `wanted`."""
        async with asyncio.timeout(PATIENCE):
            while (told := await self._next()) is None or told.state != wanted:
                assert told is None or told.state != "failed", told

    async def _next(self) -> SessionMetrics | None:
        message = await self._news.get()
        if isinstance(message, StepMetrics):
            self.rows.append(message)
        return message if isinstance(message, SessionMetrics) else None


@asynccontextmanager
async def listening(url: str, session: str) -> AsyncIterator[Run]:
    """The run of a session that may not exist yet."""
    async with connection(url) as bus:
        run = Run(bus, session)
        await bus.subscribe(subjects.metrics("step", SessionId(session)), run.on_message)
        await bus.subscribe(subjects.metrics("session", SessionId(session)), run.on_message)
        yield run


async def register(url: str, file: str) -> None:
    """Register a network file."""
    async with connection(url) as bus:
        await call(bus, "network.create", file=file, file_name="network.yml", replace=True)


async def train(url: str, session: str, **options: Any) -> list[StepMetrics]:
    """Every step of a new session that runs to its end."""
    async with listening(url, session) as run:
        await run.ask("create", dataset="text", **options)
        await run.until("done")
        return run.rows


def losses(rows: list[StepMetrics]) -> list[float]:
    """Of all steps, which must be 1, 2, 3 and so on."""
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    return [row.loss for row in rows]


async def manifest(data_dir: Path, session: str, step: int | None = None) -> Manifest:
    """Of a checkpoint, the newest one if no step is given."""
    return await read_manifest(FileStorage(data_dir), SessionId(session), step)


async def tensors(data_dir: Path, session: str, step: int) -> dict[str, np.ndarray]:
    """All weights and moments of a checkpoint, float32."""
    found = await manifest(data_dir, session, step)
    return dict(await read_tensors(FileStorage(data_dir), found, found.tensors))


def same_bits(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Equal names, and under each of them equal bytes."""
    return first.keys() == second.keys() and all(first[name].tobytes() == second[name].tobytes() for name in first)
