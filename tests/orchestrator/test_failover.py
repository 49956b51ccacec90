"""What a new leader makes of a deployment that it finds."""

from __future__ import annotations

import pytest

from dcnr.bus.messages import Decision, Hosted
from dcnr.errors import InvariantError
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.failover import HEARD_WITHIN, Adoption, Found
from dcnr.orchestrator.state import AssignmentRecord
from tests.orchestrator.fakes import SESSION, info
from tests.orchestrator.story import A, B

EPOCH = Epoch(7)


@pytest.fixture
def adoption() -> Adoption:
    """Two PNodes, deployed at step 10."""
    return Adoption(AssignmentRecord(SESSION, EPOCH, {"x": A, "y": B}, step=10), 100.0)


def decision(step: int) -> Decision:
    """Of a step."""
    return Decision(SESSION, EPOCH, step, False, 0.1, 1.0, 1.0, 2.5, 1.0, 1.0, {})


def hosted(step: int, attempt: int = 0, epoch: Epoch = EPOCH, known: bool = True) -> Hosted:
    """Where a PNode stands."""
    return Hosted(SESSION, epoch, step, 1, 1, attempt=attempt, last=decision(step) if known else None)


def heard(one: Adoption, a: Hosted, b: Hosted) -> Found | str | None:
    """Both say where they stand."""
    assert one.heard(info("a"), a) is None
    one.validate()
    return one.heard(info("b"), b)


def test_it_goes_on_after_the_newest_decision_with_an_attempt_that_nobody_heard_of(adoption: Adoption) -> None:
    """One may be a step behind: the decision was on its way."""
    found = heard(adoption, hosted(14, attempt=3), hosted(15, attempt=0))
    assert found == Found((info("a"), info("b")), decision(15), 4)


def test_what_a_pnode_said_last_counts(adoption: Adoption) -> None:
    """It may still get the decision that the old leader sent."""
    assert adoption.heard(info("a"), hosted(14)) is None
    assert adoption.heard(info("a"), hosted(15)) is None
    found = adoption.heard(info("b"), hosted(15))
    assert isinstance(found, Found)
    assert found.last == decision(15)


def test_where_nothing_was_decided_it_stands_where_it_was_deployed(adoption: Adoption) -> None:
    """There is no decision to send again."""
    assert heard(adoption, hosted(10, known=False), hosted(10, known=False)) == Found((info("a"), info("b")), None, 1)


@pytest.mark.parametrize(("a", "b"), [(13, 15), (9, 10), (9, 9)])
def test_pnodes_that_stand_too_far_apart_cannot_go_on(adoption: Adoption, a: int, b: int) -> None:
    """Or before the step that they were deployed at: that is not this deployment."""
    found = heard(adoption, hosted(a), hosted(b))
    assert isinstance(found, str)
    assert str(a) in found


def test_steps_that_nobody_has_a_decision_of_cannot_be_gone_on_from(adoption: Adoption) -> None:
    """Without the scaler's state nothing can be decided."""
    found = heard(adoption, hosted(12, known=False), hosted(12, known=False))
    assert found == "its PNodes stand at the steps 12, and the last decision is not known"


def test_another_epoch_ends_the_search_at_once(adoption: Adoption) -> None:
    """The records were not up to date."""
    assert adoption.heard(info("b"), hosted(12, epoch=Epoch(8))) == "PNode b holds it in epoch 8, not in 7"


def test_who_is_not_heard_within_three_seconds_is_missing(adoption: Adoption) -> None:
    """Three seconds in which we could hear."""
    adoption.heard(info("a"), hosted(12))
    assert adoption.missing(100.0 + HEARD_WITHIN - 0.1) is None
    adoption.forgive(102.0)
    assert adoption.deadline() == 102.0 + HEARD_WITHIN
    assert adoption.missing(100.0 + HEARD_WITHIN) is None
    assert adoption.missing(105.0) == "PNode b did not say within 3 s that it still holds the session"


def test_an_adoption_that_is_over_is_no_longer_looked_for(adoption: Adoption) -> None:
    """Its owner forgets it when everyone was heard."""
    heard(adoption, hosted(12), hosted(12))
    with pytest.raises(InvariantError):
        adoption.validate()


def test_a_stranger_is_never_among_its_pnodes(adoption: Adoption) -> None:
    """Who hosts it is what was stored."""
    assert PNodeId("z") not in adoption.hosts
    assert adoption.hosts == {A, B}
