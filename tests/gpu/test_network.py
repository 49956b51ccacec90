"""A network that uses every node type, on a real GPU, needs the host for nothing inside a pass."""

from __future__ import annotations

import pytest

from dcnr.backends.base import Backend, Precision
from tests.nodes.network import check_recorded_passes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_recorded_passes_equal_the_definition(gpu: Backend, numpy: Backend, precision: Precision) -> None:
    """Several steps, each with its own masks, of which all but two are replays of a CUDA graph."""
    check_recorded_passes(gpu, numpy, precision)
