"""A whole cluster on virtual time, with one session to train, and a plan of what goes wrong.

Rule 1: everything that is random comes from the seed, so a seed is a run.
Rule 2: after `Plan.quiet` the world is mended: then the session must end by itself within `ENOUGH` seconds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from unittest.mock import patch

import click
from pydantic import TypeAdapter

from dcnr.agents.commands import Apply, Settle
from dcnr.bus import codec, subjects
from dcnr.bus.base import Entry
from dcnr.ids import PNodeId
from dcnr.orchestrator import leader
from dcnr.orchestrator.events import CreateSession, DrainPNode, Event, RebalanceSession, StartSession, SuspendSession
from dcnr.orchestrator.state import SessionRecord, SessionState
from dcnr.orchestrator.store import BUCKETS, newest_checkpoint
from tests.simulation.agent import Agent
from tests.simulation.disk import Disk, Now
from tests.simulation.faults import Fault, Plan
from tests.simulation.net import Net, Noise
from tests.simulation.networks import BATCH, NETWORK, SEED, SESSION, graph_of
from tests.simulation.orchestrator import Orchestrator
from tests.simulation.process import AnyProcess
from tests.simulation.scheduler import Scheduler
from tests.simulation.surroundings import Row

ENOUGH = 200.0
"""Seconds after the last fault in which any run must end."""
STORAGE_TAKES = 0.02
"""Seconds that a write to storage takes at most, while all is well."""
LET_GO = 6.0
"""Seconds until everybody has let go of a session that is over."""
OVER = frozenset({SessionState.DONE, SessionState.FAILED})
_RECORD = TypeAdapter(SessionRecord)


class Broken(AssertionError):
    """Something that must hold does not."""


class World:
    """One run. `trace` prints what happens."""

    def __init__(self, plan: Plan, now: Now, trace: bool = False) -> None:
        self.plan = plan
        self.now = now
        self.trace = trace
        self.scheduler = Scheduler()
        self.rng = Random(f"{plan.seed} world")
        self.net = Net(self.scheduler, Random(f"{plan.seed} net"), plan.noise)
        self.disk = Disk()
        self.storage_takes = STORAGE_TAKES
        self.rows: list[Row] = []
        self.orchestrators: list[Orchestrator] = []
        self.lives: list[AnyProcess] = []
        """All processes that ever were."""
        self.seen: Counter[str] = Counter()
        """How often things went wrong, and remedies were used."""
        self._phases: Counter[str] = Counter()
        self._waiting: list[Fault] = []
        """Faults whose phase has not come yet."""
        self._applied: dict[tuple[AnyProcess, int], int] = {}
        """The last step of each life of an agent, by epoch."""
        self._known: Entry | None = None
        """The session as it was last looked at."""
        self._ended = False
        for kind, nth in plan.doomed:
            self.net.doomed.setdefault(kind, set()).add(nth)

    @property
    def names(self) -> list[PNodeId]:
        """Of all agents."""
        return [PNodeId("abcd"[at]) for at in range(self.plan.agents)]

    @property
    def record(self) -> SessionRecord | None:
        """The session, as it is written down."""
        entry = self.now(self.net.bucket(BUCKETS[SessionRecord]).get(SESSION))
        return None if entry is None else _RECORD.validate_python(codec.unpack(entry.value))

    @property
    def where(self) -> str:
        """Where the session stands, in words."""
        one = self.record
        return f"{one.state} in epoch {one.epoch}, checkpoint of step {one.step} of {one.steps}: {one.reason}" if one else "nowhere"

    def run(self) -> None:
        """From the start to the end of the session, and a little more, in which everybody lets go of it."""
        with patch.object(leader, "gone", self._is_gone), patch.object(leader, "_this_process", lambda: ("here", 1, 0.0)):
            self._run()

    def _run(self) -> None:
        for _ in range(1 + self.plan.standbys):
            self._start_orchestrator()
        for name in self.names:
            self.scheduler.after(self.rng.uniform(0.0, self.plan.joins), partial(self._start_agent, name))
        start = self.rng.choice((0.2, 1.0))
        self.scheduler.at(start, self._begin)
        if not self.scheduler.run(start + self.plan.quiet + ENOUGH, self._over):
            raise Broken(f"not done after {self.scheduler.now:.0f} s: {self.where}")
        self._mend()
        self.scheduler.run(self.scheduler.now + LET_GO, lambda: False)

    # -- what processes tell -----------------------------------------------------------------------------------------------

    def note(self, phase: str, process: AnyProcess) -> None:
        """Faults that wait for this happen now."""
        if not self._waiting:
            return
        self._phases[phase] += 1
        for fault in [one for one in self._waiting if one.phase == phase and one.nth == self._phases[phase]]:
            self._waiting.remove(fault)
            self._happen(fault, process)

    def applies(self, agent: AnyProcess, job: Apply | Settle) -> None:
        """Steps come one after the other, and each once."""
        step = job.decision.step if isinstance(job, Apply) else job.step
        last = self._applied.get((agent, job.epoch), step - 1)
        if step != last + 1:
            raise Broken(f"{agent.name} applies step {step} after step {last} in epoch {job.epoch}")
        self._applied[agent, job.epoch] = step

    def row(self, metric: Row) -> None:
        """It is on the leader's disk."""
        self.rows.append(metric)

    def gone(self, process: AnyProcess) -> None:
        """It ends in order."""
        process.kill()
        self.net.leave(process)

    def _is_gone(self, holder: leader.Holder) -> bool:
        """Whether a leader was a process of this host that is gone; in half of the worlds the others are on other hosts."""
        return self.plan.seed % 2 == 0 and any(life.name == holder.id and not life.alive for life in self.lives)

    def say(self, *words: object) -> None:
        """For whoever watches."""
        if self.trace:
            click.echo(" ".join(map(str, (f"{self.scheduler.now:9.4f}", *words))))

    # -- who runs ----------------------------------------------------------------------------------------------------------

    def _start_agent(self, name: PNodeId) -> None:
        self._born(Agent(name, f"{len(self.lives):04}", self, Random(f"{self.plan.seed} life {len(self.lives)}")))

    def _start_orchestrator(self) -> None:
        number = len(self.lives)
        orchestrator = Orchestrator(PNodeId(f"orchestrator-{number}"), self, Random(f"{self.plan.seed} life {number}"))
        self.orchestrators.append(orchestrator)
        self._born(orchestrator)

    def _born(self, process: AnyProcess) -> None:
        self.lives.append(process)
        process.trace = self.say if self.trace else None

    def _leader(self) -> Orchestrator | None:
        return next((one for one in reversed(self.orchestrators) if one.alive and one.leads), None)

    def _begin(self) -> None:
        """The session is asked for, and things may go wrong."""
        self._submit()
        self._waiting = [fault for fault in self.plan.faults if fault.at is None]
        self.scheduler.after(self.plan.quiet, self._mend)
        for fault in self.plan.faults:
            if fault.at is not None:
                self.scheduler.after(fault.at, partial(self._happen, fault, None))

    def _submit(self) -> None:
        """As a user would, who tries until it is accepted."""
        if self.record is not None:
            return
        plan = self.plan
        graph = graph_of(plan.variant.file)
        record = SessionRecord(
            SESSION, NETWORK, plan.variant.file, "net.yml", "none", plan.steps, BATCH, plan.variant.micro_batches, SEED, plan.hyper, False,
            plan.pnodes,
        )  # fmt: skip
        self._ask(CreateSession(1, record, graph))
        self.scheduler.after(0.1, self._submit)

    def _over(self) -> bool:
        entry = self.net.bucket(BUCKETS[SessionRecord])._entries.get(SESSION)
        if entry is not self._known:
            self._known, record = entry, self.record
            self._ended = record is not None and record.state in OVER
        return self._ended

    # -- what goes wrong ---------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault, process: AnyProcess | None) -> None:
        self.say("***", fault, process.name if process else "")
        self.seen["faults"] += 1
        match fault.what:
            case "server":
                self.net.go_down()
                self.scheduler.after(fault.seconds, self.net.come_up)
            case "disk full":
                self.disk.full = True
                self.scheduler.after(fault.seconds, self._disk_is_well)
            case "disk slow":
                self.storage_takes = fault.seconds
                self.scheduler.after(fault.seconds, self._disk_is_well)
            case "rot":
                self._rot()
            case "apart":
                self._apart(fault)
            case "suspend":
                self._ask(SuspendSession(3, SESSION))
                self._resume()
            case "rebalance":
                self._ask(RebalanceSession(4, SESSION))
            case "drain":
                self._drain(fault)
            case _:
                victim = process or self._victim(fault)
                if victim is not None and victim.alive:
                    self._hit(fault, victim)

    def _victim(self, fault: Fault) -> AnyProcess | None:
        return self._leader() if fault.victim < 0 else next(iter(self._lives_of(self.names[fault.victim])), None)

    def _hit(self, fault: Fault, victim: AnyProcess) -> None:
        what, seconds, after = fault.what.removeprefix("leader "), fault.seconds, self.scheduler.after
        match what:
            case "kill":
                self._kill(victim)
                after(seconds, lambda: self._replace(victim))
            case "stop":
                victim.stop(self.rng.random() < 0.5)
                after(seconds, victim.go_on)
            case "cut" | "mute" | "deaf":
                for way in [self.net.mute] * (what != "deaf") + [self.net.deaf] * (what != "mute"):
                    way.add(victim.name)
                    after(seconds, partial(way.discard, victim.name))
            case "slow":
                victim.slow = 20.0
                after(seconds, lambda: setattr(victim, "slow", 1.0))
            case _ if isinstance(victim, Agent):
                self._hit_agent(what, seconds, victim)

    def _hit_agent(self, what: str, seconds: float, victim: Agent) -> None:
        match what:
            case "break":
                victim.thread.breaks = True
            case "hang":
                victim.thread.hang()
                self.scheduler.after(seconds * 10, victim.thread.go_on)
            case "twin":
                if self.rng.random() < 0.5:
                    victim.stop(False)
                    self.scheduler.after(seconds, victim.go_on)
                self._start_agent(victim.info.pnode)
            case "leave":
                self.scheduler.after(0.0, victim.leave)
                self.scheduler.after(seconds, lambda: self._replace(victim))

    def _kill(self, victim: AnyProcess) -> None:
        victim.kill()
        self.net.leave(victim)
        if self.plan.tells and isinstance(victim, Agent):
            self.net.publish(victim, subjects.DISCONNECTS, f"closed {victim.name}".encode(), "Disconnect")

    def _replace(self, gone: AnyProcess) -> None:
        """Start what was killed anew, as a supervisor would."""
        if gone.alive:
            return
        if isinstance(gone, Agent):
            if not self._lives_of(gone.info.pnode):
                self._start_agent(gone.info.pnode)
        else:
            self._start_orchestrator()

    def _ask(self, ask: Event) -> None:
        """As a user would, who is told if it cannot be done now."""
        leading = self._leader()
        if leading is not None and not leading.stopped:
            leading.put(ask)

    def _resume(self) -> None:
        """Somebody wants it to go on as soon as it rests."""
        record = self.record
        if record is not None and record.state is SessionState.SUSPENDED:
            newest = self.now(newest_checkpoint(self.disk, SESSION))
            self._ask(StartSession(5, SESSION, graph_of(record.network_file), newest))
        self.scheduler.after(1.0, self._resume)

    def _apart(self, fault: Fault) -> None:
        pair = (self.names[fault.victim], self.rng.choice(self.names))
        self.net.apart.add(pair)
        self.scheduler.after(fault.seconds, lambda: self.net.apart.discard(pair))

    def _drain(self, fault: Fault) -> None:
        """An operator empties an agent, and starts it anew later."""
        name = self.names[fault.victim]
        self._ask(DrainPNode(2, name))
        self.scheduler.after(fault.seconds, partial(self._restart, name))

    def _restart(self, name: PNodeId) -> None:
        for life in self._lives_of(name):
            self._kill(life)
        self._start_agent(name)

    def _lives_of(self, name: PNodeId) -> list[AnyProcess]:
        return [life for life in self.lives if life.name == name and life.alive]

    def _rot(self) -> None:
        """The disk damages a part of the newest checkpoint, once, and only where an older one stays to go back to."""
        manifests = sorted(key for key in self.disk.blobs if key.endswith("manifest.json"))
        result = f"{self.plan.last:010d}"
        if self.plan.keep_last > 1 and len(manifests) > 1 and result not in manifests[-1] and not self.seen["rotten"]:
            self.seen["rotten"] += 1
            folder = manifests[-1].rpartition("/")[0]
            key = self.rng.choice(sorted(key for key in self.disk.blobs if key.startswith(folder) and key != manifests[-1]))
            self.disk.blobs[key] = self.disk.blobs[key][:-1] + b"?"

    def _disk_is_well(self) -> None:
        self.disk.full = False
        self.storage_takes = STORAGE_TAKES

    def _mend(self) -> None:
        """From now on nothing goes wrong."""
        self.say("*** everything is mended")
        self._waiting.clear()
        self._disk_is_well()
        net = self.net
        net.noise = Noise()
        for broken in (net.mute, net.deaf, net.apart, net.doomed):
            broken.clear()
        if not net.up:
            net.come_up()
        for life in self.lives:
            life.slow = 1.0
            life.go_on()
            if isinstance(life, Agent):
                life.thread.go_on()
        for name in self.names:
            if not self._lives_of(name):
                self._start_agent(name)
        if not any(one.alive for one in self.orchestrators):
            self._start_orchestrator()
