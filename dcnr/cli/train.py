"""`dcnr train`: from a network and a text (or dataset) to a run that a person watches.

Rule 1: everything that can be wrong with the user's input is found before anything is started or registered.
Rule 2: a network file is registered under its own name and replaces an older version; sessions keep the text that they began with.
Rule 3: Ctrl-C with `--local` writes a checkpoint and stops the cluster; without it, only the watching ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from dcnr.cli.checkpoint import chosen
from dcnr.cli.client import run
from dcnr.cli.cluster import BACKENDS, LocalCluster
from dcnr.cli.corpus import prepare_text
from dcnr.cli.follow import follow
from dcnr.cli.output import Command, data_dir_option, example, json_option
from dcnr.cli.outputs import OutputPlan, output_options
from dcnr.cli.progress import View, choose_view
from dcnr.cli.source import Source, fetch_source, read_source
from dcnr.client.cluster import Cluster, NetworkFile, TrainOptions, is_file, made_up
from dcnr.client.connect import connect
from dcnr.client.session import Session
from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP
from dcnr.data.dataset import Dataset
from dcnr.errors import DcnrError, UserError
from dcnr.ids import SessionId, check_id
from dcnr.metrics.writers import Writers
from dcnr.network.problems import nearest
from dcnr.optim.hyper import Hyper

SUSPEND_PATIENCE = 1.6
"""Seconds that a checkpoint may take after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The options of the command."""

    network: str
    dataset: str | None
    text: tuple[str, ...]
    steps: int
    batch: int
    micro_batches: int
    seed: int
    settings: tuple[str, ...]
    no_fuse: bool
    pnodes: int
    local: int | None
    session: str | None
    backend: str
    data_dir: Path
    as_json: bool
    outputs: OutputPlan = field(default_factory=OutputPlan)

    @property
    def name(self) -> SessionId:
        """Of the run."""
        return SessionId(self.session or made_up(Path(self.network).stem))


@click.command(
    cls=Command,
    epilog=example(
        "dcnr train networks/tiny.yml --text book.txt --local 3",
        "dcnr train tiny --dataset books --steps 1000 --batch 16 --micro-batches 2 --set lr=1e-3 --set schedule=cosine",
    ),
)
@click.argument("network", metavar="NETWORK|FILE.yml")
@click.option("--dataset", help="A dataset of the data directory.")
@click.option(
    "--text",
    multiple=True,
    metavar="PATH",
    help="A text file, folder or glob instead (any number of times): makes tokenizer and dataset, once for each content.",
)
@click.option("--steps", type=click.IntRange(1, MAX_STEP), default=200, show_default=True, help="Optimizer steps in all.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=8, show_default=True, help="Rows of a step.")
@click.option("--micro-batches", type=click.IntRange(min=1), default=1, show_default=True, help="Parts that a batch is sent in.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of weights, batches and dropout.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=f"Hyper-parameter: {', '.join(Hyper.model_fields)}.")
@click.option("--no-fuse", is_flag=True, help="Run the graph as written, without fusing nodes.")
@click.option("--pnodes", type=click.IntRange(min=0), default=0, show_default=True, help="Spread over so many PNodes; 0 for all.")
@click.option("--local", type=click.IntRange(1, 64), metavar="AGENTS", help="Start a cluster of so many agents for this run.")
@click.option("--session", help="Name of the run; made up if not given.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="Of the agents of --local.")
@output_options
@data_dir_option
@json_option
def train(csv: Path | None, tensorboard: Path | None, wandb: str | None, **options: Any) -> None:
    """Train a network and watch it learn."""
    run(start_training(TrainPlan(**options, outputs=OutputPlan(csv, tensorboard, wandb))))


async def start_training(plan: TrainPlan, then: Callable[[Cluster], Awaitable[None]] | None = None) -> None:
    """The whole command; `then` is done while its cluster is still there."""
    hyper = parse_settings(plan.settings)
    _check(plan)
    source = read_source(plan.network) if is_file(plan.network) else None
    dataset = await _dataset(plan, source) if source else None
    name = plan.name
    async with AsyncExitStack() as stack:
        writers = stack.enter_context(plan.outputs.open(name, new=True))
        local = None
        if plan.local is not None:
            local = await stack.enter_async_context(LocalCluster(plan.data_dir, plan.local, plan.backend))
        cluster = await stack.enter_async_context(connect(local.url if local else None))
        if source is None or dataset is None:
            source = await fetch_source(cluster, plan.network)
            dataset = await _dataset(plan, source)
        work = _both(_train(plan, cluster, source, dataset, hyper, name, writers), then, cluster)
        await (local.run_beside(work, lambda line: click.echo(line, err=True)) if local else work)


async def _both(training: Awaitable[None], then: Callable[[Cluster], Awaitable[None]] | None, cluster: Cluster) -> None:
    await training
    if then is not None:
        await then(cluster)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """The fields of `Hyper` that `key=value` texts set. Raises `UserError`."""
    fields: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting} has no '='", "write it as key=value, for example --set lr=3e-4")
        if key not in Hyper.model_fields:
            raise UserError(f"--set {setting}: there is no hyper-parameter '{key}'", nearest(key, Hyper.model_fields, "keys"))
        fields[key] = value
    try:
        return Hyper.model_validate(fields).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise UserError(f"--set {key}={fields[key]}: {first['msg']}", "give another value") from None


def _check(plan: TrainPlan) -> None:
    if (plan.dataset is None) == (not plan.text):
        raise UserError("give either --dataset or --text", "a dataset's name, or the path of a text")
    if plan.batch % plan.micro_batches:
        raise UserError(f"a batch of {plan.batch} rows cannot be cut into {plan.micro_batches} equal micro-batches", "use a divisor")
    if plan.session is not None:
        check_id(plan.session, "session")
    if plan.local is not None and plan.pnodes > plan.local:
        raise UserError(f"--pnodes {plan.pnodes} is more than the {plan.local} agents of --local", "start more agents or use fewer")
    if plan.local is None and plan.backend != "auto":
        raise UserError(f"--backend {plan.backend} is for the agents of --local", "the agents of a cluster chose theirs when they started")


async def _dataset(plan: TrainPlan, source: Source) -> str:
    if plan.dataset is not None:
        if plan.local is not None:
            # raises; a cluster that runs has a data directory and a storage of its own
            await asyncio.to_thread(Dataset.open, plan.data_dir, plan.dataset, chosen(None, plan.data_dir))
        return plan.dataset
    return await prepare_text(plan.data_dir, plan.text, source.graph)


async def _train(
    plan: TrainPlan, cluster: Cluster, source: Source, dataset: str, hyper: dict[str, Any], name: SessionId, writers: Writers
) -> None:
    network = NetworkFile(source.text, source.file_name) if is_file(plan.network) else plan.network
    options = TrainOptions(
        batch=plan.batch, micro_batches=plan.micro_batches, seed=plan.seed, hyper=hyper, fuse=not plan.no_fuse, pnodes=plan.pnodes
    )
    session = await cluster.train(network, dataset, plan.steps, name, **options)
    with choose_view(plan.steps, plan.as_json) as view:
        try:
            await follow(session, view, writers)
        except asyncio.CancelledError:
            await _leave(plan, session, view, writers)
            raise


async def _leave(plan: TrainPlan, session: Session, view: View, writers: Writers) -> None:
    """After Ctrl-C."""
    name = session.name
    if plan.local is None:
        view.note(f"session {name} goes on; see it again with: dcnr session watch {name}")
        return
    suspending = asyncio.ensure_future(_suspend(session, view, writers))
    await asyncio.wait({suspending}, timeout=SUSPEND_PATIENCE)
    if not suspending.done():
        suspending.cancel()
        view.note(f"session {name} could not be saved in time; its last checkpoint counts")
    view.note(f"go on with: dcnr up --agents {plan.local} --data-dir {plan.data_dir}")
    view.note(f"      then: dcnr session resume {name} && dcnr session watch {name}")


async def _suspend(session: Session, view: View, writers: Writers) -> None:
    try:
        await session.suspend(view.note)
        await follow(session, view, writers)
    except DcnrError as error:  # the run ended by itself, or went wrong meanwhile
        view.note(str(error))
