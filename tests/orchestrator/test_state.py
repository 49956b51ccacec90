"""Records."""

from __future__ import annotations

from dataclasses import replace

from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator.state import (
    ACTIVE,
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    PNodeState,
    SessionState,
    ValidationRecord,
    key_of,
)
from tests.orchestrator.fakes import SESSION, info, record


def test_the_newest_checkpoint_is_that_of_the_largest_step() -> None:
    """In whatever order they are listed; a session that has none starts from its seed."""
    checkpoints = tuple(CheckpointRecord(step, f"k{step}", {}) for step in (3, 7, 0))
    newest = replace(record(), checkpoints=checkpoints).newest
    assert newest is not None
    assert newest.step == 7
    assert record().newest is None


def test_pnodes_hold_parts_of_whatever_is_under_way() -> None:
    """Everything that is neither at rest nor waits."""
    at_rest = {SessionState.CREATED, SessionState.SUSPENDED, SessionState.DONE, SessionState.FAILED}
    assert set(SessionState) - at_rest - {SessionState.WAITING} == ACTIVE


def test_every_record_is_kept_under_the_name_of_its_thing() -> None:
    """One key per network, session and PNode."""
    assert key_of(NetworkRecord(NetworkId("small"), "", "", 1, 1)) == "small"
    assert key_of(record()) == key_of(AssignmentRecord(SESSION, Epoch(1), {})) == "s"
    assert key_of(PNodeRecord(info("a"), PNodeState.ALIVE)) == PNodeId("a")


def test_the_checkpoint_of_the_best_validation_is_kept_until_there_is_one_of_a_better() -> None:
    """Where there is none of the newest best, that of the one before stays; what was removed is kept no more."""
    two, four, six = (CheckpointRecord(step, f"k{step}", {}) for step in (2, 4, 6))
    best = replace(record(), validation=ValidationRecord(2, 2, 3.0)).with_checkpoints((two, four))
    assert best.kept == 2
    better = best.with_validation(ValidationRecord(6, 6, 2.0))
    assert better.kept == 2
    assert better.with_checkpoints((two, four, six)).kept == 6
    assert better.with_checkpoints((four,)).kept is None
    assert better.with_validation(None).kept == 2


def test_a_best_validation_without_a_checkpoint_is_owed_where_pnodes_still_stand_at_it() -> None:
    """Anywhere else it could not be done."""
    known = ValidationRecord(4, 4, 1.0)
    at = replace(record(), validation=known)
    assert at.standing_at(4).validation == replace(known, upto=3)
    assert at.standing_at(5) == at
    assert (later := at.with_validation(replace(known, upto=6))).standing_at(4) == later
    kept = at.with_checkpoints((CheckpointRecord(4, "k4", {}),))
    assert kept.standing_at(4) == kept
    assert record().standing_at(4) == record()
