"""One cluster of eight agents for the folder: a run takes as many of them as it asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.networks import VOCABULARY
from tests.acceptance.running import Cluster, make_dataset, up


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Eight agents on the cpu backend, and dataset `text` of characters; use session names of your own."""
    data_dir = tmp_path_factory.mktemp("acceptance")
    make_dataset(data_dir, VOCABULARY)
    with up(data_dir, agents=8) as one:
        yield one
