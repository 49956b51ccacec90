"""One checkpoint that is read: deployed when somebody asks, and the requests of whoever asks, token after token.

    waiting --PNodes fit, and somebody waits--> deploying --all deployed--> serving --60 s without a request--> ended
       ^                                            |                         |
       +-------- lost, refused, stuck, drained -----+-------------------------+

Rule 1: requests take turns: up to `SLOTS` of them have a slot each, and in it one piece of their text under way.
Rule 2: with a cache, a token costs one position. Without one, and beyond the window of the network, its last window is read anew each time.
Rule 3: whatever goes wrong, a request goes on from its ids: they are read anew, as a new attempt, or in a new epoch on other PNodes. So it
ends with the text that it would have had. A piece that is lost while those of others come back is read anew after 45 s, then after twice
as long.
Rule 4: an exception in a node, a checkpoint that cannot be read, and trouble of the world, or a standstill, for the fourth time without a
token in between end all requests with the reason.
Rule 5: a request that nobody has asked about for 60 s is ended, and then forgotten. Where somebody waits for room, who has nothing to do
lets go at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dcnr.bus import subjects
from dcnr.bus.messages import TRAINER, Deploy, Deployed, Failed, Hop, Hosted, PNodeInfo, Refused, Report, Slot, Undeploy
from dcnr.errors import DoesNotFit, InvariantError
from dcnr.ids import Epoch, PNodeId
from dcnr.orchestrator.commands import Command, Publish, SendHop, Spoke
from dcnr.orchestrator.events import (
    AskedFor,
    Draining,
    Generate,
    LogitsRead,
    Lost,
    MakeRoom,
    Offered,
    ReadingEvent,
    Standing,
    StopGenerating,
    Tick,
)
from dcnr.orchestrator.feed import feeds_of
from dcnr.orchestrator.sampling import draw
from dcnr.orchestrator.session import Settings
from dcnr.orchestrator.source import SLOTS, Source, deploy_to_read, homes_to_read
from dcnr.orchestrator.watchdog import STUCK_AFTER, Again, GiveUp, Sight, Watchdog

REPEAT_AFTER = 2.0
"""Seconds until a deploy that was not answered is said again."""
IDLE = 60.0
"""Seconds without a request until the PNodes let go, and of a request that nobody asks about."""
SETBACKS = 3
"""How often the world may fail without a token in between."""


class ReadingState(StrEnum):
    """Where it stands."""

    WAITING = "waiting"
    DEPLOYING = "deploying"
    SERVING = "serving"
    ENDED = "ended"


_S = ReadingState
TRANSITIONS: dict[ReadingState, frozenset[ReadingState]] = {
    _S.WAITING: frozenset({_S.WAITING, _S.DEPLOYING, _S.ENDED}),
    _S.DEPLOYING: frozenset({_S.WAITING, _S.SERVING, _S.ENDED}),
    _S.SERVING: frozenset({_S.WAITING, _S.ENDED}),
    _S.ENDED: frozenset(),
}


@dataclass(slots=True)
class Request:
    """What somebody wants, and how far it is: `ids` are the prompt and what followed it."""

    ask: Generate
    ids: list[int]
    asked: float
    """When somebody last asked about it."""
    slot: int | None = None
    attempt: int = -1
    position: int = 0
    """Of the piece under way."""
    cached: int = 0
    """Positions that the attempt has kept so far."""
    positions: int = 0
    """All that were read for it."""
    heard: int = 0
    """Logits of all requests that had come when the piece under way was fed."""
    due: float = 0.0
    """When the piece counts as lost, if others have come back meanwhile."""
    tries: int = 0
    """How often it was, since a token came."""
    done: str = ""
    """`length`, `stop`, `stopped`, or, with `failed`, what went wrong."""
    failed: bool = False

    @property
    def tokens(self) -> list[int]:
        """What was generated."""
        return self.ids[len(self.ask.prompt) :]

    def end(self, why: str, failed: bool = False) -> None:
        """Nothing more comes."""
        self.done, self.failed, self.slot = why, failed, None


class Reading:
    """The machine of one checkpoint."""

    def __init__(self, source: Source, settings: Settings, newest_epoch: Epoch, now: float) -> None:
        self.source = source
        self.state = _S.WAITING
        self.reason = "waits for PNodes"
        self.newest_epoch = newest_epoch
        """The largest that is known of."""
        self.requests: dict[str, Request] = {}
        self.fenced = 0
        self._settings = settings
        self._feeds = feeds_of(source.graph)
        (logits,) = source.graph.outputs
        self._vocabulary = source.graph.by_id[logits.port.node].output_shapes[logits.port.slot][-1]
        self._deploy: Deploy | None = None
        self._watchdog: Watchdog | None = None
        self._owing: set[PNodeId] = set()
        self._shunned: set[PNodeId] = set()
        """PNodes that failed since a token came."""
        self._setbacks = 0
        self._attempts = 0
        self._heard = 0
        """Logits."""
        self._drawn = 0
        """Tokens, in this deployment."""
        self._idle_since = now
        self._repeat_at = now

    @property
    def hosts(self) -> tuple[PNodeId, ...]:
        """The PNodes that take part, by name."""
        return tuple(sorted(set(self._deploy.assignment.values()))) if self._deploy else ()

    @property
    def wants(self) -> bool:
        """Whether it waits to be placed."""
        return self.state is _S.WAITING and bool(self._open)

    @property
    def _open(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.done]

    @property
    def _under_way(self) -> list[Request]:
        return [request for request in self._open if request.slot is not None]

    @property
    def _overtaken(self) -> list[Request]:
        return [request for request in self._under_way if request.heard != self._heard]

    def uses(self, pnode: PNodeId, epoch: Epoch) -> bool:
        """Whether `pnode` rightly hosts a part of it in `epoch`."""
        return self._deploy is not None and epoch == self._deploy.epoch and pnode in self.hosts

    def handle(self, event: ReadingEvent, now: float) -> list[Command]:
        """Take one event; one that is illegal in the present state changes nothing."""
        match event:
            case Generate():
                self._forget(now)
                self.requests[event.id] = Request(event, list(event.prompt), now)
                return self._pump(now)
            case StopGenerating(id=name):
                return self._ended(self.requests[name], "stopped", now) if name in self.requests and not self.requests[name].done else []
            case AskedFor(name):
                if name in self.requests:
                    self.requests[name].asked = now
                return []
            case Offered(pnodes):
                return self._place(pnodes, now) if self.wants else []
            case MakeRoom():
                return self._back("made room for others") if self._deploy and not self._open else []
            case Lost(pnode, reason):
                self._shunned.discard(pnode)
                return self._back(reason) if pnode in self.hosts else []
            case Draining(pnode):
                return self._back(f"PNode {pnode} is being drained") if pnode in self.hosts else []
            case Standing(info, hosted):
                return self._standing(info.pnode, hosted, now)
            case Tick():
                return self._tick(now)
            case _:
                return self._during_deployment(event, now)

    def deadline(self) -> float | None:
        """When something is to be repeated, stands still, or is of no use any more."""
        times = [self._watchdog.deadline()] if self._watchdog else []
        times += [self._repeat_at] if self._owing else []
        times += [request.due for request in self._overtaken]
        opened = self._open
        times += [request.asked + IDLE for request in opened] if opened else [self._last_asked() + IDLE]
        return min(times) if self.state is not _S.ENDED else None

    def forgive(self, now: float) -> None:
        """The orchestrator could not hear until now: silence counts from here."""
        if self._watchdog:
            self._watchdog.forgive(now)
        for request in self.requests.values():
            request.asked = now
            request.due = now + STUCK_AFTER

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        deployed = self.state in (_S.DEPLOYING, _S.SERVING)
        if deployed != (self._deploy is not None) or deployed != (self._watchdog is not None) or (self._owing and self.state is _S.SERVING):
            raise InvariantError(f"{self.source.shown} is {self.state} and has {'a' if self._deploy else 'no'} deployment")
        slots = [request.slot for request in self._under_way]
        if len(set(slots)) != len(slots) or (slots and self.state is not _S.SERVING):
            raise InvariantError(f"{self.source.shown} is {self.state}, and its requests have the slots {slots}")

    # -- into and out of a deployment --------------------------------------------------------------------------------------

    def _place(self, offered: Sequence[PNodeInfo], now: float) -> list[Command]:
        try:
            homes = homes_to_read(self.source, offered, self._shunned)
        except DoesNotFit as error:
            self.reason = str(error)
            return []
        self.newest_epoch = Epoch(max(self.newest_epoch + 1, self._settings.first_epoch))
        at = self._settings.me, self._settings.storage, self._settings.probe
        self._deploy = deploy_to_read(self.source, self.newest_epoch, homes, offered, at)
        self._owing, self._attempts, self._drawn, self._repeat_at = set(self.hosts), 0, 0, now + REPEAT_AFTER
        self._watchdog = Watchdog(self.hosts, 0, now)
        self._go(_S.DEPLOYING, f"deploys to {', '.join(self.hosts)}")
        return self._deploys()

    def _deploys(self) -> list[Command]:
        """The word to those that have not answered it."""
        assert self._deploy is not None
        return [Publish(subjects.command(pnode), self._deploy) for pnode in sorted(self._owing)]

    def _back(self, why: str) -> list[Command]:
        """Every PNode lets go; requests wait to be read anew."""
        undeploys = self._let_go()
        self._go(_S.WAITING, why)
        return undeploys

    def _let_go(self) -> list[Command]:
        deploy, hosts = self._deploy, self.hosts
        self._deploy = self._watchdog = None
        self._owing.clear()
        for request in self.requests.values():
            request.slot = None
        return [Publish(subjects.command(pnode), Undeploy(deploy.session, deploy.epoch)) for pnode in hosts if deploy]

    def _fail(self, why: str) -> list[Command]:
        """All requests end with the reason; the next one tries again."""
        ended, self._setbacks = self._open, 0
        for request in ended:
            request.end(why, failed=True)
        return [*self._back(why), *(Spoke(request.ask.id) for request in ended)]

    def _go(self, state: ReadingState, reason: str) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.source.shown} cannot go from {self.state} to {state}")
        self.state, self.reason = state, reason

    # -- while deployed ----------------------------------------------------------------------------------------------------

    def _during_deployment(self, event: LogitsRead | Report, now: float) -> list[Command]:
        epoch = event.hop.epoch if isinstance(event, LogitsRead) else event.epoch
        if self._deploy is None or epoch != self._deploy.epoch:
            self.fenced += 1
            return []
        match event:
            case LogitsRead():
                return self._logits(event, now)
            case Deployed(pnode):
                return self._deployed(pnode, now)
            case Refused():
                return self._refused(event)
            case Failed():
                return self._failed(event)
            case _:
                return []

    def _deployed(self, pnode: PNodeId, now: float) -> list[Command]:
        self._owing.discard(pnode)
        if self._owing or self.state is not _S.DEPLOYING:
            return []
        self._go(_S.SERVING, "")
        return self._pump(now)

    def _refused(self, refused: Refused) -> list[Command]:
        why = f"PNode {refused.pnode} refused: {refused.reason}"
        if refused.damaged:
            return self._fail(f"checkpoint {self.source.shown} cannot be read, says PNode {refused.pnode}: {refused.reason}")
        self._shunned.add(refused.pnode)
        return self._back(why)

    def _failed(self, failed: Failed) -> list[Command]:
        why = f"PNode {failed.pnode}: {failed.message}"
        return self._set_back(why, failed.pnode) if failed.world else self._fail(why)

    def _set_back(self, why: str, without: PNodeId | None) -> list[Command]:
        """Trouble of the world: elsewhere, if it fits, until it was enough."""
        self._setbacks += 1
        if self._setbacks > SETBACKS:
            return self._fail(why)
        self._shunned |= {without} if without is not None else set()
        return self._back(why)

    def _standing(self, pnode: PNodeId, hosted: Hosted | None, now: float) -> list[Command]:
        if self._watchdog and self._deploy and hosted and hosted.epoch == self._deploy.epoch and pnode in self.hosts:
            self._watchdog.heard(pnode, hosted, now)
        return self._watch(now)

    def _watch(self, now: float) -> list[Command]:
        if self._watchdog is None:
            return []
        reading = self._under_way
        match self._watchdog.verdict(Sight(self._drawn, self._heard, bool(reading), self._owing), now):
            case Again():
                return [command for request in reading for command in self._read_anew(request, now)]
            case GiveUp(reason, without, _):
                return self._set_back(reason if without else f"the reading of {self.source.shown} stood still", without)
            case None:
                return self._read_late(now)

    def _read_late(self, now: float) -> list[Command]:
        """A lost message of one request is no standstill while others go on: its piece is long overdue."""
        late = [request for request in self._overtaken if now >= request.due]
        for request in late:
            request.tries += 1
        return [command for request in late for command in self._read_anew(request, now)]

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for request in self._open:
            if now >= request.asked + IDLE:
                commands += self._ended(request, f"nobody asked about it for {IDLE:.0f} s", now)
        if not self._open and now >= self._last_asked() + IDLE:
            commands += self._let_go()
            self._go(_S.ENDED, "")
            return commands
        self._forget(now)
        if self._owing and now >= self._repeat_at:
            self._repeat_at = now + REPEAT_AFTER
            commands += self._deploys()
        return commands + self._watch(now)

    def _forget(self, now: float) -> None:
        """Requests that ended, and that nobody has asked about for long."""
        for name, request in list(self.requests.items()):
            if request.done and now >= request.asked + IDLE:
                self._idle_since = max(self._idle_since, request.asked)
                del self.requests[name]

    def _last_asked(self) -> float:
        return max([self._idle_since, *(request.asked for request in self.requests.values())])

    # -- tokens ------------------------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> list[Command]:
        """Give free slots to those that wait for one, oldest first."""
        if self.state is not _S.SERVING:
            return []
        free = [slot for slot in range(SLOTS) if slot not in {request.slot for request in self._open}]
        commands: list[Command] = []
        for slot, request in zip(free, [request for request in self._open if request.slot is None], strict=False):
            request.slot = slot
            commands += self._read_anew(request, now)
        return commands

    def _read_anew(self, request: Request, now: float) -> list[Command]:
        """The last window of its text, from position 0, as a new attempt."""
        window = request.ids[-self._feeds.seq_len :]
        request.attempt, self._attempts = self._attempts, self._attempts + 1
        caches = request.ask.caches and len(request.ids) < self._feeds.seq_len
        request.position, request.cached = 0, len(window) if caches else 0
        return self._feed(request, window, caches, now)

    def _read_next(self, request: Request, now: float) -> list[Command]:
        """What its attempt has not kept: the newest id."""
        position = len(request.ids) - 1
        if request.cached != position or position >= self._feeds.seq_len:
            return self._read_anew(request, now)
        request.position, request.cached = position, position + 1
        return self._feed(request, request.ids[-1:], caches=True, now=now)

    def _feed(self, request: Request, ids: Sequence[int], caches: bool, now: float) -> list[Command]:
        assert self._deploy is not None
        assert request.slot is not None
        request.positions += len(ids)
        request.heard, request.due = self._heard, now + STUCK_AFTER * 2**request.tries
        payload = np.array([ids], np.int64)
        by_home: dict[PNodeId, list[Slot]] = {}
        for node, slot in self._feeds.ids:
            by_home.setdefault(self._deploy.assignment[node], []).append((node, slot))
        header = Hop(
            network=self._deploy.network, session=self._deploy.session, epoch=self._deploy.epoch, step=request.position,
            micro=request.slot, attempt=request.attempt, phase="fwd", source=TRAINER, source_slot=0, targets=(),
            sender=self._settings.me, dtype="int64", shape=payload.shape, caches=caches,
        )  # fmt: skip
        return [SendHop(home, replace(header, targets=tuple(targets)), payload) for home, targets in by_home.items()]

    def _logits(self, event: LogitsRead, now: float) -> list[Command]:
        hop = event.hop
        request = next((one for one in self._open if one.slot == hop.micro), None)
        if request is None or (hop.attempt, hop.step) != (request.attempt, request.position) or event.logits.size != self._vocabulary:
            self.fenced += 1
            return []
        self._heard += 1
        token = draw(event.logits.reshape(-1), request.ask.sampling, len(request.ids))
        if token is None:
            return self._ended(request, "the network answered with logits that are no numbers", now, failed=True)
        request.ids.append(token)
        request.position = -1  # the same logits, twice, are not drawn from twice
        self._drawn += 1
        self._setbacks = request.tries = 0
        self._shunned.clear()
        if request.ask.ended(request.tokens):
            return self._ended(request, "stop", now)
        if len(request.tokens) >= request.ask.limit:
            return self._ended(request, "length", now)
        return [*self._read_next(request, now), Spoke(request.ask.id)]

    def _ended(self, request: Request, why: str, now: float, failed: bool = False) -> list[Command]:
        request.end(why, failed)
        return [*self._pump(now), Spoke(request.ask.id)]
