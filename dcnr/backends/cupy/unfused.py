"""Operations put together from their parts, for whom the fused path is suspect (`DCNR_FUSED_LM_HEAD=0`): slower, and all in memory."""

from __future__ import annotations

from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.cost import cross_entropy
from dcnr.backends.cupy.device import Device
from dcnr.backends.cupy.linear import linear, linear_backward


def lm_head_cross_entropy(
    device: Device, x_RD: DeviceArray, w_VD: DeviceArray, b_V: DeviceArray | None, targets_R: DeviceArray,
    weight: DeviceArray, grad_scale: DeviceArray, into_w: DeviceArray | None, into_b: DeviceArray | None, accumulate: bool,
) -> tuple[DeviceArray, DeviceArray | None]:  # fmt: skip
    """See `Backend.lm_head_cross_entropy`; holds all logits and their gradient."""
    logits_RV, _ = linear(device, x_RD, w_VD, b_V, None)
    loss, dlogits_RV = cross_entropy(device, logits_RV, targets_R, weight, grad_scale)
    if into_w is None:
        return loss, None
    return loss, linear_backward(device, dlogits_RV, x_RD, w_VD, b_V, None, None, into_w, into_b, accumulate, True)
