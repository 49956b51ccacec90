"""The first value of a parameter.

It depends only on the session's seed and the canonical names, so merging nodes and placing them change nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from dcnr.nodes.base import Parameter


def initial_value(seed: int, parameter: Parameter) -> npt.NDArray[np.float32]:
    """Float32, filled part by part: normal with `parameter.std`, or the constant `parameter.fill`."""
    value = np.full(parameter.shape, parameter.fill, dtype=np.float32)
    if parameter.std is None:
        return value
    for part in parameter.parts:
        rows = value[part.start : part.stop]
        rows[...] = _generator(seed, f"{part.node}.{part.name}").standard_normal(rows.shape, dtype=np.float32)
    value *= np.float32(parameter.std)
    return value


def _generator(seed: int, canonical: str) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}/{canonical}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
