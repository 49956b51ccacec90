"""How close does each operation of the GPU backend come to what the card itself can do?

    python bench/bench_gpu_kernels.py [--family attention,norm] [--precision fp16] [--batch 128] [--out FILE.md]
    python bench/bench_gpu_kernels.py --backend cpu --batch 1 --seq 32 --vocabulary 500 --seconds 0     (a trial without a GPU)

Shapes are those of topology 2 (batch 128 × 512, width 512, vocabulary 32,768). Two ceilings are measured first, in the same run: the
plainest kernel that reads and writes a large array for what moves data, a large square product for what multiplies. Bytes count every
array that must be read or written once, operations those that the mathematics needs (half of the scores, where attention is causal).
Calls take turns on several sets of arrays, so that no cache holds them, and are repeated as one recorded piece, so that the host's time
for issuing them is not in it; a card that is kept busy lowers its clock, so times are of loops of `--seconds`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dcnr.backends.base import AdamStep, Array, Backend, Philox, Precision, Rope, ScalerNumbers, Trained, width
from dcnr.backends.load import load_backend
from dcnr.nodes.spec import store_precision

Call = Callable[[], object]
FLOP, BYTES = "TFLOP/s", "GB/s"
UNITS = {FLOP: 1e12, BYTES: 1e9}
DIM, HEADS = 512, 8
RATE = 0.1
EPS = 1e-5
COPY_BYTES, COPY_WIDTH, SQUARE = 1 << 30, 4096, 8192
"""Sizes of the ceilings on a GPU: bytes and columns of the copy, rows and columns of the product."""
PARAMETERS = 45_000_000
SETS = 4
"""Of arrays; together they are larger than the cache."""
AT_ONCE = 3 * SETS
"""Calls in one recorded piece."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `work` is FLOP or bytes, by `unit`; `make` lays the arrays out."""

    family: str
    name: str
    shape: str
    unit: str
    work: float
    make: Callable[[], Call]
    recorded: bool = True
    """Not where a call uploads numbers."""


@dataclass(frozen=True)
class Bench:
    """A backend and the sizes; R = batch * seq."""

    backend: Backend
    precision: Precision
    batch: int
    seq: int
    vocabulary: int
    base: Any

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * self.seq

    @property
    def size(self) -> int:
        """Bytes of a stored number."""
        return width(self.precision)

    def normal(self, *shape: int, precision: Precision | None = None) -> Array:
        """Normal numbers, repeated from a pool of them."""
        return self.backend.from_host(np.resize(self.base, shape), precision or self.precision)

    def wide(self, *shape: int) -> Array:
        """An accumulator."""
        return self.backend.zeros(shape, "float32")

    def ids(self, *shape: int) -> Array:
        """Drawn like words, a few of them often."""
        drawn = np.random.default_rng(2).zipf(1.2, shape) % self.vocabulary
        return self.backend.from_host(drawn.astype(np.int64))

    def mask(self) -> Philox:
        """A source of masks."""
        return Philox(1, 2, self.backend.scalar(3), 0)


def products(bench: Bench) -> Iterator[Row]:
    """Linear layers of a block and of the head."""
    for inputs, outputs in ((DIM, 3 * DIM), (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM), (DIM, 8 * DIM)):
        shape, flop = f"{bench.rows}×{inputs}×{outputs}", 2.0 * bench.rows * inputs * outputs
        yield Row("products", "linear, bias", shape, FLOP, flop, partial(_linear, bench, inputs, outputs, None))
        yield Row("products", "linear backward, bias", shape, FLOP, 2 * flop, partial(_linear_backward, bench, inputs, outputs, None))
    shape, flop = f"{bench.rows}×{DIM}×{4 * DIM}", 2.0 * bench.rows * DIM * 4 * DIM
    yield Row("products", "linear + gelu", shape, FLOP, flop, lambda: _linear(bench, DIM, 4 * DIM, "gelu"))
    yield Row("products", "linear + gelu backward", shape, FLOP, 2 * flop, lambda: _linear_backward(bench, DIM, 4 * DIM, "gelu"))
    shape, flop = f"{bench.rows}×{DIM}×{8 * DIM}", 2.0 * bench.rows * DIM * 8 * DIM
    yield Row("products", "linear + swiglu", shape, FLOP, flop, lambda: _linear(bench, DIM, 8 * DIM, "swiglu"))
    yield Row("products", "linear + swiglu backward", shape, FLOP, 2 * flop, lambda: _linear_backward(bench, DIM, 8 * DIM, "swiglu"))


def _linear(bench: Bench, inputs: int, outputs: int, activation: Any) -> Call:
    x, w, b = bench.normal(bench.rows, inputs), bench.normal(outputs, inputs), bench.normal(outputs)
    return lambda: bench.backend.linear(x, w, b, activation)


def _linear_backward(bench: Bench, inputs: int, outputs: int, activation: Any) -> Call:
    x, w, b = bench.normal(bench.rows, inputs), bench.normal(outputs, inputs), bench.normal(outputs)
    y, pre = bench.backend.linear(x, w, b, activation)
    dw, db = bench.wide(outputs, inputs), bench.wide(outputs)
    return lambda: bench.backend.linear_backward(y, x, w, b, pre, activation, dw, db, False, True)


def attention(bench: Bench) -> Iterator[Row]:
    """Causal, with bias and RoPE. A backward needs 2.5 times the operations of a forward."""
    shape, flop = f"{bench.batch}×{HEADS}×{bench.seq}×{DIM // HEADS}", 2.0 * bench.rows * bench.seq * DIM
    yield Row("attention", "attention", shape, FLOP, flop, lambda: _attention(bench))
    yield Row("attention", "attention backward", shape, FLOP, 2.5 * flop, lambda: _attention_backward(bench))


def _attention(bench: Bench) -> Call:
    """The same tensor again and again: without a bias, what a call leaves in it is as good an input."""
    qkv, bias = bench.normal(bench.batch, bench.seq, 3 * DIM), bench.backend.zeros((3 * DIM,), bench.precision)
    return lambda: bench.backend.attention(qkv, bias, HEADS, True, Rope(1e4))


def _attention_backward(bench: Bench) -> Call:
    qkv, bias, rope = bench.normal(bench.batch, bench.seq, 3 * DIM), bench.normal(3 * DIM), Rope(1e4)
    o, saved = bench.backend.attention(qkv, bias, HEADS, True, rope)
    do, db = bench.normal(bench.batch, bench.seq, DIM), bench.wide(3 * DIM)
    return lambda: bench.backend.attention_backward(do, o, bias, saved, HEADS, True, rope, db, False)


def activations(bench: Bench) -> Iterator[Row]:
    """Element-wise functions by themselves."""
    for kind, columns in (("gelu", 4 * DIM), ("silu", 4 * DIM), ("relu", 4 * DIM), ("swiglu", 8 * DIM)):
        shape, size = f"{bench.rows}×{columns}", float(bench.rows * columns * bench.size)
        out = size / 2 if kind == "swiglu" else size
        yield Row("activations", kind, shape, BYTES, size + out, partial(_activate, bench, kind, columns))
        yield Row("activations", f"{kind} backward", shape, BYTES, 2 * size + out, partial(_activate_backward, bench, kind, columns))


def _activate(bench: Bench, kind: Any, columns: int) -> Call:
    x = bench.normal(bench.rows, columns)
    return lambda: bench.backend.activate(kind, x)


def _activate_backward(bench: Bench, kind: Any, columns: int) -> Call:
    x, dy = bench.normal(bench.rows, columns), bench.normal(bench.rows, columns // 2 if kind == "swiglu" else columns)
    return lambda: bench.backend.activate_backward(kind, dy, x)


def norms(bench: Bench) -> Iterator[Row]:
    """Alone, and with the residual sum and dropout before it."""
    shape, size = f"{bench.rows}×{DIM}", float(bench.rows * DIM * bench.size)
    yield Row("norm", "layernorm", shape, BYTES, 2 * size, lambda: _layernorm(bench))
    yield Row("norm", "layernorm backward", shape, BYTES, 3 * size, lambda: _layernorm_backward(bench))
    yield Row("norm", "residual_norm", shape, BYTES, 4 * size, lambda: _residual_norm(bench))
    yield Row("norm", "residual_norm backward", shape, BYTES, 5 * size, lambda: _residual_norm_backward(bench))


def _layernorm(bench: Bench) -> Call:
    x, g = bench.normal(bench.rows, DIM), bench.normal(DIM)
    return lambda: bench.backend.layernorm(x, g, g, EPS)


def _layernorm_backward(bench: Bench) -> Call:
    x, g, dg, db = bench.normal(bench.rows, DIM), bench.normal(DIM), bench.wide(DIM), bench.wide(DIM)
    y, mean, rstd = bench.backend.layernorm(x, g, g, EPS)
    return lambda: bench.backend.layernorm_backward(y, x, g, mean, rstd, dg, db, False)


def _residual_norm(bench: Bench) -> Call:
    x, residual, g, rng = bench.normal(bench.rows, DIM), bench.normal(bench.rows, DIM), bench.normal(DIM), bench.mask()
    return lambda: bench.backend.residual_norm(x, g, residual, RATE, rng, g, g, EPS)


def _residual_norm_backward(bench: Bench) -> Call:
    x, g, rng = bench.normal(bench.rows, DIM), bench.normal(DIM), bench.mask()
    total, y, mean, rstd = bench.backend.residual_norm(x, g, x, RATE, rng, g, g, EPS)
    bias, dg, db = bench.wide(DIM), bench.wide(DIM), bench.wide(DIM)
    return lambda: bench.backend.residual_norm_backward(y, x, total, RATE, rng, g, mean, rstd, bias, dg, db, False)


def arrays(bench: Bench) -> Iterator[Row]:
    """What moves, adds, masks and rounds."""
    shape, size = f"{bench.rows}×{DIM}", float(bench.rows * DIM * bench.size)
    backend, rng = bench.backend, bench.mask()

    def of_one(call: Callable[[Array], object]) -> Callable[[], Call]:
        def make() -> Call:
            x = bench.normal(bench.batch, bench.seq, DIM)
            return lambda: call(x)

        return make

    yield Row("arrays", "add", shape, BYTES, 3 * size, of_one(lambda x: backend.add((x, x))))
    yield Row("arrays", "dropout", shape, BYTES, 2 * size, of_one(lambda x: backend.dropout(x, RATE, rng)))
    yield Row("arrays", "dropout + residual", shape, BYTES, 3 * size, of_one(lambda x: backend.dropout(x, RATE, rng, x)))
    yield Row("arrays", "rotate", shape, BYTES, 2 * size, of_one(lambda x: backend.rotate(x, Rope(1e4))))
    yield Row("arrays", "cast to float32", shape, BYTES, size + 4.0 * bench.rows * DIM, of_one(lambda x: backend.cast(x, "float32")))
    yield Row("arrays", "split in 8", shape, BYTES, 2 * size, of_one(lambda x: backend.split(x, (DIM // 8,) * 8, -1)))
    yield Row("arrays", "concatenate 2", shape, BYTES, 4 * size, of_one(lambda x: backend.concatenate((x, x), -1)))


def embeddings(bench: Bench) -> Iterator[Row]:
    """Rows of a table, and sums into it."""
    shape, size = f"{bench.rows} of {bench.vocabulary}×{DIM}", float(bench.rows * DIM * bench.size)
    yield Row("embedding", "embedding", shape, BYTES, 2 * size, lambda: _embedding(bench))
    table = 4.0 * bench.vocabulary * DIM
    yield Row("embedding", "embedding backward", shape, BYTES, size + table, lambda: _embedding_backward(bench))


def _embedding(bench: Bench) -> Call:
    ids, w = bench.ids(bench.batch, bench.seq), bench.normal(bench.vocabulary, DIM)
    return lambda: bench.backend.embedding(ids, w, None, bench.precision)


def _embedding_backward(bench: Bench) -> Call:
    ids, dw, dy = bench.ids(bench.batch, bench.seq), bench.wide(bench.vocabulary, DIM), bench.normal(bench.batch, bench.seq, DIM)
    return lambda: bench.backend.embedding_backward(dy, ids, dw, None, False)


def costs(bench: Bench) -> Iterator[Row]:
    """The LM head with its cross-entropy; cross-entropy alone on an eighth of the rows, since it holds all logits."""
    some = max(1, bench.rows // 8)
    size = float(some * bench.vocabulary * bench.size)
    yield Row("cost", "cross_entropy", f"{some}×{bench.vocabulary}", BYTES, 2 * size, lambda: _cross_entropy(bench, some))
    flop = 6.0 * bench.rows * DIM * bench.vocabulary
    yield Row("cost", "lm_head_cross_entropy", f"{bench.rows}×{DIM}×{bench.vocabulary}", FLOP, flop, lambda: _lm_head(bench))


def _cross_entropy(bench: Bench, rows: int) -> Call:
    logits, targets = bench.normal(rows, bench.vocabulary), bench.ids(rows)
    weight, scale = bench.backend.scalar(1 / rows), bench.backend.scalar(1024.0)
    return lambda: bench.backend.cross_entropy(logits, targets, weight, scale)


def _lm_head(bench: Bench) -> Call:
    x, w, targets = bench.normal(bench.rows, DIM), bench.normal(bench.vocabulary, DIM), bench.ids(bench.rows)
    weight, scale, dw = bench.backend.scalar(1 / bench.rows), bench.backend.scalar(1024.0), bench.wide(bench.vocabulary, DIM)
    return lambda: bench.backend.lm_head_cross_entropy(x, w, None, targets, weight, scale, dw, None, False)


def optimizer(bench: Bench) -> Iterator[Row]:
    """The end of a step for all parameters at once: measure, decide, Adam, round. Gradient 8 bytes (read twice), master and moments 24."""
    count = PARAMETERS if bench.rows > 1 << 15 else 1 << 16
    nbytes = float(count * (8 + 24 + bench.size))
    if not bench.backend.runs_shards:
        yield Row("optimizer", "measure, decide, Adam", f"{count:,}", BYTES, nbytes, partial(_step_end, bench, count), False)


def _trained(bench: Bench, count: int) -> Trained:
    master = bench.normal(count, precision="float32")
    gradients = bench.normal(1, count, precision="float32")
    low = None if bench.precision == "float32" else bench.normal(count)
    return Trained(master, low, gradients, (), bench.wide(count), bench.wide(count))


def _step_end(bench: Bench, count: int) -> Call:
    end = bench.backend.step_end([_trained(bench, count)], [1], bench.backend.scalar(1.0))
    assert end is not None
    end.start(ScalerNumbers(0, 1.0, 0, False, 2000, 1.0, 1.0))
    candidates = [[AdamStep(1e-6, 0.9, 0.999, 1e-8, 0.0, 0.1, 0.01, 1.0)]]
    update = itertools.count(1)
    return lambda: end.settle(next(update), candidates, 1.0)


FAMILIES = {
    "products": products, "attention": attention, "activations": activations, "norm": norms, "arrays": arrays, "embedding": embeddings,
    "cost": costs, "optimizer": optimizer,
}  # fmt: skip


def milliseconds(backend: Backend, make: Callable[[], Call], seconds: float, recorded: bool = True) -> float:
    """Of one call, from a loop of `seconds`."""
    recording = backend.recording() if recorded else None
    count = 1 if recording is None else AT_ONCE
    calls = itertools.cycle([make() for _ in range(1 if recording is None else SETS)])

    def several() -> None:
        for call in itertools.islice(calls, count):
            call()

    def once() -> None:
        if recording is None:
            several()
        else:
            recording.run(several)

    for _ in range(3):  # compile; run, record and replay
        once()
    backend.synchronize()
    done, start = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - start < seconds:
        for _ in range(4):
            once()
        backend.synchronize()
        done += 4 * count
    return (time.perf_counter() - start) / done * 1e3


def ceilings(bench: Bench, seconds: float) -> dict[str, float]:
    """Units a second of a large copy and of a large product."""
    large = bench.rows > 1 << 15
    count, square = (COPY_BYTES // bench.size, SQUARE) if large else (1 << 20, 256)
    source, x, w = bench.normal(count // COPY_WIDTH, COPY_WIDTH), bench.normal(square, square), bench.normal(square, square)
    copy_ms = milliseconds(bench.backend, lambda: lambda: bench.backend.activate("relu", source), seconds)
    product_ms = milliseconds(bench.backend, lambda: lambda: bench.backend.linear(x, w, None), seconds)
    return {BYTES: 2.0 * count * bench.size / copy_ms / 1e6, FLOP: 2.0 * square**3 / product_ms / 1e9}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--family", help=f"some of {', '.join(FAMILIES)}, with commas between")
    parser.add_argument("--precision", type=store_precision, default="float16")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=0.5, help="of every loop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = np.random.default_rng(1).standard_normal(1 << 20, np.float32)
    bench = Bench(load_backend(args.backend), args.precision, args.batch, args.seq, args.vocabulary, base)
    best = ceilings(bench, args.seconds)
    lines = [
        f"{bench.precision}; ceilings: copy {best[BYTES]:.0f} {BYTES}, product {best[FLOP]:.4g} {FLOP}",
        "",
        "| operation | shape | ms | rate | of the ceiling |",
        "|---|---|---|---|---|",
    ]
    for family in args.family.split(",") if args.family else FAMILIES:
        for row in FAMILIES[family](bench):
            ms = milliseconds(bench.backend, row.make, args.seconds, row.recorded)
            rate = row.work / ms * 1e3 / UNITS[row.unit]
            lines.append(f"| {row.name} | {row.shape} | {ms:.4f} | {rate:,.4g} {row.unit} | {rate / best[row.unit]:.0%} |")
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
