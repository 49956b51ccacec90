"""The compute thread: does jobs in the order given, each answered by one event.

Rule 1: it owns the backend while it runs; the loop only queues jobs.
Rule 2: an exception inside a job becomes `JobFailed`, with the node it came from; the thread goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import assert_never

from dcnr.agents.commands import Apply, Fold, Job, Pass, Settle, Snapshot
from dcnr.agents.crew import Crew
from dcnr.agents.events import Applied, Folded, JobEvent, JobFailed, PassDone, Settled, SnapshotTaken
from dcnr.agents.execution import Execution
from dcnr.agents.plan import Plan
from dcnr.backends.base import Backend, HostArray
from dcnr.bus.messages import Deploy
from dcnr.ids import Epoch, SessionId
from dcnr.optim.update import StepNumbers


class Runner:
    """`emit` gets the events, on the compute thread. `threads` is how many row shards may run at once."""

    def __init__(self, backend: Backend, emit: Callable[[JobEvent], None], threads: int) -> None:
        self._backend = backend
        self._emit = emit
        self._crew = Crew(threads if backend.runs_shards else 1)
        self._thread = ThreadPoolExecutor(1, "dcnr-compute")
        self._executions: dict[tuple[SessionId, Epoch], Execution] = {}
        self._last: Future[None] | None = None
        """What the thread does at the very end, once it is to end."""

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._thread.submit(self._do, job).add_done_callback(lambda done: self._answer(job, done))

    def load(self, deploy: Deploy, plan: Plan, saved: Mapping[str, HostArray] | None) -> Future[None]:
        """Queue the making of a session's arrays: from the seed, or from `saved` canonical tensors."""
        return self._thread.submit(self._load, deploy, plan, saved)

    def drop(self, session: SessionId, epoch: Epoch) -> Future[None]:
        """Queue the end of a session's arrays."""
        return self._thread.submit(self._drop, session, epoch)

    def close(self, patience: float) -> bool:
        """Give up what is queued, and wait up to `patience` seconds for the job at work. Returns whether it ended."""
        if self._last is None:
            self._last = self._thread.submit(self._crew.close)
            self._thread.shutdown(wait=False)
        return not wait([self._last], patience).not_done

    def _load(self, deploy: Deploy, plan: Plan, saved: Mapping[str, HostArray] | None) -> None:
        execution = Execution(self._backend, self._crew, deploy, plan)
        execution.load(saved)
        self._executions[deploy.session, deploy.epoch] = execution

    def _drop(self, session: SessionId, epoch: Epoch) -> None:
        self._executions.pop((session, epoch), None)

    def _do(self, job: Job) -> JobEvent | None:
        if self._last is not None:
            return None
        execution = self._executions[job.session, job.epoch]
        match job:
            case Pass(session, epoch, segment, step, micro):
                outputs, losses, gradients = execution.run(job)
                return PassDone(session, epoch, segment, step, micro, outputs, losses, gradients)
            case Fold(session, epoch, step):
                norms, finite = execution.fold()
                return Folded(session, epoch, step, norms, finite)
            case Apply(session, epoch, decision):
                numbers = StepNumbers(decision.updates, decision.lr, decision.lr_factor, decision.grad_factor)
                execution.apply(decision.skip, numbers, decision.next_loss_scale)
                return Applied(session, epoch, decision.step)
            case Settle(session, epoch, step):
                loss_scale = execution.state.loss_scale
                return Settled(session, epoch, step, execution.settle(step), loss_scale)
            case Snapshot(session, epoch, step):
                return SnapshotTaken(session, epoch, step, execution.snapshot(), execution.state)
            case _:
                assert_never(job)

    def _answer(self, job: Job, done: Future[JobEvent | None]) -> None:
        error = done.exception()
        event = done.result() if error is None else JobFailed(job.session, job.epoch, describe(error), trace_of(error))
        if event is not None and self._last is None:
            self._emit(event)


def describe(error: BaseException) -> str:
    """One line for the user: what was being done, and what went wrong."""
    notes = ", ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{notes}{': ' if notes else ''}{type(error).__name__}: {error}".split())


def trace_of(error: BaseException) -> str:
    """The whole traceback, for the log."""
    return "".join(traceback.format_exception(error))
