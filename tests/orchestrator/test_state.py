"""Records, and what a new leader makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcnr.ids import Epoch, NetworkId, PNodeId
from dcnr.orchestrator.state import (
    AssignmentRecord,
    CheckpointRecord,
    NetworkRecord,
    PNodeRecord,
    PNodeState,
    SessionState,
    after_restart,
    key_of,
)
from tests.orchestrator.fakes import SESSION, info, record

SCALER = {"updates": 3, "loss_scale": 1.0, "good_steps": 3, "dynamic": False}


@pytest.mark.parametrize("state", [SessionState.WAITING, SessionState.DEPLOYING, SessionState.RUNNING, SessionState.SUSPENDING])
def test_a_session_under_way_is_suspended_by_a_restart_at_its_newest_checkpoint(state: SessionState) -> None:
    """The reason names the step, and the epoch leaves room for a deploy that was not written down."""
    checkpoints = (CheckpointRecord(0, "k0", SCALER), CheckpointRecord(3, "k3", SCALER))
    was = replace(record(), state=state, epoch=Epoch(2), step=0, checkpoints=checkpoints)
    now = after_restart(was)
    assert (now.state, now.step, now.epoch, now.fault) == (SessionState.SUSPENDED, 3, 3, True)
    assert now.reason == f"the orchestrator stopped while it was {state}; its last checkpoint is of step 3, and resume goes on from there"


@pytest.mark.parametrize("state", [SessionState.CREATED, SessionState.SUSPENDED, SessionState.DONE, SessionState.FAILED])
def test_a_session_at_rest_outlives_a_restart_unchanged(state: SessionState) -> None:
    """Nothing was under way, so nothing was lost."""
    was = replace(record(), state=state)
    assert after_restart(was) is was


def test_every_record_is_kept_under_the_name_of_its_thing() -> None:
    """One key per network, session and PNode."""
    assert key_of(NetworkRecord(NetworkId("small"), "", "", 1, 1)) == "small"
    assert key_of(record()) == key_of(AssignmentRecord(SESSION, Epoch(1), {})) == "s"
    assert key_of(PNodeRecord(info("a"), PNodeState.ALIVE)) == PNodeId("a")
