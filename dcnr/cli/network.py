"""`dcnr network`: check, register, clone, analyze and draw networks.

Rule 1: validate, analyze and draw take a file with nothing running, or a registered name.
Rule 2: nothing partial is ever registered: a file is checked here, with all its problems, before the orchestrator sees it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dcnr.cli.client import ask
from dcnr.cli.output import Group, example, json_option, show_json, show_record, show_table
from dcnr.cli.source import Source, fetch_source, read_source
from dcnr.client.cluster import NetworkFile, is_file
from dcnr.ids import NetworkId, PNodeId, check_id
from dcnr.network.draw import FORMATS, draw
from dcnr.network.graph import Graph
from dcnr.network.rename import renamed
from dcnr.passes import prepare
from dcnr.placement.analyze import Analysis, analyze
from dcnr.placement.explain import explain
from dcnr.placement.place import Host, place

NODE_COLUMNS = ("node", "type", "output_shapes", "parameters", "flops", "activation_bytes", "pnode")
EDGE_COLUMNS = ("edge", "readers", "sender", "receiver", "forward_bytes", "backward_bytes")
ROOM = 1 << 50
"""Bytes of an imagined PNode: analysis asks what a network needs, not what is there."""


@click.group(cls=Group, epilog=example("dcnr network validate networks/tiny.yml"))
def network() -> None:
    """Networks: files, and what the cluster knows."""


@network.command(epilog=example("dcnr network validate networks/tiny.yml", "dcnr network validate networks/tiny.yml --json"))
@click.argument("source", metavar="FILE.yml|NAME")
@json_option
def validate(source: str, as_json: bool) -> None:
    """Check a network; every problem at once, each with its line and what to do."""
    graph = find_source(source).graph
    show_record({"name": graph.name, "vnodes": len(graph.nodes), "parameters": analyze(graph, rows=1).parameters}, as_json)


@network.command(epilog=example("dcnr network create networks/tiny.yml"))
@click.argument("file", metavar="FILE.yml")
@json_option
def create(file: str, as_json: bool) -> None:
    """Register a new network."""
    _register(file, replace=False, as_json=as_json)


@network.command(epilog=example("dcnr network update networks/tiny.yml"))
@click.argument("file", metavar="FILE.yml")
@json_option
def update(file: str, as_json: bool) -> None:
    """Register a network in place of an older one of its name."""
    _register(file, replace=True, as_json=as_json)


@network.command(epilog=example("dcnr network clone tiny tiny-2"))
@click.argument("source", metavar="FILE.yml|NAME")
@click.argument("name", metavar="NEW")
@json_option
def clone(source: str, name: str, as_json: bool) -> None:
    """Register a network once more under the name NEW; its text is kept but for the name."""
    new = NetworkId(check_id(name, "network"))
    copy = NetworkFile(renamed(find_source(source).text, new), f"{new}.yml")
    show_record(asdict(ask(lambda cluster: cluster.register(copy))), as_json)


@network.command("list", epilog=example("dcnr network list"))
@json_option
def list_(as_json: bool) -> None:
    """Every registered network."""
    rows = [asdict(one) for one in ask(lambda cluster: cluster.networks())]
    show_table("networks", rows, ("name", "vnodes", "parameters", "revision"), as_json)


@network.command(epilog=example("dcnr network show tiny"))
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """One registered network, with its file."""
    fields = asdict(ask(lambda cluster: cluster.network(name)))
    if as_json:
        show_json(fields)
        return
    show_record({key: value for key, value in fields.items() if key != "file"}, as_json)
    click.echo(f"\n{fields['file'].rstrip()}")


@network.command(epilog=example("dcnr network delete tiny"))
@click.argument("name")
@json_option
def delete(name: str, as_json: bool) -> None:
    """Forget a registered network that no session uses."""
    ask(lambda cluster: cluster.delete_network(name))
    show_record({"name": name}, as_json)


@network.command("analyze", epilog=example("dcnr network analyze networks/topology_1.yml --pnodes 3 --batch 4 --explain"))
@click.argument("source", metavar="FILE.yml|NAME")
@click.option("--pnodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Machines to imagine.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows in flight.")
@click.option("--explain", "why", is_flag=True, help="Say why each part would be where it is.")
@json_option
def analyze_(source: str, pnodes: int, batch: int, why: bool, as_json: bool) -> None:
    """Shapes, parameters (tied ones once), FLOPs, memory, and the bytes on every edge that would cross machines."""
    graph = find_source(source).graph
    hosts = [Host(PNodeId(f"pnode-{index + 1}"), ROOM, 1) for index in range(pnodes)]
    found = analyze(graph, batch, hosts)
    reasons = _reasons(graph, hosts, batch) if why else ()
    if as_json:
        show_json(_fields(found) | ({"explain": reasons} if why else {}))
        return
    _show(found)
    for reason in reasons:
        click.echo(reason)


@network.command(
    "draw", epilog=example("dcnr network draw networks/tiny.yml", "dcnr network draw networks/tiny.yml --format svg --out tiny.svg")
)
@click.argument("source", metavar="FILE.yml|NAME")
@click.option("--format", "form", type=click.Choice(FORMATS), default="mermaid", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A file instead of stdout.")
@json_option
def draw_(source: str, form: str, out: Path | None, as_json: bool) -> None:
    """Draw a network."""
    graph = find_source(source).graph
    picture = draw(graph, form)
    if out is not None:
        out.write_text(picture, encoding="utf-8")
        show_record({"name": graph.name, "format": form, "out": str(out)}, as_json)
    elif as_json:
        show_json({"name": graph.name, "format": form, "picture": picture})
    else:
        click.echo(picture)


def find_source(source: str) -> Source:
    """A file, read here, or a registered network."""
    return read_source(source) if is_file(source) else ask(lambda cluster: fetch_source(cluster, source))


def _register(file: str, replace: bool, as_json: bool) -> None:
    source = read_source(file)
    _ = source.graph  # raises with all problems
    file_of_it = NetworkFile(source.text, source.file_name)
    show_record(asdict(ask(lambda cluster: cluster.register(file_of_it, replace))), as_json)


def _reasons(graph: Graph, hosts: list[Host], batch: int) -> tuple[str, ...]:
    prepared = prepare(graph, fuse=True)
    return explain(prepared, hosts, batch, place(prepared, hosts, batch))


def _fields(found: Analysis) -> dict[str, Any]:
    """As the analysis has them, with the crossings as rows of a table."""
    fields = asdict(found)
    fields = {"name": fields.pop("network"), **fields}
    fields["crossings"] = [
        {
            "edge": f"{crossing.port.node}[{crossing.port.slot}]",
            "readers": [f"{reader.node}[{reader.slot}]" for reader in crossing.readers],
            "sender": crossing.sender,
            "receiver": crossing.receiver,
            "forward_bytes": crossing.forward_bytes,
            "backward_bytes": crossing.backward_bytes,
        }
        for crossing in found.crossings
    ]
    return fields


def _show(found: Analysis) -> None:
    fields = _fields(found)
    show_table("nodes", fields.pop("nodes"), NODE_COLUMNS, as_json=False)
    click.echo("\nacross machines")
    show_table("crossings", fields.pop("crossings"), EDGE_COLUMNS, as_json=False)
    click.echo()
    show_record(fields, as_json=False)
