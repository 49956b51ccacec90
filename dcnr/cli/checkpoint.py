"""`dcnr checkpoint`: list, verify, prune and export checkpoints, by default those of the data directory. Nothing needs to run.

`prune` never touches the newest checkpoint that verifies, nor one that a running session could go back to: it asks the orchestrator, if
one answers, which the session goes back to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dcnr.bus.api import call
from dcnr.cli.client import run
from dcnr.cli.output import Group, data_dir_option, example, json_option, progress, show_record, show_table
from dcnr.client.connect import connection
from dcnr.config import from_environment
from dcnr.errors import BusUnavailable, NotFound
from dcnr.ids import SessionId
from dcnr.optim.hyper import Hyper
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import (
    DAMAGED,
    MOMENTS,
    Manifest,
    Removal,
    export_safetensors,
    find_manifests,
    manifest_keys,
    newest_complete,
    prune,
    read_manifest_at,
    removable,
    step_of,
    verify_checkpoint,
)

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify, prune and export checkpoints."""


def storage_options(command: F) -> F:
    """Add `--storage` and `--data-dir` as the arguments `storage` and `data_dir`."""
    about = "URL of the checkpoints: file:///path or s3://bucket/path (default: $DCNR_STORAGE or the data directory)."
    return click.option("--storage", help=about)(data_dir_option(command))


def chosen(storage: str | None, data_dir: Path) -> Storage:
    """The storage that these options name."""
    return open_storage(from_environment(data_dir, storage=storage).storage)


@checkpoint.command("list", epilog=example("dcnr checkpoint list", "dcnr checkpoint list run1 --storage s3://bucket/prefix"))
@click.argument("session", required=False)
@storage_options
@json_option
def list_(session: str | None, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """List the checkpoints of all sessions, or of SESSION."""
    rows = run(_list(chosen(storage, data_dir), SessionId(session) if session is not None else None))
    show_table("checkpoints", rows, ("session", "step", "network", "dataset", "tensors", "bytes", "created", "problem"), as_json)


async def _list(storage: Storage, session: SessionId | None) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for key in await manifest_keys(storage, session):
        try:
            rows.append(_fields(await read_manifest_at(storage, key)))
        except DAMAGED as error:
            rows.append({"session": key.split("/")[1], "step": step_of(key), "key": key, "problem": error.message})
    return rows


@checkpoint.command(epilog=example("dcnr checkpoint verify run1", "dcnr checkpoint verify run1 --step 400"))
@click.argument("session")
@click.option("--step", type=click.IntRange(0), help="Only this one.")
@storage_options
@json_option
def verify(session: str, step: int | None, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Read checkpoints of SESSION back, all of each, and say what is wrong. Exit code 1 if one is damaged."""
    rows = run(_verify(chosen(storage, data_dir), SessionId(session), step))
    show_table("checkpoints", rows, ("session", "step", "state", "problems"), as_json)
    if any(row["problems"] for row in rows):
        raise click.exceptions.Exit(1)


async def _verify(storage: Storage, session: SessionId, step: int | None) -> list[dict[str, object]]:
    keys = await find_manifests(storage, session, step)
    rows: list[dict[str, object]] = []
    with progress("verifying") as show:
        for done, key in enumerate(keys):
            show(done, len(keys))
            try:
                problems = await verify_checkpoint(storage, await read_manifest_at(storage, key))
            except DAMAGED as error:
                problems = [error.message]
            state = "damaged" if problems else "ok"
            rows.append({"session": session, "step": step_of(key), "state": state, "problems": problems, "key": key})
        show(len(keys), len(keys))
    return rows


@checkpoint.command("prune", epilog=example("dcnr checkpoint prune run1 --keep-last 3 --keep-every 1000 --dry-run"))
@click.argument("session")
@click.option("--keep-last", type=click.IntRange(1), required=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(0), default=0, help="Those of steps that are multiples of this stay too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@storage_options
@json_option
def prune_(session: str, keep_last: int, keep_every: int, dry_run: bool, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Remove checkpoints of SESSION, and what was left of unfinished ones. The newest that can be read stays."""
    rule = Hyper(keep_last=keep_last, keep_every=keep_every)
    kept, removal = run(_prune(chosen(storage, data_dir), SessionId(session), rule, dry_run))
    fields = {"session": session, "kept": kept, "removed": list(removal.steps), "blobs": len(removal.keys), "bytes": removal.bytes}
    show_record(fields | {"dry_run": dry_run}, as_json)


async def _prune(storage: Storage, session: SessionId, rule: Hyper, dry_run: bool) -> tuple[list[int], Removal]:
    newest = await newest_complete(storage, session)
    goes_back_to = await _goes_back_to(session)
    steps = [step_of(key) for key in await manifest_keys(storage, session)]
    held = {step for step in steps if step >= goes_back_to} if goes_back_to is not None else set[int]()
    keep = rule.keeps([step for step in steps if step <= newest.step]) | held
    removal = await (removable if dry_run else prune)(storage, session, keep, newest)
    return [step for step in steps if step not in removal.steps], removal


async def _goes_back_to(session: SessionId) -> int | None:
    """The step that an orchestrator would take the session back to; None if none answers, or none knows it."""
    try:
        async with connection() as bus:
            shown = await call(bus, "session.show", session=session)
    except (BusUnavailable, NotFound):
        return None
    return max(shown["checkpoints"], default=None)


@checkpoint.command(epilog=example("dcnr checkpoint export run1 --step 0 --out run1.safetensors"))
@click.argument("session")
@click.option("--step", type=click.IntRange(0), help="The newest if not given; 0 is before training.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The .safetensors file to write.")
@storage_options
@json_option
def export(session: str, step: int | None, out: Path, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Write the weights of a checkpoint as `<node_id>.<parameter>`, as in the network file, whatever was fused or where it ran."""
    manifest = run(export_safetensors(chosen(storage, data_dir), SessionId(session), step, out))
    weights = sum(not name.endswith(MOMENTS) for name in manifest.tensors)
    show_record({"out": str(out), "session": manifest.session, "step": manifest.step, "tensors": weights}, as_json)


def _fields(manifest: Manifest) -> dict[str, object]:
    return {
        "session": manifest.session,
        "step": manifest.step,
        "total_steps": manifest.total_steps,
        "network": manifest.network,
        "dataset": manifest.dataset,
        "seed": manifest.seed,
        "tensors": len(manifest.tensors),
        "parts": len(manifest.parts),
        "bytes": sum(part.bytes for part in manifest.parts),
        "created": manifest.created,
        "key": manifest.key,
        "problem": "",
    }
