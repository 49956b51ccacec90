"""The compute thread: does jobs in the order given, each answered by one event, in that order.

Rule 1: it owns the backend while it runs; the loop only queues jobs.
Rule 2: an exception inside a job becomes `JobFailed`, with the node it came from; the thread goes on.
Rule 3: it never waits for a device: a second thread does, and sends the events of work that the device has done.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import assert_never

from dcnr.agents.commands import Abort, Apply, Evaluate, Fold, Job, Pass, Read, Settle, Snapshot
from dcnr.agents.crew import Crew
from dcnr.agents.ending import Later, Settlement
from dcnr.agents.events import Aborted, Applied, Evaluated, Folded, JobEvent, JobFailed, PassDone, ReadDone, Settled, SnapshotTaken
from dcnr.agents.execution import Execution, Losses
from dcnr.agents.forward import Forward
from dcnr.agents.plan import Plan
from dcnr.backends.base import Backend, HostArray
from dcnr.bus.messages import Deploy
from dcnr.errors import BackendUnavailable, BusUnavailable, WorldError
from dcnr.ids import Epoch, SessionId
from dcnr.optim.update import StepNumbers


class Runner:
    """`emit` gets the events, on the compute thread or the one that waits for the device. `threads`: row shards that run at once."""

    def __init__(self, backend: Backend, emit: Callable[[JobEvent], None], threads: int) -> None:
        self._backend = backend
        self._emit = emit
        self._crew = Crew(threads if backend.runs_shards else 1)
        self._thread = ThreadPoolExecutor(1, "dcnr-compute")
        self._waiter = None if backend.runs_shards else ThreadPoolExecutor(1, "dcnr-device")
        self._executions: dict[tuple[SessionId, Epoch], Execution] = {}
        self._forwards: dict[tuple[SessionId, Epoch], Forward] = {}
        self._last: Future[None] | None = None
        """What the thread does at the very end, once it is to end."""

    @property
    def memory_used(self) -> int:
        """Bytes that the backend holds now; on any thread."""
        return self._backend.memory().used

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._thread.submit(self._start, job)

    def load(self, deploy: Deploy, plan: Plan, saved: Mapping[str, HostArray] | None) -> Future[None]:
        """Queue the making of a session's arrays: from the seed, or from `saved` canonical tensors."""
        return self._thread.submit(self._load, deploy, plan, saved)

    def drop(self, session: SessionId, epoch: Epoch) -> Future[None]:
        """Queue the end of a session's arrays."""
        return self._thread.submit(self._drop, session, epoch)

    def close(self, patience: float) -> bool:
        """Give up what is queued, and wait up to `patience` seconds for the job at work. Returns whether it ended."""
        if self._last is None:
            self._last = self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
        return not wait([self._last], patience).not_done

    def _end(self) -> None:
        self._crew.close()
        if self._waiter is not None:
            self._waiter.shutdown(wait=False, cancel_futures=True)

    def _load(self, deploy: Deploy, plan: Plan, saved: Mapping[str, HostArray] | None) -> None:
        if deploy.purpose == "generate":
            forward = Forward(self._backend, plan)
            forward.load(saved)
            self._forwards[deploy.session, deploy.epoch] = forward
            return
        execution = Execution(self._backend, self._crew, deploy, plan)
        execution.load(saved)
        self._executions[deploy.session, deploy.epoch] = execution

    def _drop(self, session: SessionId, epoch: Epoch) -> None:
        self._executions.pop((session, epoch), None)
        self._forwards.pop((session, epoch), None)

    def _start(self, job: Job) -> None:
        """On the compute thread: issue the work, and answer, or let the other thread answer when the device is done."""
        if self._last is not None:
            return
        try:
            later = self._issue(job)
        except Exception as error:  # noqa: BLE001 - the shell's border: whatever a node raises fails its session, not the process
            later = partial(_failed, job, error)
        if self._waiter is None:
            self._answer(job, later)
        else:
            self._waiter.submit(self._answer, job, later)

    def _issue(self, job: Job) -> Later[JobEvent]:
        of = (job.session, job.epoch)
        if isinstance(job, Read):
            read = self._forwards[of].read(job)
            return lambda: ReadDone(*of, job.segment, job.slot, job.attempt, job.position, job.caches, read())
        execution = self._executions[of]
        match job:
            case Pass(_, _, segment, step, micro, attempt=attempt):
                passed = execution.run(job)
                return lambda: PassDone(*of, segment, step, micro, attempt, **passed()._asdict())
            case Evaluate(_, _, segment, step, micro, attempt=attempt):
                evaluated = execution.evaluate(job)
                return lambda: Evaluated(*of, segment, step, micro, attempt, *evaluated()[:2])
            case Fold(_, _, step, attempt):
                folded = execution.fold()
                return lambda: Folded(*of, step, attempt, *folded())
            case Abort(_, _, step):
                execution.abort()
                return lambda: Aborted(*of, step)
            case Apply(_, _, decision):
                numbers = StepNumbers(int(decision.state["updates"]), decision.lr, decision.lr_factor, decision.grad_factor)
                execution.apply(decision.skip, numbers, float(decision.state["loss_scale"]))
                return lambda: Applied(*of, decision.step)
            case Settle(_, _, step):
                settled = execution.settle(step)
                return lambda: _settled(job, settled())
            case Snapshot(_, _, step):
                taken = execution.snapshot()
                return lambda: SnapshotTaken(*of, step, *taken())
            case _:
                assert_never(job)

    def _answer(self, job: Job, later: Later[JobEvent]) -> None:
        try:
            event = later()
        except Exception as error:  # noqa: BLE001 - as above: what a device reports late
            event = _failed(job, error)
        if self._last is None:
            self._emit(event)


def _settled(job: Settle, result: tuple[Settlement, Losses]) -> Settled:
    (verdict, loss_scale), losses = result
    return Settled(job.session, job.epoch, job.step, verdict, loss_scale, losses)


def _failed(job: Job, error: BaseException) -> JobFailed:
    return JobFailed(job.session, job.epoch, describe(error), trace_of(error), is_world(error))


def is_world(error: BaseException) -> bool:
    """Whether it is the machine's or the network's fault, so that the same work may succeed elsewhere or later."""
    return isinstance(error, WorldError | BusUnavailable | BackendUnavailable | MemoryError | OSError)


def describe(error: BaseException) -> str:
    """One line for the user: what was being done, and what went wrong."""
    notes = ", ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{notes}{': ' if notes else ''}{type(error).__name__}: {error}".split())


def trace_of(error: BaseException) -> str:
    """The whole traceback, for the log."""
    return "".join(traceback.format_exception(error))
