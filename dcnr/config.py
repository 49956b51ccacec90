"""Where things are: the NATS server, the data directory and the storage of checkpoints; and which fast paths are switched off.

The option of a command wins over the environment, which wins over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dcnr.errors import UserError

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"


@dataclass(frozen=True, slots=True)
class Config:
    """What every process needs to know before it can talk or write. `storage` is a URL."""

    nats_url: str
    data_dir: Path
    storage: str

    @property
    def tokenizers(self) -> Path:
        """`<name>/tokenizer.json` each."""
        return self.data_dir / "tokenizers"

    @property
    def datasets(self) -> Path:
        """`<name>/manifest.json` and shards each."""
        return self.data_dir / "datasets"

    @property
    def checkpoints(self) -> Path:
        """`<session>/<step>/` each."""
        return self.data_dir / "checkpoints"

    @property
    def nats_store(self) -> Path:
        """JetStream files of the bundled server."""
        return self.data_dir / "nats"


def resolve(
    environ: Mapping[str, str], data_dir: str | Path | None = None, nats_url: str | None = None, storage: str | None = None
) -> Config:
    """The configuration under `environ` (NATS_URL, DCNR_DATA_DIR, DCNR_STORAGE); the other three are a command's options."""
    home = Path(environ.get("HOME") or Path.home())
    folder = Path(data_dir or environ.get("DCNR_DATA_DIR") or home / ".dcnr").expanduser().absolute()
    kept = storage or environ.get("DCNR_STORAGE") or f"file://{quote(str(folder))}"
    return Config(nats_url or environ.get("NATS_URL") or DEFAULT_NATS_URL, folder, kept)


@dataclass(frozen=True, slots=True)
class FusedPaths:
    """Which of the fast paths of a GPU are on: an error that goes away with one of them is in there."""

    attention: bool
    lm_head: bool
    hopper: bool
    """What only the instructions of compute capability 9.0 can do."""


def fused_paths(environ: Mapping[str, str]) -> FusedPaths:
    """DCNR_FUSED_ATTENTION, DCNR_FUSED_LM_HEAD, DCNR_HOPPER: 0 is off, 1 or absent is on. Raises `UserError` for anything else."""
    names = ("DCNR_FUSED_ATTENTION", "DCNR_FUSED_LM_HEAD", "DCNR_HOPPER")
    return FusedPaths(*(_switch(environ, name) for name in names))


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name) or "1"
    if value not in {"0", "1"}:
        raise UserError(f"{name} is '{value}'", "set it to 0 (off) or 1 (on), or leave it away")
    return value == "1"


def environment() -> Mapping[str, str]:
    """The environment of this process, for the few who need more of it than `Config` holds."""
    return os.environ


def from_environment(data_dir: str | Path | None = None, nats_url: str | None = None, storage: str | None = None) -> Config:
    """`resolve` under the environment of this process."""
    return resolve(os.environ, data_dir, nats_url, storage)
