"""Costs, and the LM head with its cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from dcnr.backends.base import Precision
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.nodes.cost import CostConfig, FusedLmHeadConfig, LmHeadCostConfig
from dcnr.nodes.linear import LinearConfig
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import ShapeError
from tests.nodes import cases
from tests.nodes.cases import Case, case
from tests.nodes.gradcheck import gradcheck
from tests.nodes.runs import LOSS_SCALE, WEIGHT, Example, example, forward, make_env, run
from tests.tolerances import assert_close

LOGITS = case("cost", {"cost_function": "ce_logits"}, [(7, 33), (7,)], ids=(None, 33))


@pytest.mark.parametrize("one", cases.COST, ids=lambda one: one.name)
def test_gradients(one: Case) -> None:
    """Backward is the derivative of the loss times the loss scale, with weight, and with targets that do not count."""
    gradcheck(one)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    """The loss of every target that counts, times the weight."""
    targets = np.array([[0, -1, 3]])
    (loss,) = forward(NumpyBackend(), LOGITS, Example((np.zeros((1, 3, 33)), targets), {}, ()), "float32")
    assert loss == pytest.approx(WEIGHT * 2 * math.log(33))


def test_ce_and_ce_logits_agree() -> None:
    """Cross-entropy of softmax(logits) as probabilities is that of the logits."""
    given = example(LOGITS, NumpyBackend())
    exps = np.exp(given.inputs[0])
    probabilities = replace(given, inputs=(exps / exps.sum(axis=-1, keepdims=True), given.inputs[1]))
    of_p = forward(NumpyBackend(), case("cost", {"cost_function": "ce"}, LOGITS.inputs, ids=LOGITS.ids), probabilities, "float64")
    assert of_p[0] == pytest.approx(forward(NumpyBackend(), LOGITS, given, "float64")[0])


def test_mse_is_the_mean_over_features_and_the_weighted_sum_over_rows() -> None:
    """Ids stand for one-hot rows; a negative one does not count."""
    one = case("cost", {"cost_function": "mse"}, [(3, 4), (3,)], ids=(None, 4))
    x = np.full((1, 3, 4), 0.5)
    (loss,) = forward(NumpyBackend(), one, Example((x, np.array([[1, -1, 2]])), {}, ()), "float32")
    assert loss == pytest.approx(WEIGHT * 2 * 0.25)


def test_losses_and_gradients_of_shards_add_up() -> None:
    """Weight is that of the whole step, so cutting the batch changes nothing but rounding."""
    backend = NumpyBackend()
    given = example(LOGITS, backend)
    whole = run(backend, LOGITS, given, "float64")
    parts = [run(backend, LOGITS, replace(given, inputs=tuple(x[row : row + 1] for x in given.inputs)), "float64") for row in range(2)]
    assert sum(float(part.outputs[0]) for part in parts) == pytest.approx(float(whole.outputs[0]))
    grads = [grad for part in parts if (grad := part.input_grads[0]) is not None]
    assert_close(np.concatenate(grads), whole.input_grads[0], "float64")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_cost_precision_rounds_the_prediction(precision: Precision) -> None:
    """The loss is that of rounded logits; the gradient keeps the dtype of activations."""
    backend = NumpyBackend()
    low = case("cost", {"cost_function": "ce_logits", "cost_precision": precision}, LOGITS.inputs, ids=LOGITS.ids)
    given = example(LOGITS, backend)
    rounded = backend.to_host(backend.cast(backend.from_host(given.inputs[0], "float32"), precision)).astype(np.float64)
    found = run(backend, low, given, "float32")
    wanted = run(backend, LOGITS, replace(given, inputs=(rounded, given.inputs[1])), "float32")
    assert found.outputs == wanted.outputs
    assert found.outputs != run(backend, LOGITS, given, "float32").outputs
    assert found.input_grads[0] is not None
    assert found.input_grads[0].dtype == np.float32
    assert_close(found.input_grads[0], wanted.input_grads[0], precision)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_lm_head_equals_a_linear_layer_and_a_cost(bias: bool, rows: int) -> None:
    """Loss, input gradient and weight gradients, below and above one tile of tokens."""
    backend = NumpyBackend()
    linear = LinearConfig(in_dim=7, out_dim=33, bias=bias)
    fused = FusedLmHeadConfig.fuse(linear, CostConfig())
    merged = case("fused_lm_head", fused, [(127, 7), (127,)], rows, (None, 33), members=("head", "loss"))
    given = example(merged, backend)
    found = run(backend, merged, given, "float64")

    head, cost = case("linear", linear, [(127, 7)], rows), case("cost", {}, [(127, 33), (127,)], rows, (None, 33))
    logits = forward(backend, head, replace(given, inputs=given.inputs[:1]), "float64")[0]
    of_cost = run(backend, cost, Example((np.asarray(logits), given.inputs[1]), {}, ()), "float64")
    assert of_cost.input_grads[0] is not None
    of_head = run(backend, head, Example(given.inputs[:1], given.params, (of_cost.input_grads[0],)), "float64")
    assert found.outputs[0] == pytest.approx(of_cost.outputs[0])
    assert_close(found.input_grads[0], of_head.input_grads[0], "float64")
    for name, grad in of_head.param_grads.items():
        assert_close(found.param_grads[name], grad, "float64", name)


def test_validation_computes_the_loss_alone() -> None:
    """Without accumulators nothing is saved and nothing written."""
    backend = NumpyBackend()
    for one in (LOGITS, case("tied_lm_head_ce", {"dim": 7, "vocab_size": 33}, [(7, 7), (7,)], ids=(None, 33))):
        given = example(one, backend)
        node = one.build()
        env = replace(make_env(backend, node, one, given.params, "float32"), grads={}, training=False)
        (loss,), saved = node.forward(env, tuple(backend.from_host(x, "float32") for x in given.inputs))
        assert loss == pytest.approx(float(forward(backend, one, given, "float32")[0]))
        assert saved == ()


def test_the_loss_scale_is_in_the_gradient_alone() -> None:
    """A loss is reported unscaled."""
    backend = NumpyBackend()
    given = example(LOGITS, backend)
    node = LOGITS.build()
    env = replace(make_env(backend, node, LOGITS, {}, "float64"), loss_scale=1.0)
    (loss,), saved = node.forward(env, given.inputs)
    scaled = run(backend, LOGITS, given, "float64")
    assert (loss,) == scaled.outputs
    (unscaled, _) = node.backward(env, saved, (None,))
    assert unscaled is not None
    assert_close(unscaled * LOSS_SCALE, scaled.input_grads[0], "float64")


def test_shapes() -> None:
    """A wrong vocabulary or a wrong count of targets is said by name."""
    cost, head = NODE_TYPES["cost"].shapes, NODE_TYPES["tied_lm_head_ce"].shapes
    assert cost(CostConfig(vocab_size=33), ((7, 33), None)) == ((),)
    assert cost(CostConfig(cost_function="mse"), ((7, 33), (7, 33))) == ((),)
    assert head(LmHeadCostConfig(dim=5, vocab_size=33), ((7, 5), (7,))) == ((),)
    with pytest.raises(ShapeError, match=r"last axis of 34 \(vocab_size\), got \[7, 33\]"):
        cost(CostConfig(vocab_size=34), ((7, 33), None))
    with pytest.raises(ShapeError, match=r"targets of shape \[7\], got \[7, 33\]"):
        cost(CostConfig(), ((7, 33), (7, 33)))
    with pytest.raises(ShapeError, match=r"last axis of 5 \(dim\), got \[7, 6\]"):
        head(LmHeadCostConfig(dim=5, vocab_size=33), ((7, 6), None))


def test_precisions_have_several_names() -> None:
    """As people write them; anything else is an error that lists what there is."""
    assert [CostConfig.model_validate({"cost_precision": name}).cost_precision for name in ("FP16", "half", "bf16", "fp32")] == [
        "float16", "float16", "bfloat16", "float32",
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="'fp8' is not a precision; use float32, float16 or bfloat16"):
        CostConfig.model_validate({"cost_precision": "fp8"})
