"""The shell in trouble: lost messages, storage that does not answer or does not take a part, and the way back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from dcnr.agents.commands import Beat
from dcnr.agents.hosted import HostedSession
from dcnr.agents.runner import Runner
from dcnr.agents.shell import BACKLOG, Service, Shell
from dcnr.agents.telemetry import Telemetry
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus import codec
from dcnr.bus.memory import MemoryBroker, MemoryBus
from dcnr.bus.messages import Complete, Hop, Refused, Save, Saved, SaveFailed, StepDone, StepReport
from dcnr.bus.transport import HopTransport
from dcnr.ids import Epoch
from dcnr.storage.base import SCHEMES, open_storage
from dcnr.storage.checkpoint import write_manifest
from dcnr.storage.file import FileStorage
from tests.agents.served import DEPLOY, cluster, heard
from tests.agents.tiny import SESSION, A, B, C, alternate, deploy_of, graph_of, manifest_of, spread
from tests.integration.scripted import PATIENCE, Trainer, agents, batches, info_of


def trained(shell: Shell) -> HostedSession:
    """What it has of the session."""
    part = shell.machine.sessions[SESSION]
    assert isinstance(part, HostedSession)
    return part


@pytest.mark.parametrize(
    ("change", "said", "damaged"),
    [
        ({"probe": "probe/abc"}, "is not the folder that the orchestrator sees", False),
        ({"checkpoint": "checkpoints/run/0000000001/manifest.json", "step": 1}, "manifest.json", True),
        ({"checkpoint": "checkpoints/run/0000000001/manifest.json", "step": 1, "storage": "tape://1"}, "tape://1", False),
    ],
    ids=["probe", "damaged", "unknown"],
)
def test_a_deploy_that_finds_no_storage_is_refused(tmp_path: Path, change: dict[str, object], said: str, damaged: bool) -> None:
    """With the reason; nothing of it is kept, and nobody listens for it."""

    async def story() -> None:
        async with cluster(replace(DEPLOY, **{"storage": f"file://{tmp_path}", **change})) as (shell, trainer, broker):  # type: ignore[arg-type]
            before = len(broker.interests)
            await trainer.tell(A, trainer.deploy)
            refused = await heard(trainer, Refused)
            assert said in refused.reason
            assert refused.damaged == damaged
            assert shell.machine.sessions == {}
            assert len(broker.interests) == before

    asyncio.run(story())


def test_an_eviction_gives_up_what_hangs_in_storage(tmp_path: Path) -> None:
    """A deploy whose storage does not answer: the next one, which needs no storage, is not held up by it."""

    class Hanging(FileStorage):
        """Never answers."""

        async def get(self, key: str) -> bytes:
            """Wait for ever."""
            hangs.set()
            await asyncio.Event().wait()
            return b""

    hangs = asyncio.Event()

    async def story() -> None:
        with patch.dict(SCHEMES, {"hang": lambda _url: Hanging(tmp_path)}):
            async with cluster(replace(DEPLOY, storage="hang://", checkpoint="checkpoints/run/0000000001/manifest.json")) as (
                _,
                trainer,
                _b,
            ):
                await trainer.tell(A, trainer.deploy)
                async with asyncio.timeout(PATIENCE):
                    await hangs.wait()
                trainer.deploy = replace(trainer.deploy, epoch=Epoch(2), checkpoint=None)
                await trainer.start()
                await trainer.step(1, batches(17, 5, DEPLOY.batch, 1)[0])

    asyncio.run(story())


def test_training_goes_on_when_storage_does_not_take_a_part(tmp_path: Path) -> None:
    """A file stands where the folder should be: it is said; a step later the folder is there, and the old copy goes to it."""

    async def story() -> None:
        (tmp_path / "checkpoints").write_text("in the way")
        deploy = replace(DEPLOY, storage=f"file://{tmp_path}")
        data = batches(17, 5, deploy.batch, 2)
        async with cluster(deploy) as (_, trainer, _broker):
            await trainer.start()
            await trainer.tell(A, Save(deploy.session, deploy.epoch, 0))
            await trainer.until(lambda: bool(trainer.reports(SaveFailed, 0)))
            failed = trainer.reports(SaveFailed, 0)[A]
            assert isinstance(failed, SaveFailed)
            assert str(tmp_path) in failed.message
            await trainer.step(1, data[0])
            (tmp_path / "checkpoints").unlink()
            await trainer.tell(A, Save(deploy.session, deploy.epoch, 0))
            await trainer.until(lambda: bool(trainer.reports(Saved, 0)))
            saved = trainer.reports(Saved, 0)[A]
            assert isinstance(saved, Saved)
            assert saved.state == deploy.state
            await trainer.step(2, data[1])

    asyncio.run(story())


def test_a_step_that_is_fed_again_gives_the_same_bits() -> None:
    """Half of every step is fed, computed, and then all of it as the next attempt: the losses are those of an undisturbed run."""

    async def run(disturbed: bool) -> list[float]:
        async with cluster(DEPLOY) as (shell, trainer, _):
            await trainer.start()
            losses = []
            for step, tokens_BS in enumerate(batches(17, 5, DEPLOY.batch, 4), 1):
                if disturbed:
                    rows = DEPLOY.batch // DEPLOY.micro_batches
                    work = shell.machine.sessions[DEPLOY.session].hosted(sending=False).work
                    await trainer.send(step, 0, 0, tokens_BS[:rows, :-1])
                    await trainer.send(step, 0, 1, tokens_BS[:rows, 1:], 1.0 / tokens_BS[:, 1:].size)
                    await trainer.until(lambda: beats_work(trainer) > work)  # noqa: B023 - awaited right here
                    await trainer.feed(step, tokens_BS, attempt=1)
                    await trainer.until(lambda: bool(trainer.reports(StepDone, step)))  # noqa: B023
                    done = trainer.reports(StepDone, step)[A]
                    assert isinstance(done, StepDone)
                    losses.append(done.loss)
                else:
                    losses.append(await trainer.step(step, tokens_BS))
            return losses

    assert asyncio.run(run(disturbed=True)) == asyncio.run(run(disturbed=False))


def beats_work(trainer: Trainer) -> int:
    """What the last heartbeat says of the work done."""
    return max((hosted.work for beat in trainer.beats() for hosted in beat.hosted), default=0)


def test_a_rollback_restores_from_memory_what_is_there_and_reads_the_rest(tmp_path: Path) -> None:
    """Two agents; `b` is given up after step 3, and `a` goes back to step 2 with its own copy and the part of `b`, which it must read.

    Its own part is gone from storage, so it cannot have read that; the losses are those of before.
    """

    async def story() -> None:
        homes = spread(graph_of(), [A, B])
        deploy = deploy_of(homes, batch=4, hyper={"lr": 0.01, "checkpoint_every": 2}, storage=f"file://{tmp_path}")
        data = batches(17, 5, deploy.batch, 4)
        broker, infos = MemoryBroker(), [info_of("a"), info_of("b")]
        trainer = await Trainer.join(broker, graph_of(), deploy, infos)
        async with agents(broker, NumpyBackend(), infos) as shells:
            await trainer.start()
            losses = [await trainer.step(step, tokens_BS) for step, tokens_BS in enumerate(data[:3], 1)]
            await trainer.until(lambda: len(trainer.reports(Saved, 2)) == 2)
            saved = {pnode: report for pnode, report in trainer.reports(Saved, 2).items() if isinstance(report, Saved)}
            state = trainer.verdicts[2].state
            manifest = manifest_of(deploy, [report.part for report in saved.values()], 2, state)
            await write_manifest(open_storage(deploy.storage), manifest)
            await trainer.announce(Complete(deploy.session, deploy.epoch, 2))
            await trainer.until(lambda: trained(shells[A]).copies.get(0) is None)
            await open_storage(deploy.storage).delete(saved[A].part.key)
            back = replace(
                trainer.deploy, epoch=Epoch(2), assignment=dict.fromkeys(deploy.assignment, A), decides=True, step=2,
                state=asdict(state), checkpoint=manifest.key,
            )  # fmt: skip
            trainer.deploy, trainer.state = back, state
            await trainer.start()
            assert await trainer.step(3, data[2]) == losses[2]
            copy = trained(shells[A]).copies.get(2)
            assert copy is not None
            assert "up.weight" in copy.tensors
            assert "embedder.weight:m" in copy.tensors
            await open_storage(deploy.storage).delete("checkpoints/")
            trainer.deploy = replace(back, epoch=Epoch(3))
            trainer.heard.clear()
            await trainer.start()  # from memory alone
            assert await trainer.step(3, data[2]) == losses[2]
        await trainer.leave()

    asyncio.run(story())


class Deaf(MemoryBus):
    """A connection whose messages do not leave."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Never returns."""
        await asyncio.Event().wait()


def test_nothing_grows_while_no_message_gets_out() -> None:
    """Of messages that wait for the server, only so many are kept; the rest is logged and forgotten."""

    async def story() -> None:
        broker = MemoryBroker()
        transport = HopTransport(broker.connect(), A, "here", lambda _hop, _payload: None)
        runner = Runner(NumpyBackend(), lambda _event: None, 1)
        service = Service(info_of("a"), Telemetry(), asyncio.Queue(), Deaf(broker, "deaf"), transport, runner)
        with capture_logs() as logs:
            for _ in range(BACKLOG + 5):
                service.perform(Beat((), stopping=False, age=1.0))
        assert service.waiting == BACKLOG
        assert len(logs) == 5
        await transport.close()
        assert runner.close(PATIENCE)

    asyncio.run(story())


class Losing:
    """The fate of messages: of all tensors of each step's first attempt one is lost, drawn by `seed`; None for no loss."""

    def __init__(self, seed: int | None) -> None:
        self._draw = None if seed is None else random.Random(seed)
        self._lost: set[int] = set()
        self._seen: Counter[int] = Counter()
        self.lost = asyncio.Event()

    def __call__(self, _sender: str, _receiver: str, subject: str, data: bytes) -> list[float]:
        """Mostly at once."""
        if self._draw is None or not subject.endswith((".fwd", ".bwd")):
            return [0.0]
        hop, _ = codec.decode_with_payload(data)
        assert isinstance(hop, Hop)
        self._seen[hop.step] += 1
        # One of the first that a step has, so that it is surely reached before the loss stops the rest.
        if hop.attempt or hop.step in self._lost or (self._draw.random() > 0.2 and self._seen[hop.step] < 8):
            return [0.0]
        self._lost.add(hop.step)
        self.lost.set()
        return []


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_lost_between_agents_never_changes_the_result(seed: int) -> None:
    """Three agents with a border at nearly every node: a step that lost a tensor is fed again, while others still work at the first try."""

    async def run(loses: int | None) -> list[float]:
        broker, infos = MemoryBroker(), [info_of(name) for name in "abc"]
        deploy = deploy_of(alternate(graph_of(), [A, B, C]), batch=4, hyper={"lr": 0.01})
        trainer = await Trainer.join(broker, graph_of(), deploy, infos)
        fate = broker.fate = Losing(loses)
        losses = []
        async with agents(broker, NumpyBackend(), infos):
            await trainer.start()
            for step, tokens_BS in enumerate(batches(17, 5, 4, 4), 1):
                attempt = 0
                await trainer.feed(step, tokens_BS)
                if loses is not None:
                    async with asyncio.timeout(PATIENCE):
                        await fate.lost.wait()
                    fate.lost.clear()
                    attempt = 1
                    await trainer.feed(step, tokens_BS, attempt)
                await trainer.until(lambda: attempts(trainer, step) == [attempt] * 3)  # noqa: B023 - awaited right here
                losses.append(await trainer.decide(step))
        await trainer.leave()
        return losses

    assert asyncio.run(run(seed)) == asyncio.run(run(None))


def attempts(trainer: Trainer, step: int) -> list[int]:
    """Of the newest reports of a step."""
    return [report.attempt for report in trainer.reports(StepReport, step).values() if isinstance(report, StepReport)]
