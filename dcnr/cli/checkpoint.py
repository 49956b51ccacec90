"""`dcnr checkpoint`: list, verify, prune, export and import checkpoints, and see what their networks give, by default those of the data
directory. Nothing needs to run, but for `import`: it writes to the storage that the orchestrator says it uses, and then has that take what
is there as a session.

`prune` never touches the newest checkpoint that verifies, nor that of the best validation, nor one that a running session could go back to:
it asks the orchestrator, if one answers, which these are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dcnr.bus.api import call
from dcnr.cli.client import run, session_and_step
from dcnr.cli.output import Group, data_dir_option, example, json_option, progress, show_record, show_table
from dcnr.client.connect import connection
from dcnr.config import from_environment
from dcnr.errors import AlreadyExists, BusUnavailable, NotFound, UserError
from dcnr.ids import SessionId, check_id
from dcnr.metrics.history import Validations
from dcnr.optim.hyper import Hyper
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import (
    DAMAGED,
    Manifest,
    Removal,
    delete_checkpoints,
    find_manifests,
    manifest_keys,
    newest_complete,
    prune,
    read_manifest_at,
    removable,
    step_of,
    verify_checkpoint,
)
from dcnr.storage.file import write_file

if TYPE_CHECKING:
    from dcnr.data.split import Split
    from dcnr.storage.export import Folder

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify, prune, export and import checkpoints, and see what they give."""


def storage_options(command: F) -> F:
    """Add `--storage` and `--data-dir` as the arguments `storage` and `data_dir`."""
    about = "URL of the storage: file:///path or s3://bucket/path (default: $DCNR_STORAGE or the data directory)."
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
    """Remove checkpoints of SESSION, and what was left of unfinished ones. The newest stays, and the best one.

    The newest is that which can be read, the best that of the validation with the smallest loss.
    """
    rule = Hyper(keep_last=keep_last, keep_every=keep_every)
    kept, removal = run(_prune(chosen(storage, data_dir), data_dir, SessionId(session), rule, dry_run))
    fields = {"session": session, "kept": kept, "removed": list(removal.steps), "blobs": len(removal.keys), "bytes": removal.bytes}
    show_record(fields | {"dry_run": dry_run}, as_json)


async def _prune(storage: Storage, data_dir: Path, session: SessionId, rule: Hyper, dry_run: bool) -> tuple[list[int], Removal]:
    newest = await newest_complete(storage, session)
    steps = [step_of(key) for key in await manifest_keys(storage, session)]
    keep = rule.keeps([step for step in steps if step <= newest.step]) | await _needed(session, data_dir, steps)
    removal = await (removable if dry_run else prune)(storage, session, keep, newest)
    return [step for step in steps if step not in removal.steps], removal


async def _needed(session: SessionId, data_dir: Path, steps: list[int]) -> set[int]:
    """Of `steps` that of the best validation, and those from the one on that an orchestrator would take the session back to.

    Where no orchestrator answers, or none knows the session, the log in `data_dir` says which validation was the best.
    """
    try:
        async with connection() as bus:
            shown = await call(bus, "session.show", session=session)
    except (BusUnavailable, NotFound):
        logged = [one.step for one in Validations(data_dir).rows(session) if one.best and one.step in steps]
        return set(logged[-1:])
    goes_back_to = max(shown["checkpoints"], default=None)
    held = {step for step in steps if goes_back_to is not None and step >= goes_back_to}
    best = (shown["best"]["step"] if shown["best"] else None, shown["kept"])
    return held.union(step for step in steps if step in best)


@checkpoint.command(epilog=example("dcnr checkpoint export run1 run1-model", "dcnr checkpoint export run1@400 run1-at-400"))
@click.argument("source", metavar="SESSION[@STEP]")
@click.argument("folder", type=click.Path(path_type=Path))
@storage_options
@json_option
def export(source: str, folder: Path, storage: str | None, data_dir: Path, as_json: bool) -> None:
    """Write the network of a checkpoint, by default the newest, into FOLDER: weights, YAML and tokenizer, for other tools and clusters.

    The weights are one safetensors file under the names of the network file, whatever was fused or where it ran (docs/EXPORT.md).
    """
    from dcnr.storage.export import DESCRIPTION, TOKENIZER, export_folder  # half a second: networks are read for it

    session, step = session_and_step(source)
    description, missing = run(export_folder(chosen(storage, data_dir), data_dir, session, step, folder))
    if missing:
        click.echo(f"without {TOKENIZER}: {missing}", err=True)
    fields = {"session": session, "step": description.step, "network": description.network}
    show_record({"folder": str(folder), **fields, "files": [*description.files, DESCRIPTION]}, as_json)


@checkpoint.command(
    epilog=example("dcnr checkpoint outputs run1 out.safetensors", "dcnr checkpoint outputs run1@400 out.safetensors --rows 8")
)
@click.argument("source", metavar="SESSION[@STEP]")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--name", "names", multiple=True, help="An output that the network file declares; may be repeated (default: all of them).")
@click.option("--split", type=click.Choice(["train", "validation"]), default="validation", show_default=True, help="Of its dataset.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The window to begin with.")
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="How many windows.")
@click.option("--backend", type=click.Choice(["numpy", "cpu", "cupy"]), default="cpu", show_default=True, help="What computes them.")
@storage_options
@json_option
def outputs(
    source: str, file: Path, names: tuple[str, ...], split: Split, first: int, rows: int, backend: str, storage: str | None,
    data_dir: Path, as_json: bool,
) -> None:  # fmt: skip
    """Compute the declared outputs of a checkpoint, by default the newest, over windows of its dataset, and write them into FILE.

    That is done here, in one process, without dropout. FILE is a safetensors file with an array for each output, float32, rows first, and
    the windows as `ids`. Behind the end of the split these are -1, and what the network makes of them means nothing.
    """
    from safetensors.numpy import save

    from dcnr.cli.shown import Windows, outputs_of  # networks and backends are loaded for it

    session, step = session_and_step(source)
    where = chosen(storage, data_dir), data_dir
    found = run(outputs_of(where, (session, step), names, Windows(split, first, rows), backend))
    write_file(file.absolute(), save(found))
    shapes = {name: list(array.shape) for name, array in found.items()}
    show_record({"file": str(file), "session": session, "shapes": shapes}, as_json)


@checkpoint.command("import", epilog=example("dcnr checkpoint import run1-model --session mine", "dcnr session resume mine --steps 2000"))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--session", required=True, help="Name of the session that it becomes.")
@click.option("--dataset", help="What it trains on from now on (default: the dataset of that name where it was exported, if there is one).")
@json_option
def import_(folder: Path, session: str, dataset: str | None, as_json: bool) -> None:
    """Make a session of an exported FOLDER, in the storage of the cluster. It is suspended, and can be resumed with fresh moments."""
    from dcnr.storage.export import read_folder

    name = SessionId(check_id(session, "session"))
    show_record(run(_import(read_folder(folder), name, dataset)), as_json)


async def _import(folder: Folder, session: SessionId, dataset: str | None) -> dict[str, object]:
    from dcnr.storage.export import import_folder

    async with connection() as bus:
        taken = [row["session"] for row in (await call(bus, "session.list"))["sessions"]]
        if session in taken:
            raise AlreadyExists(f"session '{session}' exists", "choose another name, or delete that session")
        storage = open_storage((await call(bus, "cluster.info"))["storage"])
        await import_folder(storage, folder, session, dataset)
        try:
            return await call(bus, "session.import", session=session, **({} if dataset is None else {"dataset": dataset}))
        except AlreadyExists:  # made meanwhile, and what is in storage may be its own
            raise
        except UserError:
            await delete_checkpoints(storage, session)
            raise


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
