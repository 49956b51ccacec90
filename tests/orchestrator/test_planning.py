"""What must be true before a session is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.data.dataset import Dataset
from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId
from dcnr.network.load import load_graph
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.planning import check_data, check_hyper, count_parameters, graphs_of, prepared
from dcnr.orchestrator.state import SessionState
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


def test_data_that_cannot_be_validated_is_refused_if_it_is_to_be(tmp_path: Path) -> None:
    """A dataset without a validation split trains, and is not validated; the remedy is told."""
    make_data(tmp_path)
    check_data(graph(), tmp_path, "text", validates=True)
    Dataset.create(tmp_path, "all", [tmp_path / "text.txt"], "chars", validation=0.0, seq_len=4)
    check_data(graph(), tmp_path, "all")
    with pytest.raises(UserError, match="fewer than two tokens for validation") as refused:
        check_data(graph(), tmp_path, "all", validates=True)
    assert "larger share" in str(refused.value.remedy)


def test_hyper_parameters_may_be_strings_and_have_defaults() -> None:
    """As `--set key=value` gives them."""
    assert check_hyper({"lr": "1e-3", "warmup_steps": "5"}) == Hyper(lr=1e-3, warmup_steps=5)
    assert check_hyper({}) == Hyper()
    with pytest.raises(UserError, match="mean nothing without validations"):
        check_hyper({"patience": 2})


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
