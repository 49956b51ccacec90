"""What must be true before a session is made: the graph can be trained, the data fits it, every hyper-parameter is known.

These functions block; call them from a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from dcnr.data.dataset import Dataset
from dcnr.data.split import Split
from dcnr.errors import DcnrError, UserError
from dcnr.ids import SessionId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.feed import feeds_of
from dcnr.orchestrator.state import UNDER_WAY, SessionRecord
from dcnr.passes import prepare
from dcnr.storage.base import Storage
from dcnr.text.tokenizer import Tokenizer


def prepared(file: str, file_name: str, fuse: bool) -> Graph:
    """The graph that is trained: what placement divides and PNodes run. Raises `UserError`."""
    return prepare(load_graph(file, file_name), fuse)


def graphs_of(records: Iterable[SessionRecord]) -> dict[SessionId, Graph | str]:
    """The graphs of the sessions that are not at rest, as a new leader needs them; in words why there is none, where there is none."""
    return {record.session: _graph_of(record) for record in records if record.state in UNDER_WAY}


def _graph_of(record: SessionRecord) -> Graph | str:
    try:
        return prepared(record.network_file, record.file_name, record.fuse)
    except DcnrError as error:
        return str(error)


def count_parameters(graph: Graph) -> int:
    """Trainable numbers of a graph as it was loaded; tied ones are counted once."""
    nodes = prepare(graph, fuse=False).nodes
    return sum(math.prod(parameter.shape) for node in nodes for parameter in instantiate(node).parameters)


_NO_TEXT: Mapping[Split, str] = {
    "train": "use a dataset with more text",
    "validation": "create the dataset with --validation above 0, or train with validate_every=0",
}
"""What to do where a split has next to nothing."""


def validated(hyper: Hyper) -> tuple[Split, ...]:
    """The splits that a session reads besides that of training."""
    return ("validation",) if hyper.validate_every else ()


def check_data(graph: Graph, data_dir: Path, name: str, storage: Storage | None = None, also: Sequence[Split] = ()) -> None:
    """Raise `UserError` unless dataset `name` exists, is long enough for `graph` (the training split for a whole window, those that are
    `also` read for one target), and has no id that `graph` does not know.
    """
    feeds = feeds_of(graph)
    manifest = Dataset.open(data_dir, name, storage).manifest
    for split in ("train", *also):
        tokens, wanted = manifest.tokens(split), feeds.seq_len + 1 if split == "train" else 2
        if tokens < wanted:
            raise UserError(
                f"dataset '{name}': the {split} split has {tokens} tokens, and node '{feeds.ids[0][0]}' of network '{graph.name}' reads"
                f" windows of {feeds.seq_len}, which take {wanted}{'' if split == 'train' else ' or more'}",
                f"use a dataset with more text for {split}, or a seq_len of {tokens - 1} or less" if tokens > 1 else _NO_TEXT[split],
            )
    for node_id, _slot in (*feeds.ids, *feeds.targets):
        known = getattr(graph.by_id[node_id].config, "vocab_size", None)
        if known is not None and known < manifest.vocab_size:
            size = manifest.vocab_size
            raise UserError(
                f"dataset '{name}' has a vocabulary of {size}, node '{node_id}' of network '{graph.name}' of {known}",
                f"set vocab_size to {size} or more, or use a dataset with a smaller tokenizer",
            )


def check_tokenizer(tokenizer: Tokenizer, data_dir: Path, name: str, storage: Storage | None = None) -> None:
    """Raise `UserError` unless dataset `name` was made with `tokenizer`, the one that a session was imported with."""
    dataset = Dataset.open(data_dir, name, storage)
    if dataset.tokenizer().to_json() != tokenizer.to_json():
        raise UserError(
            f"dataset '{name}' was made with another tokenizer ('{dataset.manifest.tokenizer}') than the network",
            "make a dataset with the network's tokenizer.json, and import the folder again with --dataset",
        )


def check_hyper(given: Mapping[str, object]) -> Hyper:
    """The hyper-parameters, defaults filled in. Raises `UserError` that names the nearest known key or what a value may be."""
    unknown = [key for key in given if key not in Hyper.model_fields]
    if unknown:
        nearest = get_close_matches(unknown[0], Hyper.model_fields, n=1, cutoff=0.0)
        raise UserError(f"unknown hyper-parameter '{unknown[0]}'", f"did you mean '{nearest[0]}'? known: {', '.join(Hyper.model_fields)}")
    try:
        hyper = Hyper.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"hyper-parameter '{first['loc'][0]}': {first['msg']}, not {first['input']!r}") from error
    if (hyper.patience or hyper.validate_batches) and not hyper.validate_every:
        raise UserError("patience and validate_batches mean nothing without validations", "set validate_every to a number of steps")
    return hyper
