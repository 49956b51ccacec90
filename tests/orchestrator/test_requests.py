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


@pytest.mark.parametrize("change", [{"batch": 0}, {"batch": 3, "micro_batches": 2}, {"seed": 2**63}, {"pnodes": -1}, {"extra": 1}])
def test_a_session_that_makes_no_sense_is_refused(change: dict[str, int]) -> None:
    """Before anything else is looked at."""
    with pytest.raises(ValidationError):
        CreateSession.model_validate({"network": "n", "dataset": "d", "steps": 1, "batch": 2, **change})


def test_unknown_fields_are_refused_everywhere() -> None:
    """A misspelt field is never ignored."""
    for model in (Nothing, CreateNetwork, ResumeSession):
        with pytest.raises(ValidationError):
            model.model_validate({"file": "", "session": "s", "unknown": 1})
