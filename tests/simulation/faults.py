"""What goes wrong in a run: everything is drawn from the seed before it begins.

Rule 1: simple runs (one message, one process) are drawn as often as wild ones, since a simple failure is the one that can be understood.
Rule 2: a fault comes at a time, or when the n-th thing of a kind (`AGENT_PHASES`, `LEADER_PHASES`) happens somewhere, and there and then.
Rule 3: after `Plan.quiet` nothing goes wrong any more; what was broken by then is mended, as far as the run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dcnr.optim.hyper import Hyper
from tests.simulation.net import Noise
from tests.simulation.networks import VARIANTS, HyperFields, Variant, bytes_of, ends_after

AGENT_PHASES = {
    "deploying": 6, "installing": 4, "feeding": 20, "forward": 20, "backward": 20, "folding": 10, "reporting": 12, "applying": 10,
    "evaluating": 20, "copying": 6, "uploading": 6, "uploaded": 6, "idle": 12,
}  # fmt: skip
"""What an agent comes to, and how often at most before a fault hits it."""
LEADER_PHASES = {
    "placing": 5, "sending": 20, "deciding": 6, "storing": 12, "completing": 3, "completed": 3, "adopting": 2, "leading": 2, "telling": 8,
}  # fmt: skip
AGENT_FAULTS = ("kill", "kill", "kill", "stop", "stop", "cut", "mute", "deaf", "hang", "slow", "twin", "leave", "break")
LEADER_FAULTS = ("kill", "kill", "stop", "stop", "cut", "mute", "deaf")
WORLD_FAULTS = ("server", "server", "disk full", "disk slow", "rot", "apart", "drain", "suspend", "rebalance")
KINDS = (
    "Hop trainer", "Hop fwd", "Hop bwd", "Hop eval", "Loss", "EvalLoss", "StepReport", "StepDone", "Decision", "Deploy", "Deployed",
    "Undeploy", "Save", "Saved", "Complete", "Heartbeat", "Echo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """`what` happens at `at` seconds, or with the `nth` occurrence of `phase`. `seconds`: how long it lasts, or until a restart.

    `victim` is an agent's number; -1 stands for the process in which the phase occurs, or for whoever leads.
    """

    what: str
    at: float | None
    phase: str = ""
    nth: int = 1
    victim: int = -1
    seconds: float = 1.0

    def __str__(self) -> str:
        when = f"at {self.at:.2f} s" if self.at is not None else f"at {self.phase} no. {self.nth}"
        who = "" if self.victim < 0 else f" agent {self.victim}"
        return f"{self.what}{who} {when} for {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    style: str
    variant: Variant
    steps: int
    checkpoint_every: int | None
    keep_last: int
    validate_every: int
    agents: int
    pnodes: int
    """As in the session's record: how many to use, 0 for all."""
    memory: int
    """Bytes of each agent: for everything, or for no more than three quarters, so that it takes two."""
    standbys: int
    pace: tuple[float, float]
    """Seconds that a job takes."""
    joins: float
    """Seconds within which agents start; those after the first of them may find the session running."""
    tells: bool
    """Whether the server tells who disconnected."""
    noise: Noise = field(default_factory=Noise)
    doomed: tuple[tuple[str, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    quiet: float = 0.0
    patience: int = 0

    @property
    def hyper(self) -> HyperFields:
        """Of the session."""
        fields = {"checkpoint_every": self.checkpoint_every, "keep_last": self.keep_last, "validate_every": self.validate_every}
        return self.variant.fields | fields | {"patience": self.patience}

    @property
    def last(self) -> int:
        """The step after which it ends."""
        return ends_after(self.variant, Hyper.model_validate(self.hyper), self.steps)

    def __str__(self) -> str:
        every = "by time" if self.checkpoint_every is None else self.checkpoint_every
        lines = [
            f"seed {self.seed}, {self.style}: {self.variant.name}, {self.steps} steps, checkpoints {every} ({self.keep_last} kept), "
            f"validated every {self.validate_every} with patience {self.patience}, "
            f"{self.agents} agents of {self.memory} bytes, {self.pnodes or 'all'} used, {self.standbys} standbys, "
            f"jobs of {self.pace[0] * 1e3:g} to {self.pace[1] * 1e3:g} ms, agents start within {self.joins:.1f} s, "
            f"news of disconnects: {self.tells}, quiet at {self.quiet:.1f} s",
            f"  {self.noise}",
            *(f"  lose {kind} no. {nth}" for kind, nth in self.doomed),
            *(f"  {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = Random(seed)
    style = rng.choice(("calm", "message", "message", "phase", "phase", "phase", "leader", "leader", "noise", "some", "wild", "wild"))
    fast = rng.choice((0.005, 0.05)) if style == "wild" else rng.choice((0.0005, 0.0005, 0.005, 0.05))
    agents = rng.randint(1, 4)
    steps = rng.randint(6, 16) if style == "wild" else rng.randint(3, 7)
    span = 0.3 + steps * fast * 15
    """About as long as it takes without faults."""
    faults = _faults(rng, style, span, agents)
    noise = _noise(rng) if style in ("noise", "wild") else Noise(jitter=rng.choice((0.0005, 0.005)), ordered=rng.random() < 0.7)
    doomed = _doomed(rng) if style in ("message", "wild") else ()
    ends = [(fault.at or span) + fault.seconds for fault in faults]
    variant, pnodes = rng.choice(VARIANTS), rng.choice((0, 0, rng.randint(1, agents)))
    tight = rng.random() < 0.25 and agents > 1 and pnodes != 1
    return Plan(
        seed=seed,
        style=style,
        variant=variant,
        memory=bytes_of(variant) * 3 // 4 if tight else 1 << 30,
        steps=steps,
        checkpoint_every=rng.choice((0, 1, 2, 2, 3, None)),
        keep_last=rng.choice((1, 2, 3)),
        validate_every=rng.choice((0, 1, 2, 3)),
        agents=agents,
        pnodes=pnodes,
        standbys=rng.choice((0, 0, 1, 2)),
        pace=(fast, fast * rng.choice((1.5, 4))),
        joins=rng.choice((0.3, 0.3, span + 1.0)),
        tells=rng.random() < 0.5,
        noise=noise,
        doomed=doomed,
        faults=faults,
        quiet=max([span * 2, *ends]) if style != "calm" else 0.0,
        patience=rng.choice((0, 0, 1, 2)),
    )


def _faults(rng: Random, style: str, span: float, agents: int) -> tuple[Fault, ...]:
    match style:
        case "phase":
            return (_of_agent(rng, span, agents, by_phase=True),)
        case "leader":
            return (_of_leader(rng, span),)
        case "some":
            return tuple(_any(rng, span, agents) for _ in range(2))
        case "wild":
            return tuple(_any(rng, span * 3, agents) for _ in range(rng.randint(2, 8)))
        case _:
            return ()


def _any(rng: Random, span: float, agents: int) -> Fault:
    match rng.randrange(4):
        case 0:
            return _of_leader(rng, span)
        case 1:
            return Fault(rng.choice(WORLD_FAULTS), rng.uniform(0, span), victim=rng.randrange(agents), seconds=_length(rng))
        case _:
            return _of_agent(rng, span, agents, by_phase=rng.random() < 0.5)


def _of_agent(rng: Random, span: float, agents: int, by_phase: bool) -> Fault:
    what, seconds = rng.choice(AGENT_FAULTS), _length(rng)
    if by_phase:
        phase = rng.choice(tuple(AGENT_PHASES))
        return Fault(what, None, phase, rng.randint(1, AGENT_PHASES[phase]), -1, seconds)
    return Fault(what, rng.uniform(0, span), victim=rng.randrange(agents), seconds=seconds)


def _of_leader(rng: Random, span: float) -> Fault:
    what, seconds = rng.choice(LEADER_FAULTS), _length(rng)
    if rng.random() < 0.7:
        phase = rng.choice(tuple(LEADER_PHASES))
        return Fault("leader " + what, None, phase, rng.randint(1, LEADER_PHASES[phase]), -1, seconds)
    return Fault("leader " + what, rng.uniform(0, span), seconds=seconds)


def _length(rng: Random) -> float:
    return rng.choice((rng.uniform(0.01, 0.5), rng.uniform(0.5, 4.0), rng.uniform(4.0, 15.0)))


def _noise(rng: Random) -> Noise:
    return Noise(
        lose=rng.choice((0.0, 0.01, 0.03, 0.1)),
        repeat=rng.choice((0.0, 0.02, 0.2)),
        late=rng.choice((0.0, 0.02, 0.1)),
        late_by=rng.choice((0.05, 1.0, 6.0)),
        jitter=rng.choice((0.0005, 0.005, 0.1)),
        ordered=rng.random() < 0.3,
    )


def _doomed(rng: Random) -> tuple[tuple[str, int], ...]:
    return tuple((rng.choice(KINDS), rng.choice((1, 2, 3, rng.randint(1, 20)))) for _ in range(rng.randint(1, 2)))
