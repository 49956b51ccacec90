"""A session under any order of losses, deaths, drains, suspensions and new leaders: each step is done, as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import repeat

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Store
from dcnr.orchestrator.events import Draining, Lost, Offered, StartSession
from dcnr.orchestrator.session import Session, Settings
from dcnr.orchestrator.state import AssignmentRecord, SessionRecord
from tests.orchestrator.fakes import SESSION, graph, info, record
from tests.orchestrator.story import START, SUSPEND, TWO, S, Story, trained

NAMES = st.sampled_from((PNodeId("a"), PNodeId("b"), PNodeId("c")))
STEPS = 5


@cache
def undisturbed() -> dict[int, tuple[float, float, bool]]:
    """(loss, norm, skipped) of each step of a run to which nothing happens."""
    story = trained(TWO, steps=STEPS, checkpoint_every=2)
    assert story.state is S.DONE
    return story.rows


class Sessions(RuleBasedStateMachine):
    """A session, the fake PNodes that are there, and what goes wrong next."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story(record(steps=STEPS, checkpoint_every=2))
        self.alive = {PNodeId("a"), PNodeId("b")}
        self.terms = 1
        self.epoch = Epoch(0)
        self.losing: Iterator[bool] = repeat(False)
        self.story.lose = self.lost
        self.story.drop = self.lost
        self.story.tell(START)

    def lost(self, _what: object) -> bool:
        """Whether this message is."""
        return next(self.losing, False)

    def offer(self) -> None:
        """The fleet offers whoever is there."""
        self.story.tell(Offered(tuple(info(name) for name in sorted(self.alive))))

    @rule(seconds=st.sampled_from((0.5, 1.5, 4.0)))
    def wait(self, seconds: float) -> None:
        """Time passes, and the fleet is offered."""
        self.story.wait(seconds)
        self.offer()

    @rule(which=st.lists(st.booleans(), max_size=12))
    def lose(self, which: list[bool]) -> None:
        """Of the messages that come next, some are lost."""
        self.losing = iter(which)

    @rule(name=NAMES)
    def come(self, name: PNodeId) -> None:
        """A PNode comes, or one that was there starts anew."""
        self.die(name)
        self.alive.add(name)
        self.offer()

    @rule(name=NAMES)
    def die(self, name: PNodeId) -> None:
        """A PNode dies, and that is found out."""
        if name in self.alive:
            self.alive.discard(name)
            self.story.there.pop(name, None)
            self.story.pnodes.dies(name)
            self.story.tell(Lost(name, "killed"))

    @rule(name=NAMES)
    def drain(self, name: PNodeId) -> None:
        """A PNode is to be emptied."""
        self.story.tell(Draining(name))

    @rule()
    def suspend(self) -> None:
        """Somebody wants it to rest."""
        self.story.tell(SUSPEND)

    @precondition(lambda self: self.story.state is S.SUSPENDED)
    @rule()
    def resume(self) -> None:
        """Somebody wants it to go on."""
        self.story.tell(StartSession(3, SESSION, graph(), self.story.session.record.newest))
        self.offer()

    @precondition(lambda self: len(self.story.session.record.checkpoints) > 1)
    @rule()
    def damage(self) -> None:
        """The newest checkpoint rots."""
        newest = self.story.session.record.newest
        assert newest is not None
        if newest.step < STEPS:
            self.story.pnodes.damaged.add(newest.key)

    @rule()
    def change_leader(self) -> None:
        """Another orchestrator takes over what is written down."""
        stored = [command.record for command in self.story.commands if isinstance(command, Store)]
        records = [one for one in stored if isinstance(one, SessionRecord)]
        assignment = next((one for one in reversed(stored) if isinstance(one, AssignmentRecord)), None)
        self.terms += 1
        after = Settings(PNodeId(f"trainer-{self.terms}"), "file:///data", Epoch(self.terms * 1000))
        self.story.session = Session.taken_over(records[-1], graph(), assignment, after, self.story.now)
        self.story.commands += self.story.session.opening()

    @invariant()
    def holds(self) -> None:
        """It never contradicts itself, and epochs only grow."""
        self.story.session.validate()
        assert self.story.session.record.epoch >= self.epoch
        self.epoch = self.story.session.record.epoch

    def teardown(self) -> None:
        """Once nothing goes wrong any more it comes to its end, with the rows of the undisturbed run."""
        self.losing = repeat(False)
        self.story.pnodes.damaged.clear()
        self.alive |= {PNodeId("a"), PNodeId("b")}
        for _ in range(60):
            if self.story.state is S.DONE:
                break
            if self.story.state is S.SUSPENDED:
                self.resume()
            self.wait(4.0)
        assert self.story.state is S.DONE, self.story.session.record
        assert self.story.rows == undisturbed()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=25, stateful_step_count=25, derandomize=True, deadline=None)
