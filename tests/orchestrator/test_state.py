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
