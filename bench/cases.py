"""What the step benchmarks train: networks, batches, hyper-parameters, and real dataset files of random ids.

Every character of a text is drawn uniformly from as many code points as the network has ids, so that the tokenizer that the product learns
from it has exactly that vocabulary, and no id is more frequent than another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcnr.data.dataset import Dataset
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph
from dcnr.nodes.embedding import EmbedderConfig
from dcnr.text.tokenizer import Tokenizer, add_tokenizer

NETWORKS = Path(__file__).resolve().parent.parent / "networks"
DATASET = "random"
FIRST_CHARACTER = 0x3400
"""From here on come more than 65,536 code points that are letters and no surrogates."""
WINDOWS = 512
"""Rows of data; batches begin again after that."""
FILE_PRECISION = {"1": "fp16", "2": "fp16", "shakespeare": "float32"}


@dataclass(frozen=True)
class Case:
    """One network and how it is trained. `steps` take two seconds or more on a large GPU."""

    name: str
    file: str
    precision: str
    batch: int
    steps: int
    hyper: Mapping[str, str | float]

    def text(self, precision: str | None = None) -> str:
        """The network's file, in `precision` (or the case's own)."""
        text = (NETWORKS / self.file).read_text(encoding="utf-8")
        return text.replace(f"precision: {FILE_PRECISION[self.name]}", f"precision: {precision or self.precision}", 1)

    def graph(self) -> Graph:
        """The graph of the file."""
        return load_graph(self.text(), self.file)


ADAM: Mapping[str, str | float] = {"optimizer": "adam", "lr": 3e-4}
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("1", "topology_1.yml", "fp16", 128, 300, ADAM),
        Case("2", "topology_2.yml", "fp16", 128, 80, ADAM),
        Case("shakespeare", "shakespeare_char.yml", "bf16", 64, 300,
             {"optimizer": "adamw", "lr": 1e-3, "beta2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0}),
    )
}  # fmt: skip


def needs(graph: Graph) -> tuple[int, int]:
    """(vocabulary, sequence length) of a network's embedder."""
    (embedder,) = (node for node in graph.nodes if isinstance(node.config, EmbedderConfig))
    assert isinstance(embedder.config, EmbedderConfig)
    return embedder.config.vocab_size, embedder.config.seq_len


def make_dataset(data_dir: Path, graph: Graph, windows: int = WINDOWS) -> str:
    """Dataset `DATASET` of `data_dir`, with its tokenizer; its name."""
    vocabulary, seq_len = needs(graph)
    rng = np.random.default_rng(1)
    drawn = np.concatenate([rng.permutation(vocabulary), rng.integers(0, vocabulary, max(windows * seq_len, 8 * seq_len))])
    text = data_dir / "random.txt"
    text.write_text("".join(map(chr, (drawn + FIRST_CHARACTER).tolist())), encoding="utf-8")
    add_tokenizer(data_dir, DATASET, Tokenizer.train([text], "char", vocabulary))
    Dataset.create(data_dir, DATASET, [text], DATASET, seq_len=seq_len)
    return DATASET
