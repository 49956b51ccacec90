"""What `dcnr checkpoint outputs` computes: the declared outputs of a checkpoint over windows of its dataset, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.agents.outputs import Outputs
from dcnr.backends.load import load_backend
from dcnr.data.dataset import Dataset
from dcnr.data.split import Split
from dcnr.errors import UserError
from dcnr.ids import SessionId
from dcnr.network.load import load_graph
from dcnr.passes.outputs_graph import outputs_graph
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import read_manifest, read_tensors

IDS = "ids"
"""Under this name are the windows, beside the outputs."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Those `first` to `first + rows - 1` of a split."""

    split: Split
    first: int
    rows: int


async def outputs_of(
    where: tuple[Storage, Path], checkpoint: tuple[SessionId, int | None], names: Sequence[str], windows: Windows, backend: str
) -> dict[str, npt.NDArray[Any]]:
    """The arrays by name, rows first, and the windows. Raises `DcnrError` for what is not there, or does not fit."""
    storage, data_dir = where
    manifest = await read_manifest(storage, *checkpoint)
    graph = outputs_graph(load_graph(manifest.network_file, f"the network of {manifest.session}"), names)
    if any(sink.name == IDS for sink in graph.outputs):
        raise UserError(f"an output is called '{IDS}', as the windows are", "ask for the others by --name")
    one = Outputs(load_backend(backend), graph)
    one.load(await read_tensors(storage, manifest, one.names))
    return await asyncio.to_thread(_compute, one, data_dir, manifest.dataset, storage, windows)


def _compute(one: Outputs, data_dir: Path, name: str, storage: Storage, windows: Windows) -> dict[str, npt.NDArray[Any]]:
    """Window by window: what is on its way inside takes the memory of one."""
    dataset = Dataset.open(data_dir, name, storage)
    ids_RT = dataset.window_rows(windows.split, windows.first, windows.rows, one.seq_len)[:, :-1]
    found = [one.of(np.maximum(ids_RT[row : row + 1], 0)) for row in range(windows.rows)]
    return {IDS: np.ascontiguousarray(ids_RT)} | {name: np.concatenate([outputs[name] for outputs in found]) for name in found[0]}
