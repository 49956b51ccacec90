"""Validation with real processes: the same numbers on one agent and on three, those of plain NumPy, and training none the wiser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcnr.agents.commands import Evaluate
from dcnr.agents.crew import Crew
from dcnr.agents.execution import Execution
from dcnr.agents.plan import make_plan
from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.api import call
from dcnr.bus.messages import Deploy
from dcnr.client.connect import connection
from dcnr.data.dataset import Dataset
from dcnr.ids import Epoch, NetworkId, PNodeId, SessionId
from dcnr.optim.decide import ScalerState
from dcnr.orchestrator.feed import windows_of
from dcnr.orchestrator.planning import prepared
from dcnr.orchestrator.trainer import scaler_fields
from tests.acceptance.networks import SEQ, small
from tests.acceptance.running import Cluster, listening, losses, manifest, register, same_bits, tensors, train

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]

STEPS, EVERY = 9, 4
RUN: dict[str, Any] = {"network": "validated", "steps": STEPS, "batch": 8, "micro_batches": 2, "seed": 3}
HYPER: dict[str, Any] = {"lr": 0.01, "checkpoint_every": 0, "keep_last": 1}
NETWORK = small("validated", "float32")
"""With dropout."""


async def validated(cluster: Cluster, session: str, pnodes: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses of a run on so many PNodes, and the rows of its validations, without what differs from session to session."""
    async with listening(cluster.url, session) as run:
        await run.ask("create", dataset="text", pnodes=pnodes, hyper=HYPER | {"validate_every": EVERY}, **RUN)
        await run.until("done")
        async with connection(cluster.url) as bus:
            rows = (await call(bus, "session.rows", session=session, first=1, last=STEPS))["validations"]
        return losses(run.rows), [{key: value for key, value in row.items() if key not in ("session", "epoch")} for row in rows]


async def by_numpy(data_dir: Path, session: str, step: int) -> float:
    """The mean loss of the whole split at a checkpoint, all rows at once, in a network that is not cut."""
    found, graph, alone = await manifest(data_dir, session, step), prepared(NETWORK, "n.yml", fuse=False), PNodeId("alone")
    deploy = Deploy(
        network=NetworkId("validated"), session=SessionId(session), epoch=Epoch(1), network_file=NETWORK, fuse=False,
        assignment={str(node.id): alone for node in graph.nodes}, peers=(), hyper={"shards": 1}, state=scaler_fields(ScalerState()), seed=0,
        total_steps=STEPS, micro_batches=1, batch=8, step=step, storage="", checkpoint=None, decides=True,
    )  # fmt: skip
    plan = make_plan(deploy, alone)
    execution = Execution(NumpyBackend(), Crew(1), deploy, plan)
    execution.load(await tensors(data_dir, session, found.step))
    dataset = Dataset.open(data_dir, "text")
    batch = windows_of(dataset.window_rows("validation", 0, dataset.windows("validation", SEQ), SEQ))
    inputs = (batch.ids_BT, batch.targets_BT)
    ((_, loss),) = execution.evaluate(Evaluate(SessionId(session), Epoch(1), 0, step, 0, inputs, (0.0, batch.weight)))().losses
    return loss


async def test_validations_are_equal_on_one_agent_and_on_three_and_are_those_of_numpy(cluster: Cluster) -> None:
    """Of every token but the first, without dropout; and the weights are those of a run without validations."""
    await register(cluster.url, NETWORK)
    plain = losses(await train(cluster.url, "not-validated", pnodes=1, hyper=HYPER, **RUN))
    one, rows = await validated(cluster, "validated-1", 1)
    three, others = await validated(cluster, "validated-3", 3)
    assert one == three == plain
    assert rows == others
    assert [row["step"] for row in rows] == [4, 8, 9]
    assert {row["tokens"] for row in rows} == {Dataset.open(cluster.data_dir, "text").manifest.tokens("validation") - 1}
    last = rows[-1]
    assert last["loss"] == pytest.approx(await by_numpy(cluster.data_dir, "validated-3", STEPS), rel=1e-6)
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / np.log(2), rel=1e-6), "characters of one byte each"
    found = [await tensors(cluster.data_dir, session, STEPS) for session in ("not-validated", "validated-1", "validated-3")]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


async def test_the_command_shows_validations_and_ends_early(cluster: Cluster, tmp_path: Path) -> None:
    """As events; the best checkpoint stays, and `session show` names it; what cannot be validated is refused in words."""
    (tmp_path / "network.yml").write_text(NETWORK)
    settings = ["--set=lr=1.0", "--set=validate_every=2", "--set=validate_batches=1", "--set=patience=2", "--set=keep_last=1"]
    run = ["--dataset", "text", "--steps", "200", "--batch", "8", "--session", "early", "--pnodes", "2", "--json", *settings]
    events = [json.loads(line) for line in cluster.dcnr("train", str(tmp_path / "network.yml"), *run).splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    shown = [event for event in events if event["event"] == "validation"]
    best = min(shown, key=lambda event: (event["loss"], event["step"]))
    assert steps[-1] == best["step"] + 4 < 200
    assert [event["step"] for event in shown] == list(range(2, steps[-1] + 1, 2))
    assert {event["tokens"] for event in shown} == {8 * SEQ}
    session = json.loads(cluster.dcnr("session", "show", "early", "--json"))
    assert session["state"] == "done"
    assert session["reason"].startswith(f"ended early, after step {steps[-1]}: 2 validations")
    assert session["best"] == {"step": best["step"], "loss": best["loss"]}
    assert best["step"] in session["checkpoints"]
