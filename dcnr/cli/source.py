"""Where a network comes from: a file, read here, or a name that the orchestrator knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dcnr.client.cluster import Cluster, read_network
from dcnr.errors import NotFound
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph


@dataclass(frozen=True)
class Source:
    """The text of a network and what to call it in errors."""

    text: str
    file_name: str

    @cached_property
    def graph(self) -> Graph:
        """The checked graph; raises `NetworkFileError` with all problems."""
        return load_graph(self.text, self.file_name)


def read_source(name: str) -> Source:
    """Read a network file."""
    file = read_network(name)
    return Source(file.text, file.name)


async def fetch_source(cluster: Cluster, name: str) -> Source:
    """Ask the cluster for a registered network."""
    shown = await cluster.network(name)
    return Source(shown.file, shown.file_name)


def shipped(file_name: str) -> Path:
    """A network file that comes with the package, installed or checked out."""
    package = Path(__file__).parent.parent
    found = next((path for folder in (package, package.parent) if (path := folder / "networks" / file_name).is_file()), None)
    if found is None:
        raise NotFound(f"the network file {file_name} that belongs to this program is missing", "install it again")
    return found
