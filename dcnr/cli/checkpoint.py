"""`dcnr checkpoint`: list and export the checkpoints of a data directory. Nothing needs to run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from dcnr.cli.output import Group, data_dir_option, example, json_option, show_record, show_table
from dcnr.ids import SessionId
from dcnr.storage.checkpoint import MOMENTS, Manifest, export_safetensors, list_checkpoints
from dcnr.storage.file import FileStorage


@click.group(cls=Group)
def checkpoint() -> None:
    """List and export checkpoints."""


@checkpoint.command("list", epilog=example("dcnr checkpoint list", "dcnr checkpoint list run1"))
@click.argument("session", required=False)
@data_dir_option
@json_option
def list_(session: str | None, data_dir: Path, as_json: bool) -> None:
    """List the checkpoints of all sessions, or of SESSION."""
    chosen = SessionId(session) if session is not None else None
    found = asyncio.run(list_checkpoints(FileStorage(data_dir), chosen))
    columns = ("session", "step", "network", "dataset", "tensors", "bytes", "created")
    show_table("checkpoints", [_fields(manifest) for manifest in found], columns, as_json)


@checkpoint.command(epilog=example("dcnr checkpoint export run1 --step 0 --out run1.safetensors"))
@click.argument("session")
@click.option("--step", type=click.IntRange(0), help="The newest if not given; 0 is before training.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The .safetensors file to write.")
@data_dir_option
@json_option
def export(session: str, step: int | None, out: Path, data_dir: Path, as_json: bool) -> None:
    """Write the weights of a checkpoint as `<node_id>.<parameter>`, as in the network file, whatever was fused or where it ran."""
    manifest = asyncio.run(export_safetensors(FileStorage(data_dir), SessionId(session), step, out))
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
    }
