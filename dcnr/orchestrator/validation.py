"""Validation between two steps: the validation split goes through the network, forward only, and its losses become one number.

Rule 1: a validation is of the state after one step that everyone has decided; nothing of training is fed until it is over.
Rule 2: its micro-batches are as large as those of training, in the order of the split; at most `window` are in flight, and nothing is
read far ahead of them.
Rule 3: the loss is that of all targets alike: per cost the means of micro-batches in order, each times its targets, over all targets, in
float64; and those summed in the order of `costs`. So nobody can tell from it where the network lies, or what was lost on the way.
Rule 4: what is in flight is fed again as the next attempt. An answer counts once, whichever attempt it is of.
Rule 5: the best one is the first with the smallest loss. Patience counts the validations between two steps, so one that is done again
counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dcnr.bus.messages import EvalLoss, ValidationMetrics
from dcnr.errors import InvariantError
from dcnr.ids import NodeId
from dcnr.optim.decide import in_order
from dcnr.optim.hyper import Hyper
from dcnr.orchestrator.commands import Command, Measured, ReadWindows, SendHop
from dcnr.orchestrator.events import WindowsRead
from dcnr.orchestrator.feed import Batch, eval_hops, windows_of
from dcnr.orchestrator.state import SessionRecord, ValidationRecord
from dcnr.orchestrator.trainer import Plan

MORE = 2
"""Micro-batches in flight beyond the window of training: the way of a loss to us and of the next ids back is not to be waited for."""


@dataclass(slots=True)
class Run:
    """A validation under way. `micros`: how many micro-batches there are, 1 until that is known."""

    step: int
    attempt: int = 0
    micros: int = 1
    bytes_per_token: float = math.nan
    asked: int = 0
    fed: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    """Those that were read and not answered."""
    in_flight: set[int] = field(default_factory=set)
    losses: dict[tuple[NodeId, int], float] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    """Targets of each micro-batch that was read."""


class Validation:
    """Of one deployment. `upto`: validations up to that step need not be done any more. `known` is for the session to write down."""

    def __init__(self, plan: Plan, known: ValidationRecord | None, upto: int) -> None:
        self.known = known
        self.first_attempt = 0
        """One that PNodes have not heard of from an earlier leader."""
        self.news = 0
        """Grows with everything that is fed or heard for the first time."""
        self.answered = 0
        """Micro-batches that have come through."""
        self.last: ValidationMetrics | None = None
        """The newest one that was finished here."""
        self._plan = plan
        self._upto = upto
        self._run: Run | None = None
        self._window = plan.window + MORE

    @property
    def hold(self) -> int:
        """The step after which a validation comes, or the last one."""
        return self._plan.hyper.next_validation(self._upto, self._plan.steps)

    @property
    def under_way(self) -> bool:
        """Whether one is."""
        return self._run is not None

    @property
    def of_step(self) -> int | None:
        """The step whose state is being validated, if one is."""
        return self._run.step if self._run else None

    @property
    def waits(self) -> bool:
        """Whether PNodes have what they need to get on with it."""
        return self._run is not None and bool(self._run.in_flight)

    @property
    def early_end(self) -> str | None:
        """Why training ends after the last validation that was done, if it does."""
        known, hyper = self.known, self._plan.hyper
        if known is None or not hyper.patience:
            return None
        since = hyper.validations(max(known.best_step, known.counted_from), known.upto, self._plan.steps)
        if since < hyper.patience:
            return None
        best = f"that of step {known.best_step}, which is {known.best_loss:.4f}"
        return f"ended early, after step {known.upto}: {since} validation{'s' * (since > 1)} without a smaller loss than {best}"

    def due(self, done: int) -> bool:
        """Whether the state after `done`, at which everything stands, is to be validated."""
        return self._run is None and done > self._upto and self._plan.hyper.validates(done, self._plan.steps)

    def begin(self, step: int) -> list[Command]:
        """Validate the state after `step`."""
        self._run = Run(step, self.first_attempt)
        return self._pump(self._run)

    def cancel(self) -> None:
        """Give it up."""
        self._run = None

    def again(self) -> list[Command]:
        """A message was lost: feed what is in flight once more."""
        run = self._run
        if run is None:
            return []
        run.attempt += 1
        return [command for micro in sorted(run.in_flight) for command in self._hops(run, micro)]

    def read(self, event: WindowsRead) -> list[Command]:
        """A micro-batch is here."""
        run = self._run
        if run is None or event.step != run.step or event.micro in run.counted:
            return []
        plan = self._plan
        run.micros = -(-event.windows // self._rows)
        if plan.hyper.validate_batches:
            run.micros = min(run.micros, plan.hyper.validate_batches * plan.micro_batches)
        batch = run.batches[event.micro] = windows_of(event.tokens_BS)
        run.counted[event.micro], run.bytes_per_token = batch.counted, event.bytes_per_token
        return self._pump(run)

    def heard(self, loss: EvalLoss) -> list[Command]:
        """A micro-batch reached a cost; with the last one the validation is over."""
        run, plan, key = self._run, self._plan, (loss.cost, loss.micro)
        if run is None or loss.step != run.step or loss.cost not in plan.costs or loss.micro not in run.in_flight or key in run.losses:
            return []
        self.news += 1
        run.losses[key] = loss.loss
        if not all((cost, loss.micro) in run.losses for cost in plan.costs):
            return []
        self.answered += 1
        run.in_flight.discard(loss.micro)
        del run.batches[loss.micro]
        return self._finish(run) if len(run.losses) == len(plan.costs) * run.micros else self._pump(run)

    def validate(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        run, window = self._run, self._window
        if run and (len(run.in_flight) > window or not run.in_flight <= run.batches.keys() or len(run.batches) > 2 * window):
            raise InvariantError(f"validation of step {run.step}: {len(run.in_flight)} of {len(run.batches)} micro-batches in flight")

    @property
    def _rows(self) -> int:
        return self._plan.batch // self._plan.micro_batches

    def _pump(self, run: Run) -> list[Command]:
        """Ask for micro-batches and feed them, as far as the rules allow."""
        commands: list[Command] = []
        while run.fed in run.batches and len(run.in_flight) < self._window:
            run.in_flight.add(run.fed)
            commands += self._hops(run, run.fed)
            run.fed += 1
            self.news += 1
        at = self._plan.address
        while run.asked < min(run.micros, run.fed - len(run.in_flight) + self._window + 1):
            commands.append(
                ReadWindows(at.session, at.epoch, self._plan.dataset, run.step, run.asked, self._rows, self._plan.feeds.seq_len)
            )
            run.asked += 1
        return commands

    def _hops(self, run: Run, micro: int) -> list[Command]:
        hops = eval_hops(run.batches[micro], self._plan.feeds, self._plan.address, (run.step, micro, run.attempt))
        return [SendHop(to, hop, payload) for to, hop, payload in hops]

    def _finish(self, run: Run) -> list[Command]:
        self._run, self._upto = None, run.step
        tokens = sum(run.counted.values())
        loss = mean_loss(run, self._plan.costs)
        known, at = self.known, self._plan.address
        best = known is None or loss < known.best_loss or math.isnan(known.best_loss) or run.step == known.best_step
        if known is None:
            known = ValidationRecord(run.step, run.step, loss)
        self.known = replace(known, upto=run.step, best_step=run.step, best_loss=loss) if best else replace(known, upto=run.step)
        bits = loss / math.log(2) / run.bytes_per_token if run.bytes_per_token else math.nan
        self.last = ValidationMetrics(at.session, run.step, loss, perplexity(loss), bits, tokens, best, at.epoch)
        return [Measured(self.last)]


def complete(record: SessionRecord) -> bool:
    """Whether the last step of a session is done and saved, and validated if it is to be."""
    hyper, known = Hyper.model_validate(record.hyper), record.validation
    owed = hyper.validates(record.steps, record.steps) and (known is None or known.upto < record.steps)
    return record.step >= record.steps and not owed


def mean_loss(run: Run, costs: tuple[NodeId, ...]) -> float:
    """Over all targets of all micro-batches."""
    tokens = sum(run.counted.values())
    return in_order(in_order(run.losses[cost, micro] * run.counted[micro] for micro in range(run.micros)) / tokens for cost in costs)


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that is no number any more."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
