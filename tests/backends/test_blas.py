"""The BLAS pool."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_info

from dcnr.backends.blas import limit_blas


def test_blas_keeps_to_one_thread() -> None:
    """Also after a product has run."""
    limit_blas()
    np.ones((64, 64)) @ np.ones((64, 64))
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    assert pools
    assert set(pools) == {1}
