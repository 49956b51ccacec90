"""`dcnr chaos`: breaks parts of a running cluster on purpose, and measures how long it takes to train again.

Rule 1: only processes of this machine, found by what they say of themselves, and only if their command line is that of such a process.
Rule 2: one fault at a time: the next comes when the interval is over and everything trains again, whichever is later.
Rule 3: a process that was stopped is continued once the others train again, and in any case at the end.
Rule 4: whom it strikes is drawn from the seed; starting processes again is the business of who started them (`dcnr up` does).
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import click
import numpy as np
import psutil

from dcnr.bus import subjects
from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.bus.codec import decode, unpack
from dcnr.bus.messages import Heartbeat, PNodeInfo, StepMetrics
from dcnr.bus.transport import host_id
from dcnr.cli.client import run
from dcnr.cli.output import Command, data_dir_option, example, json_option, show_json
from dcnr.client.connect import connection
from dcnr.config import from_environment
from dcnr.errors import BusUnavailable, PeerError, UserError, WorldError
from dcnr.orchestrator.leader import BUCKET, KEY

Kind = Literal["agent", "orchestrator", "nats"]
KINDS: tuple[Kind, ...] = ("agent", "orchestrator", "nats")
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
PATIENCE = 120.0
"""Seconds after which a fault counts as one that was not overcome."""
SILENT = 5.0
"""Seconds within which a PNode that is alive is heard."""
LOOK_EVERY = 0.05
IN_FLIGHT = 0.2
"""Seconds during which steps that were done before the fault may still be heard."""
FROZEN = 6.0
"""Seconds that an orchestrator or server stays stopped: others may take over meanwhile, or else all wait for it."""
ASK_EVERY = 1.0
"""Seconds between two looks at whether a session has ended."""
SAME_START = 2.0
"""Seconds by which two readings of the start of one process may differ."""
_TRAINS = frozenset({"adopting", "deploying", "running"})
_DELETED = "deleted"
"""Of a session that the orchestrator does not list any more."""
_ENDED = frozenset({"done", "suspended", _DELETED})
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PROGRAMS: dict[Kind, tuple[str, ...]] = {
    "agent": ("dcnr.agents.main", "dcnr-agent"),
    "orchestrator": ("orchestrator",),
    "nats": ("nats-server.conf",),
}
"""An argument of every such process ends with one of these."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Whom to strike. `sessions`: those it holds parts of; empty where all depend on it."""

    kind: Kind
    name: str
    pid: int
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, and the seconds until training went on: None if it did not, or nothing was training."""

    victim: Victim
    seconds: float | None
    text: str
    overcome: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command."""

    kill: Kind
    every: float
    signal: str
    count: int | None
    seed: int
    for_: float | None
    data_dir: Path
    as_json: bool


class Duration(click.ParamType[float]):
    """`10s`, `1.5m`, `500ms`, `2h`, or seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", str(value))
        if match is None:
            self.fail(f"'{value}' is not a duration; write it like 10s, 1.5m or 500ms", param, ctx)
        return float(match[1]) * _SECONDS[match[2] or "s"]


@click.command(
    cls=Command,
    epilog=example("dcnr chaos --kill agent --every 10s", "dcnr chaos --kill agent --signal STOP --every 20s --count 5 --seed 7"),
)
@click.option("--kill", type=click.Choice(KINDS), required=True, help="What to strike.")
@click.option("--every", type=Duration(), default="10s", show_default=True, help="Time from one fault to the next, at least.")
@click.option(
    "--signal", "signal_", type=click.Choice(tuple(SIGNALS)), default="KILL", show_default=True, help="KILL it, or STOP it for a while."
)
@click.option("--count", type=click.IntRange(1), help="Faults (default: until Ctrl-C).")
@click.option("--for", "for_", type=Duration(), help="How long to go on (default: until Ctrl-C).")
@click.option("--seed", type=click.IntRange(0), help="Of the choice of agents (default: a new one, which is printed).")
@data_dir_option
@json_option
def chaos(
    kill: Kind, every: float, signal_: str, count: int | None, for_: float | None, seed: int | None, data_dir: Path, as_json: bool
) -> None:
    """Break processes of a running cluster on this machine, and watch it recover.

    Training must go on with the same numbers. `dcnr up` starts again what was killed.
    """
    run(_chaos(Plan(kill, every, signal_, count, secrets.randbits(32) if seed is None else seed, for_, data_dir, as_json)))


async def _chaos(plan: Plan) -> None:
    async with connection() as bus:
        ear = Ear()
        await bus.subscribe(subjects.HEARTBEATS, ear.hear)
        await bus.subscribe(subjects.METRICS, ear.hear)
        storm = Storm(plan, bus, ear)
        try:
            await storm.run()
        finally:
            storm.end()
    if any(not fault.overcome for fault in storm.faults):
        raise WorldError("not every fault was overcome", "the logs of orchestrator and agents say more")


class Ear:
    """What is heard of PNodes and steps."""

    def __init__(self) -> None:
        self.infos: dict[str, PNodeInfo] = {}
        self.steps: dict[str, tuple[float, StepMetrics]] = {}
        """The newest of each session, and when it was heard."""

    def hear(self, data: bytes) -> None:
        """Bus callback."""
        with suppress(PeerError):
            match decode(data):
                case Heartbeat(info=info):
                    self.infos[info.pnode] = info
                case StepMetrics() as row:
                    self.steps[row.session] = (time.monotonic(), row)
                case _:
                    return

    def epoch(self, session: str) -> int:
        """Of its newest step."""
        return self.steps[session][1].epoch if session in self.steps else 0


class Storm:
    """Fault after fault."""

    def __init__(self, plan: Plan, bus: Bus, ear: Ear) -> None:
        self.faults: list[Fault] = []
        self._plan = plan
        self._bus = bus
        self._ear = ear
        self._draw = np.random.default_rng(plan.seed)
        self._stopped: int | None = None

    async def run(self) -> None:
        """Until enough faults were made, or the time is over."""
        self._tell({"event": "chaos", "kill": self._plan.kill, "seed": self._plan.seed}, f"seed {self._plan.seed}; Ctrl-C ends it")
        until = time.monotonic() + (self._plan.for_ or float("inf"))
        due = time.monotonic()
        while len(self.faults) != self._plan.count and due < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + self._plan.every
            rows = (await self._ask("session.list"))["sessions"]
            fault = await self._strike(await self._victim(), rows)
            self.faults.append(fault)
            victim = fault.victim
            fields = {"event": "fault", "kind": victim.kind, "name": victim.name, "pid": victim.pid, "seconds": fault.seconds}
            self._tell({**fields, "text": fault.text}, f"{time.strftime('%H:%M:%S')}  {victim.name} (process {victim.pid}): {fault.text}")

    def end(self) -> None:
        """Continue who is stopped, and sum up."""
        self._go_on()
        times = [fault.seconds for fault in self.faults if fault.seconds is not None]
        lost = sum(not fault.overcome for fault in self.faults)
        median, worst = (statistics.median(times), max(times)) if times else (None, None)
        text = f"{len(self.faults)} faults, {len(self.faults) - lost} overcome"
        if median is not None:
            text += f"; training again after {median:.1f} s (median), {worst:.1f} s (worst)"
        self._tell({"event": "summary", "faults": len(self.faults), "lost": lost, "median": median, "worst": worst}, text)

    def _tell(self, fields: dict[str, Any], text: str) -> None:
        if self._plan.as_json:
            show_json(fields)
        else:
            click.echo(text)

    # -- whom --------------------------------------------------------------------------------------------------------------

    async def _victim(self) -> Victim:
        """Someone who runs here. In the first round there must be one; later one may still be starting."""
        finders: dict[Kind, Callable[[], Awaitable[Victim]]] = {"agent": self._agent, "orchestrator": self._leader, "nats": self._server}
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return await finders[self._plan.kill]()
            except (UserError, WorldError):
                if not self.faults or time.monotonic() >= until:
                    raise
            await asyncio.sleep(LOOK_EVERY)

    async def _agent(self) -> Victim:
        rows = [row for row in (await self._ask("pnode.list"))["pnodes"] if row["state"] == "alive"]
        if not rows:
            raise UserError("no PNode is alive", "start one: dcnr-agent")
        here = sorted((row for row in rows if row["host"] == host_id()), key=lambda row: str(row["pnode"]))
        if not here:
            names = ", ".join(row["pnode"] for row in rows)
            raise UserError(f"no PNode of this cluster runs on this machine ({names} run elsewhere)", "run `dcnr chaos` where they run")
        placed = {row["pnode"]: tuple((await self._ask("pnode.show", pnode=row["pnode"]))["nodes"]) for row in here}
        busy = [row for row in here if placed[row["pnode"]]] or here
        row = busy[int(self._draw.integers(len(busy)))]
        until = time.monotonic() + SILENT
        while row["pnode"] not in self._ear.infos and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY)
        info = self._ear.infos.get(row["pnode"])
        if info is None:
            raise WorldError(f"PNode {row['pnode']} says nothing", "is the cluster well? see: dcnr pnode list")
        return checked(Victim("agent", info.pnode, info.pid, placed[info.pnode]))

    async def _leader(self) -> Victim:
        entry = await (await self._bus.kv(BUCKET, make=False)).get(KEY)
        holder = unpack(entry.value) if entry is not None else {}
        if not holder.get("id"):
            raise UserError("no orchestrator leads", "start one: dcnr up")
        if str(holder.get("host", "")).rpartition("-")[0] != host_id():
            raise UserError(f"orchestrator {holder['id']} does not run on this machine", "run `dcnr chaos` where it runs")
        return checked(Victim("orchestrator", holder["id"], int(holder["pid"])), float(holder["started"]))

    async def _server(self) -> Victim:
        store, url = from_environment(self._plan.data_dir).nats_store, from_environment().nats_url
        file = store / "nats-server.pid"
        if not file.exists():
            raise UserError(f"there is no {file}", "only a server that `dcnr up` started can be struck; name its --data-dir")
        pid = int(file.read_text())
        ports = store / f"nats-server_{pid}.ports"
        if not ports.exists() or f":{urlsplit(url).port}" not in ports.read_text():
            raise UserError(f"the server of {store} is not the one at {url}", "name its --data-dir, or its NATS_URL")
        return checked(Victim("nats", "nats-server", pid))

    async def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask the orchestrator; while none leads, again."""
        until = time.monotonic() + (PATIENCE if self.faults else 0.0)
        while True:
            try:
                return await call(self._bus, verb, **fields)
            except (BusUnavailable, WorldError):
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(LOOK_EVERY)

    # -- and what then -----------------------------------------------------------------------------------------------------

    async def _strike(self, victim: Victim, rows: Sequence[Mapping[str, Any]]) -> Fault:
        """Send the signal, and wait until all that trained (of the sessions `rows`) trains again."""
        trained = [
            row["session"] for row in rows if row["state"] in _TRAINS and (victim.kind != "agent" or row["session"] in victim.sessions)
        ]
        newer = {session: self._ear.epoch(session) for session in trained} if victim.kind == "agent" else {}
        number = SIGNALS[self._plan.signal]
        try:
            os.kill(victim.pid, number)
        except (ProcessLookupError, PermissionError) as error:
            what = f"process {victim.pid} of {victim.name}: {error.strerror}"
            raise UserError(what, "run `dcnr chaos` as the user that runs it") from error
        began = time.monotonic()
        waking = None
        if number == signal.SIGSTOP:
            self._stopped = victim.pid
            waking = asyncio.get_running_loop().call_later(FROZEN, self._go_on) if victim.kind != "agent" or not trained else None
        done, names = ("stopped" if number == signal.SIGSTOP else "killed"), ", ".join(trained)
        seconds = await self._until_trained(trained, began, newer)
        if waking is not None:
            await asyncio.sleep(waking.when() - asyncio.get_running_loop().time())
        self._go_on()
        if seconds is None:
            return Fault(victim, None, f"{done}: {names} did not train again", False)
        if not trained:
            return Fault(victim, None, f"{done}; no session was training there", True)
        return Fault(victim, seconds, f"{done}: {names} trains again after {seconds:.1f} s", True)

    async def _until_trained(self, sessions: Sequence[str], began: float, newer: Mapping[str, int]) -> float | None:
        """Seconds until every session did a step, of an epoch `newer` than before where one is named, or ended; None if one will not."""
        waiting, last, ask_at = set(sessions), began, began + ASK_EVERY
        while waiting and time.monotonic() < began + PATIENCE:
            await asyncio.sleep(LOOK_EVERY)
            for session in [name for name in waiting if name in self._ear.steps]:
                at, row = self._ear.steps[session]
                if at > began + IN_FLIGHT and row.epoch > newer.get(session, -1):
                    waiting.discard(session)
                    last = max(last, at)
            if waiting and time.monotonic() >= ask_at:
                states = await self._states()
                if states is not None:
                    waiting = {session for session in waiting if states.get(session, _DELETED) not in _ENDED}
                    if any(states[session] == "failed" for session in waiting):
                        return None
                ask_at = time.monotonic() + ASK_EVERY
        return None if waiting else last - began

    async def _states(self) -> dict[str, str] | None:
        """Of all sessions; None while no orchestrator answers."""
        try:
            async with asyncio.timeout(ASK_EVERY):
                rows = (await call(self._bus, "session.list"))["sessions"]
        except (BusUnavailable, WorldError, TimeoutError):
            return None
        return {row["session"]: row["state"] for row in rows}

    def _go_on(self) -> None:
        if self._stopped is not None:
            with suppress(ProcessLookupError):
                os.kill(self._stopped, signal.SIGCONT)
        self._stopped = None


def checked(victim: Victim, started: float | None = None) -> Victim:
    """`victim`, if its process is there and is what it says. Raises `UserError`."""
    try:
        process = psutil.Process(victim.pid)
        line, born = process.cmdline(), process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        raise UserError(
            f"process {victim.pid} of {victim.name} cannot be found on this machine", "run `dcnr chaos` where it runs"
        ) from None
    if not any(argument.endswith(_PROGRAMS[victim.kind]) for argument in line) or (
        started is not None and abs(born - started) > SAME_START
    ):
        shown = " ".join(line)[:80]
        raise UserError(f"process {victim.pid} is not {victim.name}, but: {shown}", "run `dcnr chaos` where that runs")
    return victim
