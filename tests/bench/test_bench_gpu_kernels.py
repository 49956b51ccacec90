"""The kernel benchmark runs every operation that it lists."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from bench_gpu_kernels import FAMILIES, Bench, milliseconds

from dcnr.backends.numpy.backend import NumpyBackend
from tests.bench.conftest import BENCH


def test_every_row_runs_on_the_definition_of_the_operations() -> None:
    """All families, in tiny sizes, on the numpy backend; work is counted for each."""
    base = np.random.default_rng(1).standard_normal(1000, np.float32)
    bench = Bench(NumpyBackend(), "float32", batch=1, seq=4, vocabulary=30, base=base)
    rows = [row for family in FAMILIES.values() for row in family(bench)]
    for row in rows:
        assert row.work > 0, row.name
        assert milliseconds(bench.backend, row.make, 0.0, row.recorded) > 0, row.name
    assert len(rows) > 30


def test_one_family_prints_a_table_beside_two_ceilings() -> None:
    """As a person would try it without a GPU."""
    options = ["--backend", "numpy", "--batch", "1", "--seq", "4", "--vocabulary", "30", "--seconds", "0", "--precision", "fp32"]
    command = [sys.executable, str(BENCH / "bench_gpu_kernels.py"), "--family", "norm,embedding", *options]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("float32; ceilings: copy ")
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| layernorm", "| layernorm backward", "| residual_norm", "| residual_norm backward", "| embedding", "| embedding backward",
    ]  # fmt: skip
