"""Layer normalisation, alone or of a residual sum. Legend: `dcnr.backends.base`."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray, Philox
from dcnr.backends.numpy.activation import dropped
from dcnr.backends.numpy.wide import like, quiet, wide, write


def normalise(x_RD: HostArray, g_D: HostArray, b_D: HostArray | None, eps: float) -> tuple[HostArray, HostArray, HostArray]:
    """(y, mean, rstd) of wide `x`."""
    mean_R = x_RD.mean(axis=-1)
    rstd_R = 1 / np.sqrt(x_RD.var(axis=-1) + eps)
    y_RD = (x_RD - mean_R[:, None]) * rstd_R[:, None] * wide(g_D)
    return y_RD if b_D is None else y_RD + wide(b_D), mean_R, rstd_R


def normalise_backward(
    dy_RD: HostArray, x_RD: HostArray, g_D: HostArray, mean_R: HostArray, rstd_R: HostArray,
    into_g: HostArray, into_b: HostArray | None, accumulate: bool,
) -> HostArray:  # fmt: skip
    """dx = rstd * (dn - mean(dn) - n * mean(dn * n)), with n the normalised row and dn = dy * g."""
    rstd = rstd_R[:, None]
    n_RD = (x_RD - mean_R[:, None]) * rstd
    dn_RD = dy_RD * wide(g_D)
    write(into_g, (dy_RD * n_RD).sum(axis=0), accumulate)
    if into_b is not None:
        write(into_b, dy_RD.sum(axis=0), accumulate)
    return np.asarray(rstd * (dn_RD - dn_RD.mean(axis=-1, keepdims=True) - n_RD * (dn_RD * n_RD).mean(axis=-1, keepdims=True)))


class NormOps:
    """y = (x - mean) * rstd * g + b, row by row."""

    @quiet
    def layernorm(self, x_RD: HostArray, g_D: HostArray, b_D: HostArray | None, eps: float) -> tuple[HostArray, HostArray, HostArray]:
        """(y, mean, rstd)."""
        y_RD, mean_R, rstd_R = normalise(wide(x_RD), g_D, b_D, eps)
        return like(y_RD, x_RD), mean_R, rstd_R

    @quiet
    def layernorm_backward(
        self, dy_RD: HostArray, x_RD: HostArray, g_D: HostArray, mean_R: HostArray, rstd_R: HostArray,
        into_g: HostArray, into_b: HostArray | None, accumulate: bool,
    ) -> HostArray:  # fmt: skip
        """dx."""
        return like(normalise_backward(wide(dy_RD), wide(x_RD), g_D, mean_R, rstd_R, into_g, into_b, accumulate), dy_RD)

    @quiet
    def residual_norm(
        self, x_RD: HostArray, bias_D: HostArray | None, residual_RD: HostArray, rate: float, rng: Philox | None,
        g_D: HostArray, b_D: HostArray | None, eps: float,
    ) -> tuple[HostArray, HostArray, HostArray, HostArray]:  # fmt: skip
        """(sum, y, mean, rstd). The norm reads the sum as it is stored, as its backward will."""
        branch_RD = wide(x_RD) if bias_D is None else wide(x_RD) + wide(bias_D)
        if rng is not None:
            branch_RD = dropped(branch_RD, rate, rng)
        sum_RD = like(branch_RD + wide(residual_RD), x_RD)
        y_RD, mean_R, rstd_R = normalise(wide(sum_RD), g_D, b_D, eps)
        return sum_RD, like(y_RD, x_RD), mean_R, rstd_R

    @quiet
    def residual_norm_backward(
        self, dy_RD: HostArray, dsum_RD: HostArray | None, sum_RD: HostArray, rate: float, rng: Philox | None,
        g_D: HostArray, mean_R: HostArray, rstd_R: HostArray,
        into_bias: HostArray | None, into_g: HostArray, into_b: HostArray | None, accumulate: bool,
    ) -> tuple[HostArray, HostArray]:  # fmt: skip
        """(dx, dresidual), which are one array where nothing is dropped."""
        d_RD = normalise_backward(wide(dy_RD), wide(sum_RD), g_D, mean_R, rstd_R, into_g, into_b, accumulate)
        if dsum_RD is not None:
            d_RD = wide(dsum_RD) + d_RD
        dx_RD = d_RD if rng is None else dropped(d_RD, rate, rng)
        if into_bias is not None:
            write(into_bias, dx_RD.sum(axis=0), accumulate)
        dresidual_RD = like(d_RD, dy_RD)
        return dresidual_RD if rng is None else like(dx_RD, dy_RD), dresidual_RD
