"""What the optimizer does to one parameter in one step: SGD, Adam or AdamW, with its numbers.

Rule 1: a node's own `optimizer`, `learning_rate` and `weight_decay` go before the session's;
its learning rate follows the session's schedule.
Rule 2: only matrices and embeddings decay (`Parameter.decay`). Plain Adam has no decay, unless the node asks for one by name.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from dcnr.backends.base import AdamStep, SgdStep
from dcnr.errors import InvariantError
from dcnr.nodes.spec import NodeConfig
from dcnr.optim.hyper import Hyper, OptimizerName

Moment = Literal["m", "v"]


class StepNumbers(NamedTuple):
    """The part of a step's decision that an update needs."""

    updates: int
    """Optimizer updates done when this one is: Adam's t."""
    lr: float
    lr_factor: float
    grad_factor: float


def optimizer_of(hyper: Hyper, config: NodeConfig) -> OptimizerName:
    """The node's own optimizer, or the session's."""
    name = hyper.optimizer if config.optimizer is None else config.optimizer.lower()
    if name not in get_args(OptimizerName):
        raise InvariantError(f"optimizer '{name}' passed the checks of the network file")
    return cast("OptimizerName", name)


def moments_of(hyper: Hyper, config: NodeConfig) -> tuple[Moment, ...]:
    """Which float32 arrays, shaped as the parameter, its optimizer keeps."""
    if optimizer_of(hyper, config) == "sgd":
        return ("m",) if hyper.momentum else ()
    return ("m", "v")


def update_of(hyper: Hyper, config: NodeConfig, decay: bool, numbers: StepNumbers) -> SgdStep | AdamStep:
    """The update of a parameter of the node with `config`; `decay` is the parameter's."""
    name = optimizer_of(hyper, config)
    lr = numbers.lr if config.learning_rate is None else config.learning_rate * numbers.lr_factor
    weight_decay = _weight_decay(hyper, config, name) if decay else 0.0
    if name == "sgd":
        return SgdStep(lr, hyper.momentum, weight_decay, numbers.grad_factor)
    correction1 = 1 - hyper.beta1**numbers.updates
    correction2 = 1 - hyper.beta2**numbers.updates
    return AdamStep(lr, hyper.beta1, hyper.beta2, hyper.eps, weight_decay, correction1, correction2, numbers.grad_factor)


def _weight_decay(hyper: Hyper, config: NodeConfig, name: OptimizerName) -> float:
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.0 if name == "adam" else hyper.weight_decay
