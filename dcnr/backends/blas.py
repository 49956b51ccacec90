"""One BLAS thread in the whole process.

Row shards run on threads of their own; a second pool under them would fight for the same cores,
and the number of BLAS threads changes rounding.
"""

from __future__ import annotations

from threadpoolctl import threadpool_limits


def limit_blas() -> None:
    """Give every BLAS library that is loaded one thread, for good."""
    threadpool_limits(limits=1, user_api="blas")
