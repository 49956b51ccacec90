"""The last step of sums over rows: what the blocks of a kernel have summed becomes gradients, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.device import Device, blocks

MOST = 3
"""Gradients that one launch makes."""
COLUMNS = 32
"""Of a block, which sums each of them with as many threads."""


def reduce_columns(device: Device, part_NC: DeviceArray, intos: Sequence[DeviceArray | None], accumulate: bool) -> None:
    """Sums over N; the C columns are as many vectors of one width as there are `intos` (three at most). None: nobody wants that one."""
    count, columns = part_NC.shape
    targets = (*intos, *[None] * (MOST - len(intos)))
    kernel = device.kernel("columns", "reduce_columns")
    args = (part_NC, count, columns, columns // len(intos), *targets, int(accumulate))
    device.launch(kernel, (blocks(columns, COLUMNS), 1), COLUMNS * COLUMNS, args)


def no_rows(device: Device, intos: Sequence[DeviceArray | None], accumulate: bool) -> None:
    """The same of nothing: gradients that are not accumulated become 0."""
    for into in intos:
        if into is not None and into.size and not accumulate:
            device.clear(into)
