"""The living definition: every operation plain and obvious, each family in the file of its name.

It is itself checked by finite differences in float64 (`tests/nodes`).
"""

from __future__ import annotations

from dcnr.backends.blas import limit_blas
from dcnr.backends.host import HostOps
from dcnr.backends.numpy.activation import ActivationOps
from dcnr.backends.numpy.arrays import ArrayOps
from dcnr.backends.numpy.attention import AttentionOps
from dcnr.backends.numpy.cost import CostOps
from dcnr.backends.numpy.embedding import EmbeddingOps
from dcnr.backends.numpy.linear import LinearOps
from dcnr.backends.numpy.norm import NormOps
from dcnr.backends.numpy.optimizer import OptimizerOps


class NumpyBackend(HostOps, ArrayOps, LinearOps, ActivationOps, NormOps, EmbeddingOps, AttentionOps, CostOps, OptimizerOps):
    """All families together. Loading it leaves the process one BLAS thread."""

    name = "numpy"
    runs_shards = True
    wide_caches = True

    def __init__(self) -> None:
        limit_blas()
