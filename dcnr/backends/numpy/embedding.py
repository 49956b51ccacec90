"""Embeddings and rotary positions. Legend: `dcnr.backends.base`."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray, Precision, Rope
from dcnr.backends.dtypes import dtype_of
from dcnr.backends.numpy.wide import like, quiet, wide


def rotate(x_TD: HostArray, rope: Rope, backward: bool) -> HostArray:
    """Turn the pairs of [..., T, D]; angles are computed in float64."""
    length, width = x_TD.shape[-2:]
    angle = np.arange(rope.first, rope.first + length)[:, None] * rope.theta ** (-np.arange(0, width, 2) / width)
    cos, sin = like(np.cos(angle), x_TD), like(np.sin(-angle if backward else angle), x_TD)
    even, odd = x_TD[..., 0::2], x_TD[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x_TD.shape)


class EmbeddingOps:
    """Rows of a table by id."""

    @quiet
    def embedding(self, ids_BT: HostArray, w_VD: HostArray, positions_TD: HostArray | None, precision: Precision) -> HostArray:
        """w[ids] (+ positions[:T])."""
        y_BTD = wide(w_VD[ids_BT])
        if positions_TD is not None:
            y_BTD = y_BTD + wide(positions_TD[: ids_BT.shape[1]])
        return y_BTD.astype(dtype_of(precision), copy=False)

    @quiet
    def embedding_backward(
        self, dy_BTD: HostArray, ids_BT: HostArray, into_w: HostArray, into_positions: HostArray | None, accumulate: bool
    ) -> None:
        """`np.add.at` adds row after row."""
        d_BTD = wide(dy_BTD)
        if not accumulate:
            into_w[...] = 0
        np.add.at(into_w, ids_BT, d_BTD)
        if into_positions is None:
            return
        if not accumulate:
            into_positions[...] = 0
        into_positions[: ids_BT.shape[1]] += d_BTD.sum(axis=0)

    @quiet
    def rotate(self, x_BTD: HostArray, rope: Rope, backward: bool = False) -> HostArray:
        """Turn pair (2i, 2i+1) of row t by (first + t) * theta**(-2i/D)."""
        return like(rotate(wide(x_BTD), rope, backward), x_BTD)
