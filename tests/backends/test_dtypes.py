"""Names of precisions."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from dcnr.backends.base import Precision, width
from dcnr.backends.dtypes import dtype_of, precision_of


def test_every_precision_has_a_type_of_its_width_and_back() -> None:
    """Both ways, for all of them."""
    for precision in get_args(Precision):
        assert precision_of(dtype_of(precision)) == precision
        assert dtype_of(precision).itemsize == width(precision)


def test_other_types_have_no_precision() -> None:
    """Ids are not numbers."""
    with pytest.raises(KeyError):
        precision_of(np.dtype(np.int64))
