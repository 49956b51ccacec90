"""Products. Weights are [out, in]. Legend: `dcnr.backends.base`."""

from __future__ import annotations

from dcnr.backends.base import Activation, HostArray
from dcnr.backends.numpy.activation import activate, activate_backward
from dcnr.backends.numpy.wide import like, quiet, wide, write


class LinearOps:
    """Linear layers, with or without an activation."""

    @quiet
    def linear(
        self, x_RI: HostArray, w_OI: HostArray, b_O: HostArray | None, activation: Activation | None = None
    ) -> tuple[HostArray, HostArray | None]:
        """The activation reads `pre` as it is stored, so that merging the two does not change the numbers."""
        y_RO = wide(x_RI) @ wide(w_OI).T
        if b_O is not None:
            y_RO += wide(b_O)
        pre_RO = like(y_RO, x_RI)
        if activation is None:
            return pre_RO, None
        return like(activate(activation, wide(pre_RO)), x_RI), pre_RO

    @quiet
    def linear_backward(
        self, dy_RO: HostArray, x_RI: HostArray, w_OI: HostArray, b_O: HostArray | None, pre_RO: HostArray | None,
        activation: Activation | None, into_w: HostArray, into_b: HostArray | None, accumulate: bool, need_dx: bool,
    ) -> HostArray | None:  # fmt: skip
        """dx = dy w, dw = dy^T x, db = column sums, after the activation's own backward. `pre` has the bias in it."""
        if activation is not None and pre_RO is not None:
            d_RO = wide(like(activate_backward(activation, wide(dy_RO), wide(pre_RO)), dy_RO))
        else:
            d_RO = wide(dy_RO)
        write(into_w, d_RO.T @ wide(x_RI), accumulate)
        if into_b is not None:
            write(into_b, d_RO.sum(axis=0), accumulate)
        return like(d_RO @ wide(w_OI), dy_RO) if need_dx else None
