"""Forward and gradients of the layers against PyTorch on the CPU, in float32: an implementation that shares no line with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from tests.nodes.cases import Case, case
from tests.nodes.runs import LOSS_SCALE, WEIGHT, example, run
from tests.tolerances import assert_close

torch = pytest.importorskip("torch")
F = torch.nn.functional

Tensor = Any
Params = Mapping[str, Tensor]


def linear(p: Params, x: Tensor) -> Tensor:
    """torch.nn.Linear."""
    return F.linear(x, p["weight"], p.get("bias"))


def layernorm(p: Params, x: Tensor) -> Tensor:
    """torch.nn.LayerNorm."""
    return F.layer_norm(x, x.shape[-1:], p["weight"], p.get("bias"))


def embedding(p: Params, ids: Tensor) -> Tensor:
    """torch.nn.Embedding, plus one for the positions."""
    y = F.embedding(ids, p["weight"])
    return y + p["position_weight"][: ids.shape[1]] if "position_weight" in p else y


def swiglu(p: Params, x: Tensor) -> Tensor:
    """value * silu(gate)."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


def ce(p: Params, logits: Tensor, targets: Tensor) -> Tensor:
    """Summed, times the weight of the step."""
    return WEIGHT * F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-1)


def lm_head(p: Params, x: Tensor, targets: Tensor) -> Tensor:
    """A product and the same cost."""
    return ce(p, linear(p, x), targets)


def mse(p: Params, x: Tensor, target: Tensor) -> Tensor:
    """Mean over features, summed over rows."""
    return WEIGHT * F.mse_loss(x, target, reduction="sum") / x.shape[-1]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions as products of complex numbers."""
    length, width = x.shape[-2:]
    angle = torch.outer(torch.arange(length), theta ** (-torch.arange(0, width, 2) / width))
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def attention(heads: int, causal: bool, theta: float | None, projects: bool = False) -> Callable[[Params, Tensor], Tensor]:
    """scaled_dot_product_attention between two products."""

    def forward(p: Params, x: Tensor) -> Tensor:
        qkv = F.linear(x, p["qkv_weight"], p.get("qkv_bias"))
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if theta is not None:
            q, k = rotate(q, theta), rotate(k, theta)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(-2)
        return F.linear(o, p["out_weight"], p.get("out_bias")) if projects else o

    return forward


IDS = (None, 33)
PAIRS: tuple[tuple[Case, Callable[..., Tensor]], ...] = (
    (case("linear", {"in_dim": 33, "out_dim": 127}, [(7, 33)]), linear),
    (case("linear", {"in_dim": 127, "out_dim": 1, "bias": False}, [(7, 127)]), linear),
    (case("layernorm", {"dim": 127}, [(33, 127)]), layernorm),
    (case("layernorm", {"dim": 33, "bias": False}, [(7, 33)]), layernorm),
    (case("embedder", {"vocab_size": 33, "dim": 7, "seq_len": 127}, [(127,)], ids=(33,)), embedding),
    (case("embedder", {"vocab_size": 7, "dim": 33, "seq_len": 33, "position_encoding": "learned"}, [(7,)], ids=(7,)), embedding),
    (case("attention_head", {"input_dim": 33, "head_dim": 8}, [(33, 33)]), attention(1, True, 10000.0)),
    (case("attention_head", {"input_dim": 7, "head_dim": 7, "position_encoding": "none"}, [(7, 7)]), attention(1, True, None)),
    (case("attention", {"dim": 32, "num_heads": 4, "rope_theta": 100}, [(127, 32)]), attention(4, True, 100.0)),
    (
        case("attention", {"dim": 32, "num_heads": 4, "causal": False, "output_projection": True}, [(33, 32)]),
        attention(4, False, 10000.0, projects=True),
    ),
    (
        case("attention", {"dim": 33, "num_heads": 3, "position_encoding": "none", "bias": False, "output_projection": True}, [(7, 33)]),
        attention(3, True, None, projects=True),
    ),
    (case("relu", {}, [(127,)]), lambda p, x: F.relu(x)),
    (case("gelu", {}, [(33, 127)]), lambda p, x: F.gelu(x)),
    (case("silu", {}, [(33, 127)]), lambda p, x: F.silu(x)),
    (case("swiglu", {}, [(33, 66)]), swiglu),
    (case("cost", {"cost_function": "ce_logits"}, [(127, 33), (127,)], ids=IDS), ce),
    (case("tied_lm_head_ce", {"dim": 7, "vocab_size": 33}, [(127, 7), (127,)], ids=IDS, rows=5), lm_head),
    (case("cost", {"cost_function": "mse"}, [(33, 7), (33, 7)]), mse),
)


@pytest.mark.parametrize(("one", "outside"), PAIRS, ids=[one.name for one, _ in PAIRS])
def test_forward_and_gradients_equal_torch(one: Case, outside: Callable[..., Tensor]) -> None:
    """Outputs, gradients of the inputs, gradients of all parameters."""
    backend = NumpyBackend()
    given = example(one, backend)
    found = run(backend, one, given, "float32")

    inputs = [torch.tensor(x if x.dtype == np.int64 else x.astype(np.float32), requires_grad=x.dtype != np.int64) for x in given.inputs]
    params = {name: torch.tensor(value.astype(np.float32), requires_grad=True) for name, value in given.params.items()}
    y = outside(params, *inputs)
    y.backward(torch.tensor(LOSS_SCALE) if one.is_cost else torch.tensor(given.grads[0].astype(np.float32)))

    assert_close(found.outputs[0], y.detach().numpy(), "float32", "output")
    for slot, grad in enumerate(found.input_grads):
        if grad is not None:
            assert_close(grad, inputs[slot].grad.numpy(), "float32", f"gradient of input {slot}")
    for name, grad in found.param_grads.items():
        assert_close(grad, params[name].grad.numpy(), "float32", f"gradient of {name}")
