"""Names of precisions and the NumPy types that hold them. bfloat16 comes from ml_dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from dcnr.backends.base import Precision

_DTYPES: Mapping[Precision, np.dtype[Any]] = MappingProxyType(
    {
        "float64": np.dtype(np.float64),
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
    }
)
_PRECISIONS: Mapping[np.dtype[Any], Precision] = MappingProxyType({dtype: precision for precision, dtype in _DTYPES.items()})


def dtype_of(precision: Precision) -> np.dtype[Any]:
    """The NumPy type of a precision."""
    return _DTYPES[precision]


def precision_of(dtype: np.dtype[Any]) -> Precision:
    """The precision of a NumPy float type. Raises `KeyError` for any other type."""
    return _PRECISIONS[dtype]
