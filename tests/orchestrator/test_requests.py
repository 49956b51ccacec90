"""Fields of requests."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dcnr.orchestrator.requests import CreateNetwork, CreateSession, Nothing, ResumeSession


def test_a_session_needs_only_what_has_no_default() -> None:
    """One micro-batch, seed 0, fused, all PNodes, started at once."""
    asked = CreateSession(network="n", dataset="d", steps=1, batch=2)
    assert (asked.micro_batches, asked.seed, asked.fuse, asked.pnodes, asked.start, asked.session, asked.hyper) == (
        1,
        0,
        True,
        0,
        True,
        None,
        {},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": 65537},
        {"batch": 3, "micro_batches": 2},
        {"steps": 2**53 + 1},
        {"seed": 2**63},
        {"pnodes": -1},
        {"extra": 1},
    ],
)
def test_a_session_that_makes_no_sense_is_refused(change: dict[str, int]) -> None:
    """Before anything else is looked at."""
    with pytest.raises(ValidationError):
        CreateSession.model_validate({"network": "n", "dataset": "d", "steps": 1, "batch": 2, **change})


def test_a_session_is_of_a_network_or_of_a_file() -> None:
    """One of them has to be there."""
    assert CreateSession(file="name: n", dataset="d", steps=1, batch=2).network is None
    with pytest.raises(ValidationError, match="neither a network nor a file"):
        CreateSession(dataset="d", steps=1, batch=2)


def test_the_largest_session_is_taken() -> None:
    """Every bound is a value that may be."""
    asked = CreateSession(network="n", dataset="d", steps=2**53, batch=65536, seed=2**63 - 1)
    assert ResumeSession(session="s", steps=asked.steps).steps == 2**53
    with pytest.raises(ValidationError):
        ResumeSession(session="s", steps=2**53 + 1)


def test_unknown_fields_are_refused_everywhere() -> None:
    """A misspelt field is never ignored."""
    for model in (Nothing, CreateNetwork, ResumeSession):
        with pytest.raises(ValidationError):
            model.model_validate({"file": "", "session": "s", "unknown": 1})
