"""Layer normalisation. Legend: `dcnr.backends.base`."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray
from dcnr.backends.numpy.wide import like, quiet, wide, write


class NormOps:
    """y = (x - mean) * rstd * g + b, row by row."""

    @quiet
    def layernorm(self, x_RD: HostArray, g_D: HostArray, b_D: HostArray | None, eps: float) -> tuple[HostArray, HostArray, HostArray]:
        """(y, mean, rstd)."""
        x = wide(x_RD)
        mean_R = x.mean(axis=-1)
        rstd_R = 1 / np.sqrt(x.var(axis=-1) + eps)
        y_RD = (x - mean_R[:, None]) * rstd_R[:, None] * wide(g_D)
        return like(y_RD if b_D is None else y_RD + wide(b_D), x_RD), mean_R, rstd_R

    @quiet
    def layernorm_backward(
        self, dy_RD: HostArray, x_RD: HostArray, g_D: HostArray, mean_R: HostArray, rstd_R: HostArray,
        into_g: HostArray, into_b: HostArray | None, accumulate: bool,
    ) -> HostArray:  # fmt: skip
        """dx = rstd * (dn - mean(dn) - n * mean(dn * n)), with n the normalised row and dn = dy * g."""
        dy, rstd = wide(dy_RD), rstd_R[:, None]
        n_RD = (wide(x_RD) - mean_R[:, None]) * rstd
        dn_RD = dy * wide(g_D)
        write(into_g, (dy * n_RD).sum(axis=0), accumulate)
        if into_b is not None:
            write(into_b, dy.sum(axis=0), accumulate)
        centred = dn_RD - dn_RD.mean(axis=-1, keepdims=True) - n_RD * (dn_RD * n_RD).mean(axis=-1, keepdims=True)
        return like(rstd * centred, dy_RD)
