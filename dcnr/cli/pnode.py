"""`dcnr pnode`: the processes that host VNodes."""

from __future__ import annotations

import click

from dcnr.cli.client import ask
from dcnr.cli.output import Group, example, json_option, show_record, show_table

COLUMNS = ("pnode", "state", "backend", "device", "cores", "memory_used", "memory_total", "vnodes", "sessions", "reason")


@click.group(cls=Group, epilog=example("dcnr pnode list"))
def pnode() -> None:
    """The processes that host VNodes."""


@pnode.command("list", epilog=example("dcnr pnode list", "dcnr pnode list --json"))
@json_option
def list_(as_json: bool) -> None:
    """Every PNode that the cluster knows, and how it is."""
    show_table("pnodes", ask("pnode.list")["pnodes"], COLUMNS, as_json)


@pnode.command(epilog=example("dcnr pnode show agent-1"))
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """One PNode and its VNodes."""
    show_record(ask("pnode.show", pnode=name), as_json)


@pnode.command(epilog=example("dcnr pnode drain agent-1"))
@click.argument("name")
@json_option
def drain(name: str, as_json: bool) -> None:
    """Move everything off a PNode, so that it can be stopped."""
    show_record(ask("pnode.drain", pnode=name), as_json)
