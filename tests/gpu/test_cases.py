"""Every node type with every option, on a real GPU, equals the numpy backend; and a second run gives the same bits."""

from __future__ import annotations

import pytest

from dcnr.backends.base import Backend, Precision
from tests.nodes.cases import CASES, Case
from tests.nodes.outcomes import bits, compare
from tests.nodes.runs import example, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_nodes_equal_the_definition(gpu: Backend, numpy: Backend, one: Case, precision: Precision) -> None:
    """Outputs, input gradients and parameter gradients over two micro-batches."""
    given = example(one, numpy)
    actual, again, wanted = (run(backend, one, given, precision, micro_batches=2) for backend in (gpu, gpu, numpy))
    compare(actual, wanted, precision)
    assert bits(actual) == bits(again)
