"""A session as a program sees it: every step in order, whatever it does in between."""

from __future__ import annotations

from dataclasses import asdict
from types import MappingProxyType

import pytest

from dcnr.bus import subjects
from dcnr.bus.api import arguments, failure, ok
from dcnr.bus.codec import encode
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import Failed, StepMetrics, ValidationMetrics
from dcnr.client.cluster import Cluster
from dcnr.client.follow import AWAY, End
from dcnr.errors import DcnrError, NotFound, UserError, WorldError
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from tests.client.conftest import SMALL


async def test_the_life_of_a_session(cluster: Cluster) -> None:
    """1. every step; 2. how it ended; 3. its log and checkpoints; 4. more steps; 5. gone."""
    session = await cluster.train(SMALL, "text", 3, "life", batch=4, micro_batches=2, seed=7, hyper=MappingProxyType({"lr": 1e-2}))
    rows = [row async for row in session]
    assert [row.step for row in rows] == [1, 2, 3]
    end = await session.wait()
    assert (end.state, end.step, end.loss) == ("done", 3, rows[-1].loss)
    shown = await session.show()
    assert (shown.batch, shown.micro_batches, shown.seed, shown.hyper["lr"], shown.state) == (4, 2, 7, 1e-2, "done")

    assert (await session.log()).rows == rows
    assert [row.step for row in (await session.log(first=2, last=2)).rows] == [2]
    assert [row.step for row in (await session.log(every=2)).rows] == [2]
    assert [one.step for one in await session.checkpoints()] == [0, 3]

    with pytest.raises(UserError, match="ask for more steps"):
        await session.resume()
    await session.resume(5)
    assert [row.step async for row in session] == [4, 5]
    assert (await session.delete()).state == "deleted"
    with pytest.raises(NotFound, match="life"):
        await cluster.session("life")


async def test_a_log_is_asked_for_until_nothing_more_is_known(broker: MemoryBroker) -> None:
    """A part of an answer may have validations only: where few rows are asked for, there are many more of them."""
    server, client = broker.connect(), broker.connect()
    validations = [ValidationMetrics(SessionId("s"), step, 2.0, 7.4, 1.0, 8, False) for step in range(1, 10)]
    row = StepMetrics(SessionId("s"), 6, 2.0, 0.1, 1.0, 1.0, False, 1.0, 1.0)

    async def rows(data: bytes) -> bytes:
        first = arguments(data)["first"]
        page = [one for one in validations if one.step >= first][:2]
        here = [row] if page and first <= row.step <= page[-1].step else []
        return ok({"rows": [asdict(one) for one in here], "validations": [asdict(one) for one in page]})

    async def show(data: bytes) -> bytes:
        return ok({"session": "s", "state": "done"})

    await server.serve("dcnr.api.session.rows", rows)
    await server.serve("dcnr.api.session.show", show)
    log = await (await Cluster(client).session("s")).log(last=9, every=6)
    assert (log.rows, log.validations) == ([row], validations)
    await client.close()
    await server.close()


async def test_a_reader_may_leave_and_come_back(cluster: Cluster) -> None:
    """Steps that were done meanwhile are there, once; another reader begins wherever it likes."""
    session = await cluster.train(SMALL, "text", 100_000, batch=4)
    steps = []
    for _ in range(3):
        async for row in session:
            steps.append(row.step)
            if row.step % 5 == 0:
                break
    assert steps == list(range(1, 16))
    other = await cluster.session(session.name)
    async for one in other.news(first=2):
        if isinstance(one, StepMetrics):
            assert one.step == 2
            break
    assert (await session.suspend()).state == "suspended"
    news = [one async for one in other.news()]
    told = [one.step for one in news if isinstance(one, StepMetrics)]
    assert told == list(range(3, told[-1] + 1))
    assert isinstance(news[-1], End)
    assert (news[-1].state, news[-1].step, news[-1].reason) == ("suspended", told[-1], "suspended by request")
    assert news[-1].error is None


async def test_a_run_that_fails_raises_its_reason(cluster: Cluster, broker: MemoryBroker) -> None:
    """Where it is iterated, and where it is waited for."""
    session = await cluster.train(SMALL, "text", 100_000, batch=4)
    async for row in session:
        if row.step == 3:
            break
    pnode, epoch = broker.connect(), Epoch((await session.show()).epoch)
    failed = Failed(PNodeId("a"), session.name, epoch, "node 'act': out of ideas", "Traceback")
    await pnode.publish(subjects.report(NetworkId("small")), encode(failed))
    with pytest.raises(DcnrError, match="out of ideas"):
        _ = [row async for row in session]
    with pytest.raises(DcnrError, match="out of ideas"):
        await session.wait()
    assert (await session.show()).state == "failed"
    await pnode.close()


async def test_the_orchestrator_may_be_away_while_a_session_is_suspended(broker: MemoryBroker) -> None:
    """It is told once, and waited for."""
    server, client = broker.connect(), broker.connect()
    answers = [
        ok({"session": "s", "state": "suspending"}),
        failure(WorldError("stopped")),
        failure(WorldError("stopped")),
        ok({"session": "s", "state": "suspended"}),
    ]

    async def first(data: bytes) -> bytes:
        return answers.pop(0) if len(answers) == 4 else ok({})

    async def later(data: bytes) -> bytes:
        return ok({"session": "s", "state": "running"}) if len(answers) == 4 else answers.pop(0)

    await server.serve("dcnr.api.session.suspend", first)
    await server.serve("dcnr.api.session.show", later)
    notes: list[str] = []
    session = await Cluster(client).session("s")
    assert (await session.suspend(notes.append)).state == "suspended"
    assert notes == [AWAY]
    await client.close()
    await server.close()
