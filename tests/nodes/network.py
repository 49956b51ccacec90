"""One small network that uses every node type that takes part in training, run node by node on any backend.

A layer's inputs are `<layer>` or `<layer>.<slot>`, or one of the feeds `ids` and `targets`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcnr.backends.base import Array, Backend, HostArray, Precision
from dcnr.nodes.activation import DropoutAddConfig, DropoutConfig
from dcnr.nodes.attention import AttentionHeadConfig, FusedHeadsConfig
from dcnr.nodes.base import Env, Node, Saved, Shape
from dcnr.nodes.cost import CostConfig, FusedLmHeadConfig
from dcnr.nodes.linear import LinearActivationConfig, LinearConfig
from dcnr.nodes.norm import LayerNormConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.residual import ResidualNormConfig
from dcnr.nodes.spec import BuildArgs, NodeConfig
from tests.tolerances import assert_close

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 16, 33
_SQUARE = LinearConfig(in_dim=WIDTH, out_dim=WIDTH)
_HEAD = LinearConfig(in_dim=WIDTH, out_dim=VOCABULARY)


@dataclass(frozen=True)
class Layer:
    """One node."""

    name: str
    type: str
    config: NodeConfig
    inputs: tuple[str, ...]
    members: tuple[str, ...]
    ties: str | None


def layer(
    name: str, kind: str, config: dict[str, Any] | NodeConfig, *inputs: str, members: tuple[str, ...] = (), ties: str | None = None
) -> Layer:
    """A layer whose config may be given as a file would."""
    resolved = config if isinstance(config, NodeConfig) else NODE_TYPES[kind].config.model_validate(config)
    return Layer(name, kind, resolved, inputs, members or (name,), ties)


LAYERS = (
    layer("embed", "embedder", {"vocab_size": VOCABULARY, "dim": WIDTH, "seq_len": LENGTH, "position_encoding": "learned"}, "ids"),
    layer("copy", "broadcast", {"num_outputs": 3}, "embed"),
    layer("norm", "layernorm", {"dim": WIDTH}, "copy.0"),
    layer("head", "attention_head", {"input_dim": WIDTH, "head_dim": WIDTH}, "norm"),
    layer("attention", "attention", {"dim": WIDTH, "num_heads": 2, "output_projection": True}, "copy.1"),
    layer("heads", "fused_heads", FusedHeadsConfig.fuse([AttentionHeadConfig(input_dim=WIDTH, head_dim=WIDTH // 2)] * 2), "copy.2",
          members=("spread", "head_0", "head_1", "gather")),
    layer("sum", "add", {}, "head", "attention", "heads"),
    layer("drop", "dropout", {"rate": 0.1}, "sum"),
    layer("wide", "linear", {"in_dim": WIDTH, "out_dim": 2 * WIDTH}, "drop"),
    layer("gelu", "gelu", {}, "wide"),
    layer("cut", "split", {"num_outputs": 2}, "gelu"),
    layer("relu", "relu", {}, "cut.0"),
    layer("silu", "silu", {}, "cut.1"),
    layer("join", "stack", {}, "relu", "silu"),
    layer("gate", "swiglu", {}, "join"),
    layer("up", "linear_activation", LinearActivationConfig.fuse(_SQUARE, "gelu"), "gate", members=("up_linear", "up")),
    layer("dropadd", "dropout_add", DropoutAddConfig.fuse(DropoutConfig(rate=0.2)), "up", "sum", members=("dropped", "dropadd")),
    layer("residual", "residual_norm",
          ResidualNormConfig.fuse(_SQUARE, DropoutConfig(rate=0.1), LayerNormConfig(dim=WIDTH)), "dropadd", "gate",
          members=("down", "down_drop", "down_add", "residual")),
    layer("holes", "mask", {"kind": "random", "rate": 0.1}, "residual.0"),
    layer("corner", "mask", {"kind": "causal"}, "holes"),
    layer("folded", "reshape", {"shape": [-1, WIDTH]}, "corner"),
    layer("logits", "linear", _HEAD, "residual.1"),
    layer("cost", "cost", {"cost_function": "ce_logits"}, "logits", "targets"),
    layer("squares", "cost", {"cost_function": "mse"}, "logits", "targets"),
    layer("tied", "tied_lm_head_ce", {"dim": WIDTH, "vocab_size": VOCABULARY}, "folded", "targets", ties="embed"),
    layer("fused", "fused_lm_head", FusedLmHeadConfig.fuse(_HEAD, CostConfig()), "folded", "targets", members=("fused_head", "fused")),
)  # fmt: skip


class EveryType:
    """The network on one backend: its arrays, and what a pass leaves behind."""

    def __init__(self, backend: Backend, precision: Precision) -> None:
        self.backend, self.precision = backend, precision
        draw = np.random.default_rng(7)
        ids, targets = draw.integers(0, VOCABULARY, (2, BATCH, LENGTH))
        targets[0, 1] = -1
        self._feeds = {"ids": backend.from_host(ids), "targets": backend.from_host(targets)}
        self._nodes: dict[str, Node] = {}
        self._envs: dict[str, Env] = {}
        self._step = backend.scalar(0)
        self.losses: list[Array] = []
        shared = {"step": self._step, "weight": backend.scalar(0.25), "loss_scale": backend.scalar(8.0)}
        shapes: dict[str, tuple[Shape, ...]] = {"ids": ((LENGTH,),), "targets": ((LENGTH,),)}
        for one in LAYERS:
            given = tuple(shapes[name][slot] for name, slot in map(_port, one.inputs))
            shapes[one.name] = NODE_TYPES[one.type].shapes(one.config, given)
            self._add(one, BuildArgs(one.name, one.config, given, shapes[one.name], one.ties is not None, one.members), draw, shared)

    def _add(self, one: Layer, args: BuildArgs, draw: np.random.Generator, shared: dict[str, Any]) -> None:
        node = NODE_TYPES[one.type].build(args)
        params = {
            p.name: self.backend.from_host(draw.normal(p.fill, p.shape[-1] ** -0.5, p.shape), self.precision) for p in node.parameters
        }
        if one.ties is not None:
            params["weight"] = self._envs[one.ties].params["weight"]
        grads = {name: self.backend.zeros(array.shape, "float32") for name, array in params.items()}
        self._nodes[one.name] = node
        self._envs[one.name] = Env(
            backend=self.backend, params=params, grads=grads, accumulate=False, activation=self.precision,
            seed=11, first_row=2, training=True, **shared,
        )  # fmt: skip

    def set_step(self, step: int) -> None:
        """For all passes from now on."""
        (number,) = self.backend.set_scalars([self._step], [step])
        self._step = number
        for env in self._envs.values():
            env.step = number

    def run(self) -> None:
        """A pass forward and backward. Gradients are in the accumulators, losses in `losses`."""
        values: dict[tuple[str, int], Array] = {(name, 0): array for name, array in self._feeds.items()}
        saved: dict[str, Saved] = {}
        for one in LAYERS:
            outputs, saved[one.name] = self._nodes[one.name].forward(
                self._envs[one.name], tuple(values[_port(name)] for name in one.inputs)
            )
            values |= {(one.name, slot): output for slot, output in enumerate(outputs)}
        self.losses = [values[one.name, 0] for one in LAYERS if self._is_cost(one)]
        self._backward(saved, values)

    def _backward(self, saved: dict[str, Saved], values: dict[tuple[str, int], Array]) -> None:
        coming: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
        for one in reversed(LAYERS):
            slots = [slot for name, slot in values if name == one.name]
            grads = tuple(None if self._is_cost(one) else self._joined(coming[one.name, slot]) for slot in slots)
            for name, grad in zip(one.inputs, self._nodes[one.name].backward(self._envs[one.name], saved[one.name], grads), strict=True):
                if grad is not None:
                    coming[_port(name)].append(grad)
        for one in LAYERS:
            if one.ties is not None:
                self.backend.add_into(self._envs[one.ties].grads["weight"], self._envs[one.name].grads["weight"])

    def _joined(self, grads: list[Array]) -> Array:
        return grads[0] if len(grads) == 1 else self.backend.add(grads)

    def _is_cost(self, one: Layer) -> bool:
        return "targets" in NODE_TYPES[one.type].feeds

    def results(self) -> dict[str, HostArray]:
        """Losses and the gradients of all parameters, on the host."""
        named = {f"{one.name}.{name}": array for one in LAYERS for name, array in self._envs[one.name].grads.items()}
        losses = {f"loss {index}": np.asarray(loss, np.float64) for index, loss in enumerate(self.backend.fetch(self.losses).wait())}
        return losses | {name: np.array(self.backend.to_host(array)) for name, array in named.items()}


def check_recorded_passes(backend: Backend, definition: Backend, precision: Precision) -> None:
    """Passes of several steps equal those of `definition`, though all but the first two are replays of a recording.

    A recording holds no copy from or to the host and does not wait, so neither does a pass: nothing falls back to the host.
    """
    network, right = EveryType(backend, precision), EveryType(definition, precision)
    recording = backend.recording()
    assert recording is not None
    for step in range(4):
        network.set_step(step)
        right.set_step(step)
        recording.run(network.run)
        right.run()
        actual, wanted = network.results(), right.results()
        assert actual.keys() == wanted.keys()
        for name, array in wanted.items():
            assert_close(actual[name], array, precision, f"step {step}, {name}")


def _port(name: str) -> tuple[str, int]:
    layer_name, _, slot = name.partition(".")
    return layer_name, int(slot or 0)
