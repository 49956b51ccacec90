"""Every family of operations on a real GPU at odd and at large sizes: equal to the numpy backend, and bit-equal when run twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import pytest

from dcnr.backends.base import Activation, Backend, Precision
from tests.backends import families
from tests.backends.families import Given, Results, on_host
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

SIZES = (1, 7, 33, 127, 128, 129, 511, 512, 513)
VOCABULARIES = (10_000, 32_768)
TOKENS = 65_536

Operation = Callable[[Given], Results]

ODD: dict[str, Operation] = {
    **{f"activation {kind} {size}": partial(families.activation, kind=kind, rows=size, width=size)
       for kind in get_args(Activation) for size in SIZES},
    **{f"linear {kind} {size}": partial(families.linear, kind=kind, rows=size, inputs=64, outputs=size)
       for kind in (None, "gelu", "swiglu") for size in SIZES},
    **{f"linear of {size}": partial(families.linear, kind=None, rows=33, inputs=size, outputs=128, bias=False) for size in SIZES},
    **{f"norm {size}": partial(families.norm, rows=size, width=size) for size in SIZES},
    **{f"residual {size}": partial(families.residual, rate=0.1, rows=129, width=size) for size in SIZES},
    **{f"residual without dropout {size}": partial(families.residual, rate=0.0, rows=size, width=512, full=False) for size in SIZES},
    **{f"attention {size}": partial(families.attention, batch=2, length=size, heads=3, head_dim=64) for size in SIZES},
    **{f"attention without causal mask {size}": partial(families.attention, batch=1, length=size, heads=2, head_dim=64, causal=False)
       for size in SIZES},
    **{f"attention of heads of {size}": partial(families.attention, batch=2, length=129, heads=2, head_dim=size)
       for size in (6, 32, 40, 96, 128)},
    **{f"attention of heads of {size} without rope":
       partial(families.attention, batch=1, length=130, heads=2, head_dim=size, rope=False, bias=False) for size in (7, 32, 64, 96, 128)},
    **{f"attention in pieces, heads of {size}": partial(families.attention_cached, batch=2, head_dim=size, pieces=(129, 1, 1, 62))
       for size in (6, 32, 40, 64, 128, 256)},
    "attention in many pieces": partial(families.attention_cached, batch=1, head_dim=64, pieces=(1000, *[1] * 24), heads=12),
    **{f"embedding {size}": partial(families.embedding, batch=3, length=size, vocabulary=size, width=64) for size in SIZES},
    **{f"embedding of {size}": partial(families.embedding, batch=2, length=33, vocabulary=17, width=size, positions=False)
       for size in SIZES},
    **{f"costs {size}": partial(families.costs, rows=33, width=size) for size in (*SIZES, *VOCABULARIES)},
    **{f"lm head {size}": partial(families.lm_head, rows=size, width=64, vocabulary=size, bias=True) for size in SIZES},
    **{f"lm head of {size}": partial(families.lm_head, rows=33, width=size, vocabulary=513) for size in SIZES},
    **{f"masks {size}": partial(families.masks, rows=size, width=size) for size in SIZES},
    **{f"rotary {size}": partial(families.rotary, batch=2, length=size, width=34) for size in SIZES},
    **{f"arrays {size}": partial(families.arrays, rows=size, width=size) for size in SIZES},
    **{f"optimizer {size}": partial(families.optimizer, count=size) for size in (*SIZES, 1_000_003)},
    "step end": partial(families.step_end, counts=(1_000_003, 4096, 513, 1)),
    "settled step": partial(families.settled_step, counts=(1_000_003, 4096, 513, 1)),
}  # fmt: skip

LARGE: dict[str, Operation] = {
    "activation": partial(families.activation, kind="gelu", rows=TOKENS, width=128),
    "linear": partial(families.linear, kind="gelu", rows=TOKENS, inputs=64, outputs=128),
    "norm": partial(families.norm, rows=TOKENS, width=128),
    "residual": partial(families.residual, rate=0.1, rows=TOKENS, width=128),
    "attention": partial(families.attention, batch=8, length=512, heads=8, head_dim=64),
    **{f"embedding {vocabulary}": partial(families.embedding, batch=128, length=512, vocabulary=vocabulary, width=64)
       for vocabulary in VOCABULARIES},
    **{f"lm head {vocabulary}": partial(families.lm_head, rows=1025, width=128, vocabulary=vocabulary) for vocabulary in VOCABULARIES},
    "masks": partial(families.masks, rows=8192, width=1024),
    "optimizer": partial(families.optimizer, count=10_000_000),
}  # fmt: skip
"""Sizes of production, as far as NumPy follows in a second or so."""

STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")


def same(gpu: Backend, numpy: Backend, operation: Operation, precision: Precision, parameters: Precision | None = None) -> None:
    """Equal to the definition, and bit-equal in a second run."""
    actual, again, wanted = (on_host(backend, operation(Given(backend, precision, parameters))) for backend in (gpu, gpu, numpy))
    assert actual.keys() == wanted.keys()
    for part, array in wanted.items():
        assert_close(actual[part], array, precision, part)
        assert actual[part].tobytes() == again[part].tobytes(), f"{part}: other bits in the second run"


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(gpu: Backend, numpy: Backend, name: str, precision: Precision) -> None:
    """Where one more vector, warp, tile or block begins, and one element before and after."""
    same(gpu, numpy, ODD[name], precision)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LARGE)
def test_large_sizes(gpu: Backend, numpy: Backend, name: str, precision: Precision) -> None:
    """Sums over 65,536 tokens and vocabularies of 32,768 stay within the tolerance of a single row."""
    same(gpu, numpy, LARGE[name], precision)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in ODD if name.startswith("attention") and "of heads" not in name])
def test_attention_with_the_instructions_of_8_0(portable: Backend, numpy: Backend, name: str, precision: Precision) -> None:
    """What a card before Hopper runs; a Hopper runs it too."""
    same(portable, numpy, ODD[name], precision)


@pytest.mark.parametrize(("precision", "parameters"), [("float16", "float32"), ("float32", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize(
    "name", ["linear gelu 129", "norm 512", "norm 129", "residual 512", "attention 129", "embedding 128", "lm head 129"]
)
def test_parameters_may_be_stored_otherwise(gpu: Backend, numpy: Backend, name: str, precision: Precision, parameters: Precision) -> None:
    """As `param_precision` and `activation_precision` allow."""
    same(gpu, numpy, ODD[name], precision, parameters)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_lm_head_of_65536_tokens(gpu: Backend, numpy: Backend, vocabulary: int) -> None:
    """Of which the last 1,000 count: everything equals the definition over those alone."""
    counted, width = 1000, 64
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((TOKENS, width), np.float32), draw.standard_normal((vocabulary, width), np.float32) / 8
    targets = np.where(np.arange(TOKENS) < TOKENS - counted, -1, draw.integers(0, vocabulary, TOKENS))

    def head(backend: Backend, first: int) -> Results:
        into = backend.from_host(np.full((vocabulary, width), 7.0), "float32")
        loss, dx = backend.lm_head_cross_entropy(
            backend.from_host(x[first:], "float16"), backend.from_host(w, "float16"), None, backend.from_host(targets[first:]),
            backend.scalar(1 / counted), backend.scalar(1024.0), into, None, False,
        )  # fmt: skip
        return {"loss": loss, "dx": dx, "dw": into}

    actual, wanted = on_host(gpu, head(gpu, 0)), on_host(numpy, head(numpy, TOKENS - counted))
    assert not actual["dx"][:-counted].any()
    actual["dx"] = actual["dx"][-counted:]
    for part, array in wanted.items():
        assert_close(actual[part], array, "float16", part)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_lm_head_sums_over_all_its_tokens(gpu: Backend, vocabulary: int) -> None:
    """65,536 at once give what 64 times 1,024 give, of which `test_large_sizes` knows that they are right."""
    pieces, width = 64, 64
    draw = np.random.default_rng(1)
    x, w = draw.standard_normal((TOKENS, width), np.float32), draw.standard_normal((vocabulary, width), np.float32) / 8
    x_d, w_d, targets = gpu.from_host(x, "float16"), gpu.from_host(w, "float16"), gpu.from_host(draw.integers(0, vocabulary, TOKENS))
    weight, scale = gpu.scalar(1 / TOKENS), gpu.scalar(2.0**16)
    whole, parts = gpu.zeros((vocabulary, width), "float32"), gpu.zeros((vocabulary, width), "float32")
    loss, dx = gpu.lm_head_cross_entropy(x_d, w_d, None, targets, weight, scale, whole, None, False)
    size = TOKENS // pieces
    done = [
        gpu.lm_head_cross_entropy(x_d[i : i + size], w_d, None, targets[i : i + size], weight, scale, parts, None, i > 0)
        for i in range(0, TOKENS, size)
    ]
    assert_close(gpu.to_host(whole), gpu.to_host(parts), "float16", "dw")
    assert_close(gpu.to_host(dx), np.concatenate([gpu.to_host(piece) for _, piece in done]), "float16", "dx")
    assert_close(float(gpu.to_host(loss)), sum(float(gpu.to_host(one)) for one, _ in done), "float32", "loss")
