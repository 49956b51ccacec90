"""The fleet under any order of heartbeats, good-byes, cuts, drains, echoes and silence: nobody is lost who was heard, or twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcnr.bus.messages import Heartbeat, PNodeInfo
from dcnr.ids import PNodeId
from dcnr.orchestrator.events import Disconnected, DrainPNode, Echoed, Heard, Tick
from dcnr.orchestrator.fleet import DEAD_AFTER, DEAD_AFTER_CUT, DEAF_AFTER, Fleet, FleetChange, Gone, Joined
from dcnr.orchestrator.state import PNodeRecord, PNodeState

NAMES = st.sampled_from((PNodeId("a"), PNodeId("b")))
LIVES = st.sampled_from(("1", "2"))
KNOWN = PNodeId("old")
"""Of whom an earlier leader wrote that it is there."""


def info(name: PNodeId, life: str) -> PNodeInfo:
    """A process with this name."""
    return PNodeInfo(name, life, "host", "numpy", "cpu", 1 << 30, 0, 1, 1, "0")


class Fleets(RuleBasedStateMachine):
    """A fleet, and what was heard of whom, when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet((PNodeRecord(info(KNOWN, "1"), PNodeState.ALIVE),), 0.0)
        self.there: set[PNodeId] = set()
        """Who joined and is not gone."""
        self.heard: dict[PNodeId, float] = {KNOWN: 0.0}
        """When the process that counts was last heard, or when everybody was forgiven."""
        self.cut: dict[PNodeId, float] = {}
        """When the connection was closed, of those that were not heard since."""
        self.echoed = 0.0

    @rule(name=NAMES, life=LIVES, stopping=st.booleans())
    def beat(self, name: PNodeId, life: str, stopping: bool) -> None:
        """A heartbeat, now and then a good-bye."""
        changes = self.fleet.handle(Heard(Heartbeat(info(name, life), (), stopping)), self.now)
        member = self.fleet.members.get(name)
        if not stopping and member is not None and member.record.info.incarnation == life:
            self.heard[name] = self.now
            self.cut.pop(name, None)
        self.follow(changes)

    @rule()
    def echo(self) -> None:
        """We hear ourselves; after a deaf time everybody is forgiven."""
        if self.now > self.echoed + DEAF_AFTER:
            self.heard = dict.fromkeys(self.heard, self.now)
            self.cut.clear()
        self.echoed = self.now
        self.follow(self.fleet.handle(Echoed(), self.now))

    @rule(name=NAMES)
    def disconnect(self, name: PNodeId) -> None:
        """The server says that a connection was closed."""
        self.follow(self.fleet.handle(Disconnected(name), self.now))
        self.cut[name] = self.now

    @rule(name=NAMES)
    def drain(self, name: PNodeId) -> None:
        """Somebody wants it empty: it takes nothing new."""
        self.follow(self.fleet.handle(DrainPNode(1, name), self.now))
        member = self.fleet.members.get(name)
        assert member is None or not member.present or name not in {one.pnode for one in self.fleet.eligible()}

    @rule(seconds=st.sampled_from((0.25, 0.875, 1.5, 3.125)), hearing=st.booleans())
    def wait(self, seconds: float, hearing: bool) -> None:
        """Time passes, with an echo at its end or without."""
        self.now += seconds
        if hearing:
            self.echo()
        self.judge()

    def judge(self) -> None:
        """Only silence kills, and only while we hear ourselves; whoever was silent, or cut off, for long is dead then."""
        deaf, heard = self.now > self.echoed + DEAF_AFTER, dict(self.heard)
        changes = self.fleet.handle(Tick(), self.now)
        for change in changes:
            if isinstance(change, Gone):
                silent, cut = self.now - heard[change.pnode], self.cut.get(change.pnode)
                assert not deaf
                assert silent >= DEAD_AFTER or (cut is not None and self.now - cut >= DEAD_AFTER_CUT)
        self.follow(changes)
        if not deaf:
            self.follow(self.fleet.handle(Tick(), self.now))
            assert all(self.now - self.heard[name] < DEAD_AFTER for name in self.there)
            assert all(self.now - cut < DEAD_AFTER_CUT for name, cut in self.cut.items() if name in self.there)

    def follow(self, changes: list[FleetChange]) -> None:
        """Whoever joins was not there, or is heard by this leader for the first time; whoever goes was there."""
        for change in changes:
            match change:
                case Joined(pnode):
                    assert pnode not in self.there
                    self.there.add(pnode)
                case Gone(pnode):
                    assert pnode in self.there or pnode == KNOWN
                    self.there.discard(pnode)
                    self.cut.pop(pnode, None)

    @invariant()
    def knows_who_is_there(self) -> None:
        """Work goes only to those who joined; and a deadline that has passed does not come back for ever."""
        self.fleet.validate()
        assert {one.pnode for one in self.fleet.present()} - {KNOWN} == self.there
        assert {one.pnode for one in self.fleet.eligible()} <= self.there
        due = self.fleet.deadline()
        assert due is None or due > self.now

    def teardown(self) -> None:
        """In the end everybody who is silent is found out."""
        for _ in range(10):
            self.wait(0.5, hearing=True)
        assert not self.there


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=50, stateful_step_count=40, derandomize=True, deadline=None)
