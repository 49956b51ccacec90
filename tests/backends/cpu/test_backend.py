"""Every node type on the cpu backend equals the numpy backend, in every precision that can be stored; and threads change no bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcnr.backends.base import Backend, Philox, Precision, Rope
from dcnr.errors import BackendUnavailable
from tests.backends.cpu.pair import CPU, NUMPY, STORED, Array, draw
from tests.nodes.cases import CASES, Case
from tests.nodes.runs import Outcome, example, run
from tests.tolerances import assert_close


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_nodes_equal_the_definition(one: Case, precision: Precision) -> None:
    """Outputs, input gradients and parameter gradients over two micro-batches."""
    given = example(one, NUMPY)
    actual, wanted = (run(backend, one, given, precision, micro_batches=2) for backend in (CPU, NUMPY))
    for name, a, w in _named(actual, wanted):
        assert_close(a, w, precision, name)


def _named(actual: Outcome, wanted: Outcome) -> list[tuple[str, object, object]]:
    pairs: list[tuple[str, object, object]] = [("output", a, w) for a, w in zip(actual.outputs, wanted.outputs, strict=True)]
    for a, w in zip(actual.input_grads, wanted.input_grads, strict=True):
        assert (a is None) == (w is None)
        if w is not None:
            pairs.append(("input gradient", a, w))
    assert actual.param_grads.keys() == wanted.param_grads.keys()
    pairs += [(f"gradient of {name}", actual.param_grads[name], w) for name, w in wanted.param_grads.items()]
    return pairs


def _layer(backend: Backend, seed: int) -> bytes:
    """A small transformer layer, forward and backward, as bytes."""
    width, heads = 96, 3
    x = backend.from_host(draw(4, 33, width, seed=seed))
    w = backend.from_host(draw(3 * width, width, seed=1))
    g = backend.from_host(draw(width, seed=2))
    grad_w, grad_g = backend.zeros((3 * width, width), "float32"), backend.zeros((width,), "float32")
    h, mean, rstd = backend.layernorm(x, g, None, 1e-5)
    qkv, _ = backend.linear(h, w, None)
    o, saved = backend.attention(qkv, None, heads, True, Rope(1e4))
    y = backend.dropout(o, 0.1, Philox(7, 8, 9, 64 * seed), x)
    dqkv = backend.attention_backward(y, o, None, saved, heads, True, Rope(1e4), None, False)
    dh = backend.linear_backward(dqkv, h, w, None, None, None, grad_w, None, False, True)
    dx = backend.layernorm_backward(dh, x, g, mean, rstd, grad_g, None, False)
    return b"".join(backend.to_host(array).tobytes() for array in (y, dx, grad_w, grad_g))


def test_two_threads_give_the_bits_of_one() -> None:
    """Shards that run side by side do not see each other."""
    alone = [_layer(CPU, seed) for seed in range(8)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            assert list(threads.map(lambda seed: _layer(CPU, seed), range(8))) == alone


def test_inputs_are_never_written() -> None:
    """An operation may be given an array that others still read."""
    x, g = draw(7, 33), draw(33)
    arrays = [CPU.from_host(a) for a in (x, g)]
    CPU.activate("gelu", arrays[0])
    CPU.add(arrays[:1] * 3)
    CPU.layernorm(arrays[0], arrays[1], None, 1e-5)
    CPU.linear(arrays[0], arrays[0], None, "silu")
    np.testing.assert_array_equal(arrays[0], x)
    np.testing.assert_array_equal(arrays[1], g)


@pytest.mark.parametrize("layout", ["strided", "Fortran", "read-only"])
def test_any_layout_is_taken(layout: str) -> None:
    """Views and read-only buffers of messages work like arrays of our own."""
    x = {"strided": draw(14, 66)[:, ::2], "Fortran": np.asfortranarray(draw(14, 66)), "read-only": _frozen(draw(14, 66))}[layout]
    np.testing.assert_array_equal(CPU.activate("silu", x), CPU.activate("silu", x.copy(order="C")))


def _frozen(x: Array) -> Array:
    x.flags.writeable = False
    return x


def test_from_host_copies_and_rounds() -> None:
    """Floats take the precision asked for (float32 for float64), integers become int64."""
    x = draw(33)
    y = CPU.from_host(x)
    y[0] = 5
    assert x[0] != 5
    assert CPU.from_host(x.astype(np.float64), "float32").dtype == np.float32
    assert CPU.from_host(x, "float16").tobytes() == x.astype(np.float16).tobytes()
    assert CPU.from_host(np.arange(3, dtype=np.uint16)).dtype == np.int64


def test_float64_is_refused() -> None:
    """Rather than computed at another precision in silence."""
    with pytest.raises(BackendUnavailable, match="float64"):
        CPU.zeros((3,), "float64")


def test_memory_counts_what_is_held() -> None:
    """A megabyte more is a megabyte more."""
    before = CPU.memory().used
    held = [CPU.zeros((300, 1000), "float32") for _ in range(40)]
    assert CPU.memory().used - before >= 0
    assert CPU.memory().used >= sum(array.nbytes for array in held)
    assert CPU.memory().total > CPU.memory().used


def test_a_copy_goes_where_an_earlier_one_was() -> None:
    """Its pages are touched already; nothing of it counts as working memory, and what it was made from may change."""
    x = CPU.zeros((512, 512), "float32")
    held = CPU.memory().used
    places = set()
    for number in range(3):
        x.fill(number)
        copy, scalar = CPU.fetch([x, 0.5]).wait()
        x.fill(-1)
        assert np.all(copy == number)
        assert scalar == 0.5
        places.add(copy.ctypes.data)
        del copy
    assert len(places) == 1
    assert CPU.memory().used == held
