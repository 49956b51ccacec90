"""What tests of one hosted session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agents.bench import GRAPH, Bench, only_on_b
from tests.agents.tiny import A, B, deploy_of


@pytest.fixture
def whole() -> Iterator[Bench]:
    """Everything on `a`, which decides; a checkpoint every second step."""
    bench = Bench(deploy_of(dict.fromkeys(GRAPH.by_id, A), hyper={"checkpoint_every": 2}), A)
    yield bench
    bench.session.validate()


@pytest.fixture
def middle() -> Iterator[Bench]:
    """`b` with two nodes between those of `a`."""
    bench = Bench(deploy_of(only_on_b("up", "gelu")), B)
    yield bench
    bench.session.validate()
