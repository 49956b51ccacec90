"""`dcnr pnode`: the processes that host VNodes."""

from __future__ import annotations

from dataclasses import asdict

import click

from dcnr.cli.client import ask
from dcnr.cli.output import Group, example, json_option, show_json, show_record, show_table

COLUMNS = ("pnode", "state", "backend", "device", "cores", "memory_used", "memory_total", "vnodes", "sessions", "reason")
LINK_COLUMNS = ("peer", "lane", "mb_per_s")
MEMORY_COLUMNS = ("session", "vnode", "type", "parameter_bytes", "optimizer_bytes", "activation_bytes", "recompute_bytes")


@click.group(cls=Group, epilog=example("dcnr pnode list"))
def pnode() -> None:
    """The processes that host VNodes."""


@pnode.command("list", epilog=example("dcnr pnode list", "dcnr pnode list --json"))
@json_option
def list_(as_json: bool) -> None:
    """Every PNode that the cluster knows, and how it is."""
    show_table("pnodes", [asdict(one) for one in ask(lambda cluster: cluster.pnodes())], COLUMNS, as_json)


@pnode.command(epilog=example("dcnr pnode show agent-1"))
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """One PNode and its VNodes, with the memory that each takes, and how large tensors go to its peers."""
    fields = asdict(ask(lambda cluster: cluster.pnode(name)))
    if as_json:
        show_json(fields)
        return
    taken, links = fields.pop("memory"), fields.pop("links")
    show_record(fields, as_json)
    if links:
        click.echo()
        show_table("links", links, LINK_COLUMNS, as_json)
    if taken:
        click.echo()
        show_table("vnodes", taken, MEMORY_COLUMNS, as_json)


@pnode.command(epilog=example("dcnr pnode drain agent-1"))
@click.argument("name")
@json_option
def drain(name: str, as_json: bool) -> None:
    """Move everything off a PNode, so that it can be stopped."""
    show_record(asdict(ask(lambda cluster: cluster.drain(name))), as_json)
