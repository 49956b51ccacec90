"""Comparing what two runs of a case came to."""

from __future__ import annotations

import numpy as np

from dcnr.backends.base import HostArray, Precision
from tests.nodes.runs import Outcome
from tests.tolerances import assert_close


def compare(actual: Outcome, wanted: Outcome, precision: Precision) -> None:
    """Every output, input gradient and parameter gradient is there, of the same dtype, within the precision's tolerance."""
    found, right = named(actual), named(wanted)
    assert found.keys() == right.keys()
    for name, array in right.items():
        assert found[name].dtype == array.dtype, f"{name}: {found[name].dtype}, not {array.dtype}"
        assert_close(found[name], array, precision, name)


def bits(outcome: Outcome) -> dict[str, bytes]:
    """All of it as bytes: equal only if every bit is."""
    return {name: array.tobytes() for name, array in named(outcome).items()}


def named(outcome: Outcome) -> dict[str, HostArray]:
    """The arrays of an outcome; losses as float64."""
    outputs = {f"output {slot}": np.asarray(output) for slot, output in enumerate(outcome.outputs)}
    inputs = {f"gradient of input {slot}": grad for slot, grad in enumerate(outcome.input_grads) if grad is not None}
    return outputs | inputs | {f"gradient of {name}": grad for name, grad in outcome.param_grads.items()}
