"""What must be true before a session is made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.data.dataset import Dataset
from dcnr.data.transfer import push_dataset
from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId
from dcnr.network.load import load_graph
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.planning import check_data, check_hyper, check_tokenizer, count_parameters, graphs_of, prepared
from dcnr.orchestrator.state import SessionState
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, no_progress, open_tokenizer
from tests.agents.tiny import TINY
from tests.orchestrator.fakes import NETWORK, graph, record
from tests.orchestrator.running import make_data


def test_a_tied_matrix_is_counted_once() -> None:
    """By hand: tokens, layernorm, two heads, two linear layers; the LM head has none of its own."""
    heads = 2 * (3 * 4 * 8 + 3 * 4)
    assert count_parameters(load_graph(TINY, "tiny.yml")) == 17 * 8 + 2 * 8 + heads + (8 * 16 + 16) + (16 * 8 + 8)


def test_the_count_does_not_depend_on_passes() -> None:
    """Fused or not, the parameters are those of the file."""
    counts = {
        count_parameters(graph_) for graph_ in (load_graph(NETWORK, "n"), prepared(NETWORK, "n", True), prepared(NETWORK, "n", False))
    }
    assert len(counts) == 1


def test_data_that_fits_is_accepted_and_data_that_is_missing_named(tmp_path: Path) -> None:
    """The dataset's name is in the error."""
    make_data(tmp_path)
    check_data(graph(), tmp_path, "text")
    with pytest.raises(NotFound, match="nix"):
        check_data(graph(), tmp_path, "nix")


def made(data_dir: Path, text: str, validation: float, vocabulary: str = "abcd ") -> None:
    """A dataset `d` of `text` whose own sequence length is 1: every text of two tokens or more is one."""
    (data_dir / "learn").write_text(vocabulary)
    (data_dir / "text").write_text(text)
    add_tokenizer(data_dir, "c", Tokenizer.train([data_dir / "learn"], "char"))
    Dataset.create(data_dir, "d", [data_dir / "text"], "c", validation, seq_len=1)


@pytest.mark.parametrize(("tokens", "fits"), [(2, False), (3, False), (4, False), (5, True)])
def test_data_too_short_for_the_network_is_refused_with_the_node(tmp_path: Path, tokens: int, fits: bool) -> None:
    """T is 4: what has T tokens or fewer holds no window. (Of 0 or 1 tokens there can be no dataset at all.)"""
    made(tmp_path, "abcd abcd"[:tokens], 0.0)
    if fits:
        check_data(graph(), tmp_path, "d")
        return
    told = (
        f"the train split has {tokens} tokens, and node 'embed' of network '.*' reads windows of 4, which take 5.*seq_len of {tokens - 1}"
    )
    with pytest.raises(UserError, match=told):
        check_data(graph(), tmp_path, "d")


@pytest.mark.parametrize("tokens", [0, 1])
def test_there_is_no_dataset_of_no_or_one_token(tmp_path: Path, tokens: int) -> None:
    """Not even of sequence length 1."""
    with pytest.raises(UserError, match=f"train split has {tokens} tokens"):
        made(tmp_path, "a" * tokens, 0.0)


@pytest.mark.parametrize(("tokens", "fits"), [(0, False), (1, False), (2, True), (4, True), (5, True)])
def test_a_validation_split_without_a_target_is_refused_where_it_is_read(tmp_path: Path, tokens: int, fits: bool) -> None:
    """By the node that would read it; less than a window will do, and who does not validate needs none."""
    made(tmp_path, "abcd " * 2 + "abcda"[:tokens], tokens / (10 + tokens))
    assert Dataset.open(tmp_path, "d").manifest.validation_tokens == tokens
    check_data(graph(), tmp_path, "d")
    if fits:
        check_data(graph(), tmp_path, "d", also=("validation",))
        return
    with pytest.raises(UserError, match=rf"the validation split has {tokens} tokens, and node 'embed'.*--validation above 0"):
        check_data(graph(), tmp_path, "d", also=("validation",))


def test_a_vocabulary_that_the_embedder_does_not_hold_is_refused_with_the_node(tmp_path: Path) -> None:
    """11 fit; the tokenizer has 12, though the text uses only five of them."""
    made(tmp_path, "abcd " * 10, 0.1, vocabulary="abcdefghijk ")
    with pytest.raises(UserError, match=r"'d' has a vocabulary of 12, node 'embed' of network '.*' of 11.*set vocab_size to 12"):
        check_data(graph(), tmp_path, "d")


def test_a_dataset_of_the_storage_is_fetched(tmp_path: Path) -> None:
    """By an orchestrator on another machine than that which made it."""
    make_data(tmp_path / "here")
    storage = FileStorage(tmp_path / "storage")
    asyncio.run(push_dataset(tmp_path / "here", "text", storage, no_progress))
    check_data(graph(), tmp_path / "there", "text", storage)
    with pytest.raises(NotFound, match=r"no dataset 'nix' in .*, nor in file://"):
        check_data(graph(), tmp_path / "there", "nix", storage)


def test_hyper_parameters_may_be_strings_and_have_defaults() -> None:
    """As `--set key=value` gives them."""
    assert check_hyper({"lr": "1e-3", "warmup_steps": "5"}) == Hyper(lr=1e-3, warmup_steps=5)
    assert check_hyper({}) == Hyper()


@pytest.mark.parametrize(("given", "told"), [({"momentun": 1}, "'momentum'"), ({"lr": -1}, "greater than 0, not -1")])
def test_a_hyper_parameter_that_is_wrong_is_named(given: dict[str, object], told: str) -> None:
    """With the nearest known key, or what its value may be."""
    with pytest.raises(UserError, match=told):
        check_hyper(given)


def test_a_new_leader_needs_the_graphs_of_what_is_not_at_rest() -> None:
    """A file that this version cannot read is told in words, and is no reason to stop."""
    at_rest = replace(record(), session=SessionId("rest"), state=SessionState.DONE)
    waits = replace(record(), session=SessionId("waits"), state=SessionState.WAITING)
    runs = replace(record(), session=SessionId("runs"), state=SessionState.RUNNING)
    broken = replace(runs, session=SessionId("broken"), network_file="name: [")
    graphs = graphs_of([at_rest, waits, runs, broken])
    assert graphs.keys() == {"waits", "runs", "broken"}
    assert graphs[waits.session] == graphs[runs.session] == graph()
    assert "small.yml" in str(graphs[broken.session])


def test_a_tokenizer_is_compared_with_that_of_a_dataset(tmp_path: Path) -> None:
    """Another one of the same size is another one; that of the dataset itself is not, wherever the dataset is."""
    make_data(tmp_path)
    check_tokenizer(open_tokenizer(tmp_path, "chars"), tmp_path, "text")
    storage = FileStorage(tmp_path / "storage")
    asyncio.run(push_dataset(tmp_path, "text", storage, no_progress))
    check_tokenizer(open_tokenizer(tmp_path, "chars"), tmp_path / "there", "text", storage)
    (tmp_path / "other.txt").write_text("efgh ")
    with pytest.raises(UserError, match=r"dataset 'text' was made with another tokenizer \('chars'\)"):
        check_tokenizer(Tokenizer.train([tmp_path / "other.txt"], "char"), tmp_path, "text")
