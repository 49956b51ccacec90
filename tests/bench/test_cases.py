"""What the step benchmarks train is what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CASES, make_dataset, needs

from dcnr.data.dataset import Dataset


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_case_has_its_precision_in_the_file_that_agents_get(name: str) -> None:
    """Every node of the graph stores what the case says, or what was asked for instead."""
    case = CASES[name]
    assert f"\nprecision: {case.precision}\n" in case.text()
    assert "\nprecision: float32\n" in case.text("float32")


def test_the_dataset_has_the_network_s_vocabulary_and_length(tmp_path: Path) -> None:
    """Made by the product's own tools from real files; every id occurs, and no few of them are most of it."""
    graph = CASES["shakespeare"].graph()
    vocabulary, seq_len = needs(graph)
    dataset = Dataset.open(tmp_path, make_dataset(tmp_path, graph, windows=20))
    assert (dataset.manifest.vocab_size, dataset.manifest.seq_len) == (vocabulary, seq_len)
    ids = np.fromfile(dataset.folder / "train-00000.bin", dtype=dataset.manifest.dtype)
    counts = np.bincount(ids, minlength=vocabulary)
    assert counts.min() > 0
    assert counts.max() < 2 * counts.mean()
