"""How fast is each operation of the cpu backend, on one thread, against numpy's definition and against PyTorch?

usage: python bench/bench_kernels.py [--seconds S]   (S: time spent on each number)
Prints one table: the operation, its shape, median ms, GFLOP/s of products or GB/s of everything else (arrays read and written once),
and how many times longer the numpy backend and PyTorch take ("-" where PyTorch is not installed or has no single call for it).
Shapes are those of one row shard (half a batch) of `shakespeare_char` in its CPU size, and of topology 1 at batch 4.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcnr.backends.base import AdamStep, Backend, Philox, Rope
from dcnr.backends.load import load_backend

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table. `work` is FLOP or bytes, by `unit`; `torch` makes the call of PyTorch."""

    name: str
    shape: str
    unit: str
    work: float
    call: Callable[[Backend], Call]
    torch: Callable[[Any], Call] | None = None


def normal(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def products(rows: int, inputs: int, outputs: int) -> Iterator[Row]:
    x, w, b, dy = normal(rows, inputs), normal(outputs, inputs), normal(outputs), normal(rows, outputs)
    dw, db = np.empty_like(w), np.empty_like(b)
    shape, flop = f"{rows}x{inputs}x{outputs}", 2.0 * rows * inputs * outputs
    yield Row("linear", shape, "GFLOP/s", flop, lambda be: lambda: be.linear(x, w, b),
              lambda t: _torch_call(t, t.nn.functional.linear, x, w, b))  # fmt: skip
    yield Row("linear + gelu", shape, "GFLOP/s", flop, lambda be: lambda: be.linear(x, w, b, "gelu"),
              lambda t: _torch_call(t, lambda x, w, b: t.nn.functional.gelu(t.nn.functional.linear(x, w, b)), x, w, b))  # fmt: skip
    yield Row("linear backward", shape, "GFLOP/s", 2 * flop,
              lambda be: lambda: be.linear_backward(dy, x, w, b, None, None, dw, db, False, True),
              lambda t: _torch_call(t, lambda x, w, dy: (dy @ w, dy.T @ x, dy.sum(0)), x, w, dy))  # fmt: skip


def attention(rows: int, positions: int, heads: int, width: int, rope: Rope | None) -> Iterator[Row]:
    qkv, do, q = normal(rows, positions, 3 * heads * width), normal(rows, positions, heads * width), normal(rows, heads, positions, width)
    b = np.zeros(3 * heads * width, np.float32)  # it is added in place, once a call
    shape, flop = f"{rows}x{positions}x{heads}x{width}", 4.0 * rows * heads * positions * positions * width
    name = "attention" if rope is None else "attention, rope"

    def with_torch(t: Any) -> Call:
        return _torch_call(t, lambda q: t.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), q)

    yield Row(name, shape, "GFLOP/s", flop, lambda be: lambda: be.attention(qkv, b, heads, True, rope), None if rope else with_torch)
    yield Row(f"{name} backward", shape, "GFLOP/s", 2 * flop, lambda be: _attention_backward(be, (qkv, b), do, heads, rope))


def _attention_backward(backend: Backend, qkv_and_bias: tuple[Any, Any], do: Any, heads: int, rope: Rope | None) -> Call:
    qkv, b = qkv_and_bias
    db = np.empty_like(b)
    o, saved = backend.attention(qkv.copy(), b, heads, True, rope)
    return lambda: backend.attention_backward(do, o, b, saved, heads, True, rope, db, False)


def streams() -> Iterator[Row]:
    x, dy = normal(256, 2048), normal(256, 2048)
    g, dg = normal(2048), normal(2048)
    rng, size = Philox(1, 2, 3, 0), float(x.nbytes)
    yield Row("gelu", "256x2048", "GB/s", 2 * size, lambda be: lambda: be.activate("gelu", x),
              lambda t: _torch_call(t, t.nn.functional.gelu, x))  # fmt: skip
    yield Row("gelu backward", "256x2048", "GB/s", 3 * size, lambda be: lambda: be.activate_backward("gelu", dy, x),
              lambda t: _torch_call(t, t.ops.aten.gelu_backward, dy, x))  # fmt: skip
    yield Row("swiglu", "256x2048", "GB/s", 1.5 * size, lambda be: lambda: be.activate("swiglu", x))
    yield Row("add", "256x2048", "GB/s", 3 * size, lambda be: lambda: be.add((x, dy)), lambda t: _torch_call(t, t.add, x, dy))
    yield Row("dropout + add", "256x2048", "GB/s", 3 * size, lambda be: lambda: be.dropout(x, 0.1, rng, dy),
              lambda t: _torch_call(t, lambda x, r: t.nn.functional.dropout(x, 0.1) + r, x, dy))  # fmt: skip
    yield Row("layernorm", "256x2048", "GB/s", 2 * size, lambda be: lambda: be.layernorm(x, g, g, 1e-5),
              lambda t: _torch_call(t, lambda x, g: t.nn.functional.layer_norm(x, (2048,), g, g), x, g))  # fmt: skip
    yield Row(
        "dropout + add + layernorm", "256x2048", "GB/s", 4 * size, lambda be: lambda: be.residual_norm(x, g, dy, 0.1, rng, g, g, 1e-5)
    )
    yield Row("  and its backward", "256x2048", "GB/s", 5 * size, lambda be: _residual_norm_backward(be, dy, x, g, dg))
    yield Row("layernorm backward", "256x2048", "GB/s", 3 * size, lambda be: _layernorm_backward(be, dy, x, g, dg))
    yield Row("cast to bfloat16", "256x2048", "GB/s", 1.5 * size, lambda be: lambda: be.cast(x, "bfloat16"),
              lambda t: _torch_call(t, lambda x: x.bfloat16(), x))  # fmt: skip
    yield Row("cast to float16", "256x2048", "GB/s", 1.5 * size, lambda be: lambda: be.cast(x, "float16"),
              lambda t: _torch_call(t, lambda x: x.half(), x))  # fmt: skip


def _layernorm_backward(backend: Backend, dy: Any, x: Any, g: Any, dg: Any) -> Call:
    _, mean, rstd = backend.layernorm(x, g, g, 1e-5)
    return lambda: backend.layernorm_backward(dy, x, g, mean, rstd, dg, dg.copy(), False)


def _residual_norm_backward(backend: Backend, dy: Any, x: Any, g: Any, dg: Any) -> Call:
    rng, db, dbias = Philox(1, 2, 3, 0), dg.copy(), dg.copy()
    total, _, mean, rstd = backend.residual_norm(x, g, dy, 0.1, rng, g, g, 1e-5)
    return lambda: backend.residual_norm_backward(dy, x, total, 0.1, rng, g, mean, rstd, dbias, dg, db, False)


def ends() -> Iterator[Row]:
    x, w, logits = normal(256, 512), normal(10000, 512), normal(256, 10000)
    ids, dw = np.random.default_rng(0).integers(0, 10000, 256), np.empty((10000, 512), np.float32)
    count = 2**22
    weights, grads, m, v = normal(count), normal(2, count), normal(count), np.abs(normal(count))
    step = AdamStep(1e-3, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 1.0)
    yield Row("cross entropy", "256x10000", "GB/s", 2.0 * logits.nbytes, lambda be: lambda: be.cross_entropy(logits, ids, 1.0, 1.0))
    yield Row("lm head + cross entropy", "256x512x10000", "GFLOP/s", 6.0 * 256 * 512 * 10000,
              lambda be: lambda: be.lm_head_cross_entropy(x, w, None, ids, 1.0, 1.0, dw, None, False))  # fmt: skip
    yield Row("fold 2 shards", "4M", "GB/s", 3.0 * weights.nbytes, lambda be: lambda: be.fold_shards(grads))
    yield Row("adam", "4M", "GB/s", 7.0 * weights.nbytes, lambda be: lambda: be.adam(step, weights, grads[0], m, v, None))


def _torch_call(torch: Any, function: Callable[..., object], *arrays: Any) -> Call:
    tensors = [torch.from_numpy(array) for array in arrays]
    return lambda: function(*tensors)


def rows() -> Iterator[Row]:
    """Every line of the table."""
    yield from products(384, 128, 512)
    yield from products(384, 512, 128)
    yield from products(256, 512, 2048)
    yield from products(256, 2048, 512)
    yield from attention(6, 64, 4, 32, None)
    yield from attention(2, 128, 8, 64, Rope(1e4))
    yield from streams()
    yield from ends()


def median_ms(call: Call, seconds: float) -> float:
    """Median over as many calls as fit, at least five, after two that warm up."""
    call(), call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each number")
    seconds = parser.parse_args().seconds
    cpu, numpy = load_backend("cpu"), load_backend("numpy")
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is not None:
        torch.set_num_threads(1)
    print(f"{'operation':<26}{'shape':<16}{'ms':>9}  {'rate':>16}{'numpy x':>9}{'torch x':>9}")
    for row in rows():
        ms = median_ms(row.call(cpu), seconds)
        definition = median_ms(row.call(numpy), seconds) / ms
        other = f"{median_ms(row.torch(torch), seconds) / ms:.2f}" if torch is not None and row.torch is not None else "-"
        print(f"{row.name:<26}{row.shape:<16}{ms:>9.3f}  {row.work / ms / 1e6:>8.1f} {row.unit:<7}{definition:>9.2f}{other:>9}", flush=True)


if __name__ == "__main__":
    main()
