"""One part of a network that generates: which pieces it takes, in which order, and what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcnr.agents.commands import Read, SendHop, SendReport
from dcnr.agents.events import Handoff, JobFailed, ReadDone
from dcnr.agents.plan import make_plan
from dcnr.agents.reading import HostedReading, State
from dcnr.agents.telemetry import Telemetry
from dcnr.bus.messages import TRAINER, Deployed, Failed, Hop
from dcnr.ids import NodeId
from tests.agents.readings import READER, WINDOW, deploy_to_generate, graph_to_generate
from tests.agents.tiny import DIM, VOCABULARY, A, B

WHOLE = deploy_to_generate(dict.fromkeys(graph_to_generate().by_id, A))


def serving(telemetry: Telemetry | None = None) -> HostedReading:
    """The whole network on `a`, in place."""
    one = HostedReading(A, WHOLE, telemetry or Telemetry())
    one.prepared(make_plan(WHOLE, A))
    one.installed()
    return one


def ids(one: HostedReading, length: int, position: int, **other: object) -> None:
    """A piece of ids comes."""
    payload = np.zeros((1, length), np.int64)
    hop = Hop(
        WHOLE.network, WHOLE.session, WHOLE.epoch, position, 0, 0, "fwd", TRAINER, 0, ((NodeId("embedder"), 0),), READER, "int64",
        payload.shape, caches=True,
    )  # fmt: skip
    one.hop(replace(hop, **other), payload)  # type: ignore[arg-type]  # fields of Hop
    one.validate()


def jobs(one: HostedReading) -> list[tuple[int, int, int]]:
    """(slot, attempt, position) of all that can be done now."""
    found = list(iter(lambda: one.next_job(0.0), None))
    return [(job.slot, job.attempt, job.position) for job in found if isinstance(job, Read)]


def test_it_answers_its_deploy_again_and_again() -> None:
    """Once it is in place; not before."""
    one = HostedReading(A, WHOLE, Telemetry())
    assert one.prepares
    assert one.deployed_again() == []
    one.prepared(make_plan(WHOLE, A))
    (said,) = one.installed()
    assert one.installed() == []
    assert one.deployed_again() == [said]
    assert isinstance(said, SendReport)
    assert said.report == Deployed(A, WHOLE.session, WHOLE.epoch, WHOLE.step, one.bytes)
    assert one.bytes > 0


def test_pieces_take_turns_as_they_come() -> None:
    """Two sequences in two slots."""
    one = serving()
    ids(one, 3, 0)
    ids(one, 2, 0, micro=1)
    assert jobs(one) == [(0, 0, 0), (1, 0, 0)]
    ids(one, 1, 2, micro=1)
    ids(one, 1, 3)
    assert jobs(one) == [(1, 0, 2), (0, 0, 3)]


def test_a_newer_attempt_makes_older_pieces_nothing() -> None:
    """What waits, what comes late, and what is done late; the other slot is left alone."""
    telemetry = Telemetry()
    one = serving(telemetry)
    ids(one, 3, 0)
    (job,) = [one.next_job(0.0)]
    assert isinstance(job, Read)
    ids(one, 2, 0, micro=1)
    ids(one, 1, 3)
    ids(one, 4, 0, attempt=1)
    ids(one, 1, 4)
    assert telemetry.dropped["stale"] == 1
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    of = (job.session, job.epoch, job.segment, job.slot, job.attempt, job.position, job.caches)
    assert one.done(ReadDone(*of, (Handoff(logits, logits),))) == []
    assert jobs(one) == [(1, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize(("position", "reason"), [(2, "stale"), (4, "stale"), (3, None)])
def test_a_piece_begins_where_its_attempt_was_read_to(position: int, reason: str | None) -> None:
    """One that comes twice has no effect, nor one whose predecessor was lost."""
    telemetry = Telemetry()
    one = serving(telemetry)
    ids(one, 3, 0)
    jobs(one)
    ids(one, 1, position)
    assert jobs(one) == ([] if reason else [(0, 0, 3)])
    assert sum(telemetry.dropped.values()) == (reason is not None)


@pytest.mark.parametrize(
    ("length", "position", "other"),
    [
        (WINDOW + 1, 0, {}),
        (1, WINDOW, {}),
        (1, -1, {}),
        (1, 0, {"micro": 2}),
        (1, 0, {"micro": -1}),
        (1, 0, {"attempt": -1}),
        (0, 0, {}),
        (1, 0, {"phase": "bwd"}),
        (1, 0, {"targets": ((NodeId("up"), 0),)}),
    ],
)
def test_what_does_not_fit_is_counted_and_dropped(length: int, position: int, other: dict[str, object]) -> None:
    """More positions than the window has, slots that are not there, gradients, inner slots."""
    telemetry = Telemetry()
    one = serving(telemetry)
    ids(one, length, position, **other)
    assert jobs(one) == []
    assert sum(telemetry.dropped.values()) == 1


def test_a_tensor_of_another_kind_is_dropped() -> None:
    """Another width, another dtype, two rows; a good one is still taken, and no second time."""
    homes = {name: B if name in ("up", "gelu", "down") else A for name in graph_to_generate().by_id}
    telemetry, deploy = Telemetry(), deploy_to_generate(homes)
    one = HostedReading(B, deploy, telemetry)
    one.prepared(make_plan(deploy, B))
    one.installed()
    kinds = [(1, 2, DIM + 1), (2, 2, DIM), (1, 2), (1, 2, DIM), (1, 2, DIM)]
    for at, (shape, dtype) in enumerate([*((kind, "float32") for kind in kinds), ((1, 2, DIM), "float64")]):
        hop = Hop(
            deploy.network, deploy.session, deploy.epoch, 0, 0, 0, "fwd", NodeId("residual"), 0, ((NodeId("up"), 0),), A, dtype, shape
        )
        one.hop(hop, np.zeros(shape, dtype))
        assert len(jobs(one)) == (at == 3)
    assert telemetry.dropped == {"malformed": 4, "stale": 1}


def test_logits_go_to_the_reader_unrounded() -> None:
    """Under the numbers of their piece, even where the wire rounds."""
    one = serving()
    ids(one, 3, 0, attempt=7)
    job = one.next_job(0.0)
    assert isinstance(job, Read)
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    (sent,) = one.done(ReadDone(job.session, job.epoch, job.segment, 0, 7, 0, True, (Handoff(logits, logits),)))
    assert isinstance(sent, SendHop)
    assert sent.to == READER
    assert (sent.hop.micro, sent.hop.attempt, sent.hop.step, sent.hop.codec) == (0, 7, 0, "raw")
    assert sent.hop.targets == ((NodeId(READER), 0),)


def test_a_failure_is_said_until_it_is_let_go_of() -> None:
    """And nothing is taken any more."""
    one = serving()
    ids(one, 3, 0)
    failure = JobFailed(WHOLE.session, WHOLE.epoch, "node 'up': it broke", "Traceback", False)
    (said,) = one.failed(failure, 1.0)
    assert isinstance(said, SendReport)
    assert isinstance(said.report, Failed)
    assert one.state is State.FAILED
    assert one.failed(failure, 1.0) == []
    assert one.tick(1.5) == []
    assert one.deadline() == 2.0
    assert one.tick(2.0) == [said]
    ids(one, 3, 0, attempt=1)
    assert jobs(one) == []


def test_the_heartbeat_says_whether_it_has_work() -> None:
    """While it is set up, computes, or sends."""
    one = HostedReading(A, WHOLE, Telemetry())
    assert one.hosted(sending=False).busy
    one = serving()
    assert not one.hosted(sending=False).busy
    assert one.hosted(sending=True).busy
    ids(one, 3, 0)
    assert one.hosted(sending=False).busy
    jobs(one)
    one.answered()
    assert not one.hosted(sending=False).busy
    assert one.hosted(sending=False).work == 1
