"""Every operation at small sizes with every array in an allocation of its own: `make sanitize-gpu` runs these under compute-sanitizer."""

from __future__ import annotations

import pytest

from dcnr.backends.base import Backend, Precision
from tests.backends.families import SMALL, Given, on_host
from tests.nodes.network import EveryType
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

STORED: tuple[Precision, ...] = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("name", SMALL)
def test_operations_stay_within_their_arrays(exact: Backend, numpy: Backend, name: str, precision: Precision) -> None:
    """And are right, as everywhere."""
    actual, wanted = (on_host(backend, SMALL[name](Given(backend, precision))) for backend in (exact, numpy))
    for part, array in wanted.items():
        assert_close(actual[part], array, precision, part)


@pytest.mark.parametrize("precision", STORED)
def test_a_network_of_every_node_type_stays_within_its_arrays(exact: Backend, numpy: Backend, precision: Precision) -> None:
    """Forward and backward, which join what operations alone do not."""
    network, right = EveryType(exact, precision), EveryType(numpy, precision)
    network.run()
    right.run()
    for name, array in right.results().items():
        assert_close(network.results()[name], array, precision, name)
