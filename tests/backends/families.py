"""Every operation of a `Backend` at any size, family by family: the same inputs on each backend, and all results by name.

They serve the emulator (small sizes), real GPUs (all sizes) and the check of what has to be compiled (sizes of production, no arithmetic).
Accumulators begin with garbage, are written once and added to once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

from dcnr.backends.base import Activation, AdamStep, Array, Backend, HostArray, Philox, Precision, Rope, ScalerNumbers, SgdStep, Trained

Results = dict[str, Array]
WEIGHT, SCALE = 0.25, 8.0
ADAM = AdamStep(1e-2, 0.9, 0.99, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.99**3, 0.5)
SGD = SgdStep(1e-2, 0.9, 0.1, 0.5)


@dataclass
class Given:
    """Inputs, the same for every backend: drawn from how many were drawn before."""

    backend: Backend
    precision: Precision
    parameters: Precision | None = None
    """What weights, gains and biases are stored as, if not as everything else."""
    _drawn: int = field(default=0, init=False)

    def numbers(self, *shape: int, scale: float = 1.0, precision: Precision | None = None) -> Array:
        """Normal numbers."""
        return self.backend.from_host(self._draw().standard_normal(shape, np.float32) * np.float32(scale), precision or self.precision)

    def parameter(self, *shape: int, scale: float = 1.0) -> Array:
        """The same, as parameters are stored."""
        return self.numbers(*shape, scale=scale, precision=self.parameters)

    def probabilities(self, rows: int, width: int) -> Array:
        """Between 0.1 and 1."""
        return self.backend.from_host(self._draw().uniform(0.1, 1, (rows, width)), self.precision)

    def ids(self, *shape: int, below: int, ignored: int = 0) -> Array:
        """Ids; the first `ignored` of them negative."""
        ids = self._draw().integers(0, below, shape)
        ids.reshape(-1)[:ignored] = -1
        return self.backend.from_host(ids)

    def accumulator(self, *shape: int) -> Array:
        """A float32 gradient that holds something."""
        return self.numbers(*shape, scale=100.0, precision="float32")

    def philox(self, width: int) -> Philox:
        """Of a step, for rows of `width` somewhere inside a batch."""
        return Philox(2**40 + 7, 99, self.backend.scalar(5), 12345 * width)

    def _draw(self) -> np.random.Generator:
        self._drawn += 1
        return np.random.default_rng(self._drawn)


def activation(given: Given, kind: Activation, rows: int, width: int) -> Results:
    """Forward and backward; swiglu takes 2 * width."""
    wide = 2 * width if kind == "swiglu" else width
    x, dy = given.numbers(rows, wide, scale=3.0), given.numbers(rows, width)
    return {"y": given.backend.activate(kind, x), "dx": given.backend.activate_backward(kind, dy, x)}


def linear(given: Given, kind: Activation | None, rows: int, inputs: int, outputs: int, bias: bool = True) -> Results:
    """A product, its bias and its activation."""
    wide = 2 * outputs if kind == "swiglu" else outputs
    x, dy = given.numbers(rows, inputs), given.numbers(rows, outputs)
    w, b = given.parameter(wide, inputs, scale=inputs**-0.5), given.parameter(wide) if bias else None
    into_w, into_b = given.accumulator(wide, inputs), given.accumulator(wide) if bias else None
    y, pre = given.backend.linear(x, w, b, kind)
    for accumulate in (False, True):
        dx = given.backend.linear_backward(dy, x, w, b, pre, kind, into_w, into_b, accumulate, True)
    return {"y": y, "dx": dx, "dw": into_w} | ({"db": into_b} if bias else {})


def norm(given: Given, rows: int, width: int, bias: bool = True) -> Results:
    """Layernorm."""
    x, dy, g, b = given.numbers(rows, width), given.numbers(rows, width), given.parameter(width), given.parameter(width) if bias else None
    into_g, into_b = given.accumulator(width), given.accumulator(width) if bias else None
    y, mean, rstd = given.backend.layernorm(x, g, b, 1e-5)
    for accumulate in (False, True):
        dx = given.backend.layernorm_backward(dy, x, g, mean, rstd, into_g, into_b, accumulate)
    return {"y": y, "mean": mean, "rstd": rstd, "dx": dx, "dg": into_g} | ({"db": into_b} if bias else {})


def residual(given: Given, rate: float, rows: int, width: int, full: bool = True) -> Results:
    """Dropout, sum and layernorm; `full`: with biases and with a gradient of the sum."""
    x, stream, dy = (given.numbers(rows, width) for _ in range(3))
    g, bias, b = given.parameter(width), given.parameter(width) if full else None, given.parameter(width) if full else None
    dsum = given.numbers(rows, width) if full else None
    into = [given.accumulator(width) if wanted else None for wanted in (full, True, full)]
    rng = given.philox(width) if rate else None
    total, y, mean, rstd = given.backend.residual_norm(x, bias, stream, rate, rng, g, b, 1e-5)
    for accumulate in (False, True):
        dx, dstream = given.backend.residual_norm_backward(dy, dsum, total, rate, rng, g, mean, rstd, into[0], into[1], into[2], accumulate)
    named = {"dbias": into[0], "dg": into[1], "db": into[2]}
    return {"sum": total, "y": y, "mean": mean, "rstd": rstd, "dx": dx, "dresidual": dstream} | {
        k: v for k, v in named.items() if v is not None
    }


def attention(
    given: Given, batch: int, length: int, heads: int, head_dim: int, causal: bool = True, rope: bool = True, bias: bool = True
) -> Results:
    """All heads, with what the projection before them leaves to them."""
    width = heads * head_dim
    qkv, do = given.numbers(batch, length, 3 * width), given.numbers(batch, length, width)
    b, into = (given.parameter(3 * width), given.accumulator(3 * width)) if bias else (None, None)
    turn = Rope(1e4) if rope else None
    o, saved = given.backend.attention(qkv, b, heads, causal, turn)
    for accumulate in (False, True):
        dqkv = given.backend.attention_backward(do, o, b, saved, heads, causal, turn, into, accumulate)
    return {"o": o, "dqkv": dqkv} | ({"dbias": into} if bias else {})


def attention_cached(
    given: Given, batch: int, head_dim: int, pieces: tuple[int, ...], heads: int = 2, rope: bool = True, bias: bool = True
) -> Results:
    """A sequence in pieces, with more room for what is kept than it takes; what is kept counts too."""
    width, turn = heads * head_dim, Rope(1e4) if rope else None
    b, into = given.parameter(3 * width) if bias else None, given.backend.zeros((batch, sum(pieces) + 3, 2 * width), given.precision)
    found, first = {}, 0
    for length in pieces:
        qkv = given.numbers(batch, length, 3 * width)
        found[f"o from {first}"] = given.backend.attention_cached(qkv, b, heads, turn, into, first)
        first += length
    return found | {"kept": into}


def embedding(given: Given, batch: int, length: int, vocabulary: int, width: int, positions: bool = True) -> Results:
    """Lookup and its gradient; ids repeat."""
    ids, w, dy = given.ids(batch, length, below=vocabulary), given.parameter(vocabulary, width), given.numbers(batch, length, width)
    table, into_table = (given.parameter(length + 3, width), given.accumulator(length + 3, width)) if positions else (None, None)
    into = given.accumulator(vocabulary, width)
    y = given.backend.embedding(ids, w, table, given.precision)
    for accumulate in (False, True):
        given.backend.embedding_backward(dy, ids, into, into_table, accumulate)
    return {"y": y, "dw": into} | ({"dpositions": into_table} if positions else {})


def costs(given: Given, rows: int, width: int) -> Results:
    """The three costs; mean squares of numbers and of ids."""
    backend = given.backend
    weight, scale, targets = backend.scalar(WEIGHT), backend.scalar(SCALE), given.ids(rows, below=width, ignored=rows // 3)
    results = {
        "cross entropy": backend.cross_entropy(given.numbers(rows, width, scale=3.0), targets, weight, scale),
        "of probabilities": backend.cross_entropy_of_probabilities(given.probabilities(rows, width), targets, weight, scale),
        "mean squares": backend.mean_squared_error(given.numbers(rows, width), given.numbers(rows, width), weight, scale),
        "mean squares of ids": backend.mean_squared_error(given.numbers(rows, width), targets, weight, scale),
    }
    return {f"{name}: {what}": array for name, pair in results.items() for what, array in zip(("loss", "dx"), pair, strict=True)}


def lm_head(given: Given, rows: int, width: int, vocabulary: int, bias: bool = False, ignored: int = 1) -> Results:
    """Training, and validation with the loss alone."""
    backend, weight, scale = given.backend, given.backend.scalar(WEIGHT), given.backend.scalar(SCALE)
    x, w = given.numbers(rows, width), given.parameter(vocabulary, width, scale=width**-0.5)
    b, into_b = (given.parameter(vocabulary), given.accumulator(vocabulary)) if bias else (None, None)
    targets, into = given.ids(rows, below=vocabulary, ignored=ignored if rows > 1 else 0), given.accumulator(vocabulary, width)
    for accumulate in (False, True):
        loss, dx = backend.lm_head_cross_entropy(x, w, b, targets, weight, scale, into, into_b, accumulate)
    alone, _ = backend.lm_head_cross_entropy(x, w, b, targets, weight, scale, None, None, False)
    return {"loss": loss, "dx": dx, "dw": into, "loss alone": alone} | ({"db": into_b} if bias else {})


def masks(given: Given, rows: int, width: int) -> Results:
    """Random and causal ones."""
    backend, x, stream, rng = given.backend, given.numbers(rows, width), given.numbers(rows, width), given.philox(width)
    return {
        "dropout": backend.dropout(x, 0.1, rng),
        "dropout and residual": backend.dropout(x, 0.5, rng, stream),
        "random mask": backend.random_mask(x, 0.3, rng),
        "causal": backend.causal_mask(x, -1e4),
    }


def rotary(given: Given, batch: int, length: int, width: int) -> Results:
    """Both ways."""
    x = given.numbers(batch, length, width)
    return {
        "turned": given.backend.rotate(x, Rope(1e4)),
        "back": given.backend.rotate(x, Rope(1e4), backward=True),
        "from a later position": given.backend.rotate(x, Rope(1e4, first=33)),
    }


def arrays(given: Given, rows: int, width: int) -> Results:
    """Sums, pieces, copies and casts."""
    backend = given.backend
    x, y, z = (given.numbers(rows, width) for _ in range(3))
    narrow = given.numbers(rows, 3)
    into, copied, total = given.accumulator(rows, width), backend.empty((rows, width), "float32"), backend.zeros((rows, width), "float32")
    backend.copy_into(copied, x)
    backend.add_into(total, into)
    backend.add_into(total, into)
    parts = backend.split(backend.concatenate([x, narrow, y], -1), (width, 3, width), -1)
    return {
        "two": backend.add([x, y]), "three": backend.add([x, y, z]), "joined": backend.concatenate([x, y], 0), "copied": copied,
        "total": total, "left": parts[0], "middle": parts[1], "right": parts[2], "rows": backend.split(z, (rows - 1, 1), 0)[1],
        "of ids": backend.cast(given.ids(rows, width, below=1000), given.precision),
        "wide": backend.cast(x, "float32"), "half": backend.cast(into, "float16"),
    }  # fmt: skip


def optimizer(given: Given, count: int) -> Results:
    """Updates one by one, with and without rounded copies; the sum of squares is the host's."""
    backend = given.backend
    w, m, low = given.accumulator(2, count), given.numbers(2, count, precision="float32"), given.numbers(2, count)
    v = backend.from_host(np.abs(backend.to_host(given.numbers(count, precision="float32"))), "float32")
    grads = given.accumulator(3, count)
    squares, finite = backend.fold_shards(grads)
    backend.adam(ADAM, w[0], grads[0], m[0], v, low[0])
    backend.sgd(SGD, w[1], grads[0], m[1], None)
    backend.sgd(SGD, w[1], grads[0], None, low[1])
    folded = {"squares": squares, "finite": float(finite), "sum": grads[0]}
    return folded | {"w": w, "m": m, "v": v, "low": low}


def step_end(given: Given, counts: tuple[int, ...]) -> Results:
    """Measure and update everything at once; where that does not exist, what it stands for, one parameter after the other."""
    backend = given.backend
    trained = [_trained(given, count, index) for index, count in enumerate(counts)]
    steps = [SGD if one.v is None else ADAM for one in trained]
    end = backend.step_end(trained, [1] * len(counts), backend.scalar(SCALE))
    if end is None:
        measured = _measured(backend, trained)
        _update(backend, trained, 0.5)
    else:
        measured = end.measure()
        end.update(steps)
    return {"measured": measured} | _named(trained)


def settled_step(given: Given, counts: tuple[int, ...], clip_norm: float = 1.0) -> Results:
    """The same with a decision between, by the device where it can decide."""
    backend = given.backend
    trained, scale = [_trained(given, count, index) for index, count in enumerate(counts)], backend.scalar(SCALE)
    steps = [SGD if one.v is None else ADAM for one in trained]
    end = backend.step_end(trained, [1] * len(counts), scale)
    if end is None:
        norm = float(np.sqrt(sum(_measured(backend, trained)[:-1]))) / SCALE
        _update(backend, trained, min(1.0, clip_norm / (norm + 1e-6)) / SCALE)
        return {"report": np.array([4, 2 * SCALE, 0, 0, norm, SCALE]), "scale": 2 * SCALE} | _named(trained)
    end.start(ScalerNumbers(3, SCALE, 1, True, 2, 1.0, 2.0**16))
    other = [step._replace(lr=step.lr * 10) for step in steps]
    return {"report": end.settle(3, [other, steps], clip_norm), "scale": scale} | _named(trained)


def _trained(given: Given, count: int, index: int) -> Trained:
    master, m = given.accumulator(count), given.numbers(count, precision="float32")
    v = given.backend.zeros((count,), "float32")
    tied = (given.accumulator(count),) if index == 0 else ()
    low = given.numbers(count) if index % 2 == 0 else None
    return Trained(master, low, given.accumulator(1 + index % 2, count), tied, m, v if index != 1 else None)


def _named(trained: list[Trained]) -> Results:
    found = {f"{name} {index}": getattr(one, name) for index, one in enumerate(trained) for name in ("master", "low", "m", "v")}
    return {name: array for name, array in found.items() if array is not None}


def _measured(backend: Backend, trained: list[Trained]) -> HostArray:
    """Shards and tied gradients folded; sums of squares, and whether all are finite."""
    for one in trained:
        backend.fold_shards(one.gradients)
        for other in one.tied:
            backend.add_into(one.gradients[0], other)
    pairs = [backend.fold_shards(one.gradients[:1]) for one in trained]
    return np.array([*(squares for squares, _ in pairs), float(all(finite for _, finite in pairs))])


def _update(backend: Backend, trained: list[Trained], factor: float) -> None:
    for one in trained:
        if one.v is None:
            backend.sgd(SGD._replace(grad_factor=factor), one.master, one.gradients[0], one.m, one.low)
        else:
            backend.adam(ADAM._replace(grad_factor=factor), one.master, one.gradients[0], one.m, one.v, one.low)


SMALL: Mapping[str, Callable[[Given], Results]] = MappingProxyType(
    {
        "activation relu": partial(activation, kind="relu", rows=7, width=1),
        "activation gelu": partial(activation, kind="gelu", rows=7, width=33),
        "activation silu": partial(activation, kind="silu", rows=7, width=8),
        "activation swiglu": partial(activation, kind="swiglu", rows=7, width=24),
        **{f"linear {kind}": partial(linear, kind=kind, rows=7, inputs=16, outputs=8) for kind in (None, "gelu", "swiglu")},
        "linear without bias": partial(linear, kind="relu", rows=33, inputs=7, outputs=5, bias=False),
        "norm": partial(norm, rows=33, width=64),
        "norm of odd rows": partial(norm, rows=7, width=33, bias=False),
        "residual": partial(residual, rate=0.1, rows=33, width=64),
        "residual without dropout": partial(residual, rate=0.0, rows=7, width=33, full=False),
        "attention": partial(attention, batch=2, length=70, heads=2, head_dim=64),
        "attention without causal mask": partial(attention, batch=1, length=33, heads=2, head_dim=32, causal=False, rope=False),
        "attention of odd heads": partial(attention, batch=2, length=7, heads=3, head_dim=10, bias=False),
        "attention in pieces": partial(attention_cached, batch=1, head_dim=32, pieces=(20, 1, 1, 5)),
        "attention of odd heads in pieces": partial(attention_cached, batch=2, head_dim=10, pieces=(1, 7, 1), heads=3, bias=False),
        "attention of wide heads in pieces": partial(attention_cached, batch=1, head_dim=36, pieces=(3, 1), rope=False),
        "embedding": partial(embedding, batch=3, length=33, vocabulary=17, width=64),
        "embedding without positions": partial(embedding, batch=1, length=7, vocabulary=5, width=7, positions=False),
        "costs": partial(costs, rows=7, width=33),
        "costs of wide rows": partial(costs, rows=3, width=1024),
        "lm head": partial(lm_head, rows=33, width=16, vocabulary=64),
        "lm head with bias": partial(lm_head, rows=7, width=7, vocabulary=33, bias=True),
        "masks": partial(masks, rows=33, width=64),
        "masks of odd rows": partial(masks, rows=7, width=33),
        "rotary": partial(rotary, batch=2, length=33, width=16),
        "arrays": partial(arrays, rows=7, width=33),
        "arrays of vectors": partial(arrays, rows=8, width=64),
        "optimizer": partial(optimizer, count=1001),
        "step end": partial(step_end, counts=(5000, 33, 1)),
        "settled step": partial(settled_step, counts=(5000, 33, 1)),
    }
)
"""Every operation, fast and general path, at sizes that the emulator runs in no time."""


def on_host(backend: Backend, results: Results) -> dict[str, HostArray]:
    """Copies of everything; bfloat16 stays bfloat16."""
    names = [name for name, result in results.items() if not isinstance(result, float | np.ndarray)]
    fetched = dict(zip(names, backend.fetch([results[name] for name in names]).wait(), strict=True))
    return {name: np.array(fetched.get(name, result)) for name, result in results.items()}
