"""Updates, against torch.optim and against their rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcnr.backends.base import AdamStep, SgdStep
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.errors import InvariantError
from dcnr.nodes.spec import NodeConfig
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import StepNumbers, moments_of, optimizer_of, update_of
from tests.tolerances import assert_close

NUMBERS = StepNumbers(updates=3, lr=0.5, lr_factor=0.25, grad_factor=0.1)
STEPS = 20


def test_a_nodes_own_keys_go_first() -> None:
    """Its learning rate follows the schedule."""
    hyper = Hyper(optimizer="adamw", weight_decay=0.1)
    own = NodeConfig(optimizer="SGD", learning_rate=2.0, weight_decay=0.3)
    assert optimizer_of(hyper, own) == "sgd"
    assert update_of(hyper, own, True, NUMBERS) == SgdStep(0.5, 0.9, 0.3, 0.1)
    assert update_of(hyper, NodeConfig(), True, NUMBERS) == AdamStep(0.5, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.999**3, 0.1)


def test_only_matrices_decay_and_plain_adam_does_not() -> None:
    """Unless the node asks for it."""
    hyper = Hyper(weight_decay=0.1)
    for name, wanted in (("sgd", 0.1), ("adam", 0.0), ("adamw", 0.1)):
        config = NodeConfig(optimizer=name)
        assert update_of(hyper, config, True, NUMBERS).weight_decay == wanted
        assert update_of(hyper, config, False, NUMBERS).weight_decay == 0
    assert update_of(hyper, NodeConfig(optimizer="adam", weight_decay=0.2), True, NUMBERS).weight_decay == 0.2


def test_moments() -> None:
    """What an optimizer keeps per parameter."""
    assert moments_of(Hyper(optimizer="adamw"), NodeConfig()) == ("m", "v")
    assert moments_of(Hyper(optimizer="sgd"), NodeConfig()) == ("m",)
    assert moments_of(Hyper(optimizer="sgd", momentum=0), NodeConfig()) == ()


def test_an_unchecked_name_is_our_bug() -> None:
    """Files are checked when they are loaded."""
    with pytest.raises(InvariantError, match="lion"):
        optimizer_of(Hyper(), NodeConfig(optimizer="lion"))


@pytest.mark.parametrize(
    ("hyper", "build"),
    [
        (Hyper(optimizer="adam", lr=0.01), lambda torch, w: torch.optim.Adam([w], lr=0.01)),
        (Hyper(optimizer="adam", lr=0.1, beta1=0.8, beta2=0.95, eps=0.01), lambda torch, w: torch.optim.Adam([w], 0.1, (0.8, 0.95), 0.01)),
        (Hyper(optimizer="adamw", lr=0.01, weight_decay=0.1), lambda torch, w: torch.optim.AdamW([w], lr=0.01, weight_decay=0.1)),
        (Hyper(optimizer="sgd", lr=0.01, momentum=0.9), lambda torch, w: torch.optim.SGD([w], lr=0.01, momentum=0.9)),
        (Hyper(optimizer="sgd", lr=0.01, momentum=0), lambda torch, w: torch.optim.SGD([w], lr=0.01)),
        (Hyper(optimizer="sgd", lr=0.01, momentum=0, weight_decay=0.1), lambda torch, w: torch.optim.SGD([w], lr=0.01, weight_decay=0.1)),
    ],
    ids=["adam", "adam-betas", "adamw", "sgd-momentum", "sgd", "sgd-decay"],
)
def test_twenty_steps_equal_torch(hyper: Hyper, build: Any) -> None:
    """The same gradients, scaled by a loss scale that the update takes out again."""
    torch = pytest.importorskip("torch")
    rng, backend, scale = np.random.default_rng(5), NumpyBackend(), 1024.0
    start = rng.normal(size=(7, 33)).astype(np.float32)
    gradients = rng.normal(size=(STEPS, 7, 33)).astype(np.float32)
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    outside = torch.nn.Parameter(torch.tensor(start))
    optimizer = build(torch, outside)
    for count, gradient in enumerate(gradients, 1):
        update = update_of(hyper, NodeConfig(), True, StepNumbers(count, hyper.lr, 1.0, 1 / scale))
        if isinstance(update, AdamStep):
            backend.adam(update, w, gradient * np.float32(scale), m, v, None)
        else:
            backend.sgd(update, w, gradient * np.float32(scale), m if moments_of(hyper, NodeConfig()) else None, None)
        outside.grad = torch.tensor(gradient)
        optimizer.step()
    assert np.abs(w - start).max() > 0.01
    assert_close(w - start, outside.detach().numpy() - start, "float32")
