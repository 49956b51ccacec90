"""The shell, on a memory bus: orders in, work done, good-bye said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from dcnr.agents.commands import Command
from dcnr.agents.events import Event, HopArrived
from dcnr.agents.pnode import PNode
from dcnr.agents.shell import Shell
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus import subjects
from dcnr.bus.memory import MemoryBroker, MemoryBus
from dcnr.bus.messages import Deployed, Failed, Heartbeat, Refused, Save, Saved, Undeploy
from dcnr.clock import MonotonicClock
from dcnr.errors import AlreadyExists, InvariantError
from dcnr.ids import Epoch, SessionId
from dcnr.storage.base import open_storage
from tests.agents.served import DEPLOY, cluster, heard
from tests.agents.tiny import A, graph_of
from tests.integration.scripted import PATIENCE, Trainer, batches, info_of


def test_it_beats_serves_and_says_good_bye() -> None:
    """Heartbeats say what is hosted; the last one says that it is stopping."""

    async def story() -> None:
        async with cluster(DEPLOY) as (shell, trainer, _):
            await trainer.start()
            await trainer.until(lambda: any(beat.hosted for beat in trainer.beats()))
            beat = next(beat for beat in trainer.beats() if beat.hosted)
            assert beat.info.memory_used > 1 << 20  # what the numpy backend measures: this whole process
            assert beat.hosted[0].bytes > 0
            assert (beat.hosted[0].session, beat.stopping) == (DEPLOY.session, False)
            shell.stop()
            await trainer.until(lambda: trainer.beats()[-1].stopping)

    asyncio.run(story())


def test_a_process_that_hosts_nothing_ends_at_once() -> None:
    """`stop` before anything else returns, and the compute thread has ended."""

    async def story() -> None:
        broker = MemoryBroker()
        shell = Shell(info_of("a"), NumpyBackend(), MonotonicClock(), threads=2)

        async def connect(_purpose: str) -> MemoryBus:
            return broker.connect()

        async with asyncio.timeout(PATIENCE):
            assert await shell.run(connect, shell.stop)

    asyncio.run(story())


def test_the_younger_of_two_with_one_name_ends_with_an_error() -> None:
    """It says good-bye under its own incarnation, names the other one, and that one serves on."""

    async def story() -> None:
        async with cluster(DEPLOY) as (_, trainer, broker):
            await trainer.start()
            second = Shell(replace(info_of("a"), incarnation="2"), NumpyBackend(), MonotonicClock(), threads=2)

            async def connect(_purpose: str) -> MemoryBus:
                return broker.connect()

            async with asyncio.timeout(PATIENCE):
                with pytest.raises(AlreadyExists, match="another agent named 'a' is alive at host here, process 1"):
                    await second.run(connect, lambda: None)
            await trainer.until(lambda: any(beat.stopping for beat in trainer.beats()))
            assert {beat.info.incarnation for beat in trainer.beats() if beat.stopping} == {"2"}
            await trainer.step(1, batches(17, 5, DEPLOY.batch, 1)[0])

    asyncio.run(story())


def test_garbage_is_dropped() -> None:
    """Bytes that are no message, and messages that are no order, change nothing and are counted."""

    async def story() -> None:
        async with cluster(DEPLOY) as (shell, trainer, _):
            await trainer.bus.publish(subjects.command(A), b"\xc1garbage")
            await trainer.tell(A, Heartbeat(info_of("b"), ()))
            await trainer.start()
            assert shell.telemetry.dropped == {"malformed": 1}

    asyncio.run(story())


def test_a_part_that_does_not_fit_is_refused() -> None:
    """With the numbers, and the agent lives on."""

    async def story() -> None:
        async with cluster(DEPLOY, memory=2000) as (shell, trainer, _):
            await trainer.tell(A, trainer.deploy)
            refused = await heard(trainer, Refused)
            assert "a has 2.0 KiB free of 2.0 KiB" in refused.reason
            assert shell.machine.sessions == {}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network_file": "name: [oops"}, "tiny.yml"),
        ({"hyper": {"shards": "many"}}, "shards"),
    ],
    ids=["file", "hyper"],
)
def test_a_deploy_that_cannot_be_carried_out_fails_with_a_sentence(change: dict[str, object], message: str) -> None:
    """A file that does not load, values that are none."""

    async def story() -> None:
        async with cluster(replace(DEPLOY, **change)) as (_, trainer, _broker):  # type: ignore[arg-type]  # fields of Deploy
            await trainer.tell(A, trainer.deploy)
            failed = await heard(trainer, Failed)
            assert message in failed.message

    asyncio.run(story())


def test_a_checkpoint_lies_in_storage(tmp_path: Path) -> None:
    """`Save` after the deploy: the part holds every canonical tensor."""

    async def story() -> None:
        deploy = replace(DEPLOY, storage=f"file://{tmp_path}")
        async with cluster(deploy) as (_, trainer, _broker):
            await trainer.start()
            await trainer.tell(A, Save(deploy.session, deploy.epoch, 0))
            await trainer.until(lambda: bool(trainer.reports(Saved, 0)))
            saved = trainer.reports(Saved, 0)[A]
            assert isinstance(saved, Saved)
            assert {"embedder.weight", "embedder.weight:v", "head_1.k_weight"} <= set(saved.part.tensors)
            assert saved.state == deploy.state
            assert len(await open_storage(deploy.storage).get(saved.part.key)) == saved.part.bytes

    asyncio.run(story())


def test_what_a_newer_epoch_goes_on_hearing_is_not_given_up_in_between() -> None:
    """A deploy that takes the place of an older one subscribes to what is new only."""

    async def story() -> None:
        async with cluster(DEPLOY) as (_, trainer, broker):
            await trainer.start()
            before = {id(interest) for interest in broker.interests}
            trainer.deploy = replace(trainer.deploy, epoch=Epoch(2))
            await trainer.start()
            assert {id(interest) for interest in broker.interests} == before

    asyncio.run(story())


def test_a_newer_epoch_starts_again() -> None:
    """The same losses from the seed, and what is still said to the old epoch is dropped and counted."""

    async def story() -> None:
        async with cluster(DEPLOY) as (shell, trainer, _):
            data = batches(17, 5, DEPLOY.batch, 2)
            await trainer.start()
            first = [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data, 1)]
            trainer.deploy = replace(trainer.deploy, epoch=Epoch(2))
            await trainer.start()
            assert [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data, 1)] == first
            trainer.deploy = replace(trainer.deploy, epoch=Epoch(1))
            await trainer.feed(1, data[0])
            await trainer.tell(A, trainer.deploy)
            # two hops for each micro-batch, and the deploy; heartbeats wake us until they have arrived
            await trainer.until(lambda: shell.telemetry.dropped["stale"] == 2 * DEPLOY.micro_batches + 1)

    asyncio.run(story())


def test_sessions_of_one_network_share_subscriptions() -> None:
    """One of two sessions goes, and the other still hears its hops; when both are gone nobody listens."""

    async def story() -> None:
        async with cluster(DEPLOY) as (_, trainer, broker):
            before = len(broker.interests)
            await trainer.start()
            one = len(broker.interests)
            first, second = trainer.deploy, replace(trainer.deploy, session=SessionId("other"))
            trainer.heard.clear()
            trainer.deploy = second
            await trainer.start()
            assert len(broker.interests) == one > before
            await trainer.tell(A, Undeploy(first.session, first.epoch))
            await trainer.step(1, batches(17, 5, DEPLOY.batch, 1)[0])
            await trainer.tell(A, Undeploy(second.session, second.epoch))
            async with asyncio.timeout(PATIENCE):
                while any(interest.pattern.endswith((".fwd", ".bwd", ".step")) for interest in broker.interests):
                    trainer.changed.clear()
                    await trainer.changed.wait()

    asyncio.run(story())


def test_a_deploy_is_answered_again() -> None:
    """An orchestrator that missed the answer asks again."""

    async def story() -> None:
        async with cluster(DEPLOY) as (_, trainer, _broker):
            await trainer.start()
            trainer.heard.clear()
            await trainer.start()
            assert isinstance(trainer.reports(Deployed)[A], Deployed)

    asyncio.run(story())


def test_a_bug_in_a_node_fails_the_session_only() -> None:
    """Ids beyond the vocabulary: the failure names the embedder, and the agent takes the next deploy."""

    async def story() -> None:
        async with cluster(DEPLOY) as (_, trainer, _broker):
            await trainer.start()
            await trainer.feed(1, np.full((DEPLOY.batch, 6), 10**6))
            failed = await heard(trainer, Failed)
            assert failed.message.startswith("node 'embedder': IndexError")
            trainer.heard.clear()
            trainer.deploy = replace(trainer.deploy, epoch=Epoch(2))
            await trainer.start()

    asyncio.run(story())


def test_a_bug_of_ours_ends_the_process_with_its_story() -> None:
    """The last events stand in the log, without their tensors."""

    class Broken(PNode):
        """Contradicts itself at the first hop."""

        def handle(self, event: Event, now: float) -> list[Command]:
            """As told, until then."""
            if isinstance(event, HopArrived):
                raise InvariantError("two and two are five")
            return super().handle(event, now)

    async def story() -> None:
        shell = Shell(info_of("a"), NumpyBackend(), MonotonicClock(), threads=2)
        shell.machine = Broken(info_of("a"), shell.telemetry, 0.0)
        broker = MemoryBroker()
        trainer = await Trainer.join(broker, graph_of(), DEPLOY, [info_of("a")])

        async def connect(_purpose: str) -> MemoryBus:
            return broker.connect()

        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(shell.run(connect, ready.set))
            await ready.wait()
            await trainer.start()
            await trainer.feed(1, batches(17, 5, DEPLOY.batch, 1)[0])
            await trainer.leave()

    with capture_logs() as logs, pytest.raises(ExceptionGroup) as caught:
        asyncio.run(story())
    assert caught.group_contains(InvariantError, match="two and two")
    (told,) = [entry["story"] for entry in logs if "story" in entry]
    assert "HopArrived Hop session=run epoch=1 step=1 micro=0 phase=fwd targets=(('embedder', 0),)" in told
