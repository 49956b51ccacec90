"""The safetensors file format, for float32 arrays, without copying them.

The `safetensors` package builds a whole file in memory, which for a large part means holding it twice; here a file is a list of buffers,
the arrays' own memory among them. Layout (from the format's README): 8 bytes little-endian length of the header, JSON header
`{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {…}}` padded with blanks to a multiple of 8, then the arrays back to back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dcnr.errors import InvariantError, PeerError

Float32Array = npt.NDArray[np.float32]

_ALIGN = 8
_STORED = np.dtype("<f4")


def encode_tensors(tensors: Mapping[str, Float32Array], metadata: Mapping[str, str] | None = None) -> list[memoryview]:
    """The buffers of a file that holds `tensors`, in order of their names. They share memory with contiguous arrays."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    buffers, offset = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype != np.float32:
            raise InvariantError(f"tensor '{name}' is {tensor.dtype}, checkpoints hold float32")
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        buffers.append(np.ascontiguousarray(tensor, _STORED).reshape(-1).data.cast("B"))
        offset += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return [memoryview(len(text).to_bytes(8, "little") + text), *buffers]


def decode_tensors(data: bytes | memoryview) -> dict[str, Float32Array]:
    """The arrays of a file, sharing the memory of `data`, read-only as it is. Raises `PeerError` if it is not such a file."""
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        return {name: _view(data, start, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(f"this is not a safetensors file of float32 arrays: {error}") from error


def _view(data: bytes | memoryview, start: int, entry: Mapping[str, Any]) -> Float32Array:
    if entry["dtype"] != "F32":
        raise ValueError(f"dtype {entry['dtype']}")
    first, stop = entry["data_offsets"]
    return np.frombuffer(data, _STORED, (stop - first) // 4, start + first).reshape(entry["shape"])
