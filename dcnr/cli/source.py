"""Where a network comes from: a file, read here, or a name that the orchestrator knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dcnr.bus.api import call
from dcnr.bus.base import Bus
from dcnr.errors import NotFound, UserError
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


def is_file(name: str) -> bool:
    """Whether `name` means a file rather than a registered network, whose names hold neither dots nor slashes."""
    return "." in name or "/" in name


def read_source(name: str) -> Source:
    """Read a network file."""
    try:
        return Source(Path(name).read_text(encoding="utf-8"), name)
    except FileNotFoundError:
        raise NotFound(f"there is no network file '{name}'", "check the path; the shipped ones lie in networks/") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: invalid UTF-8 at byte {error.start}", "a network file is YAML text") from None
    except IsADirectoryError:
        raise UserError(f"'{name}' is a folder", "name one network file in it") from None


async def fetch_source(bus: Bus, name: str) -> Source:
    """Ask the orchestrator for a registered network."""
    shown = await call(bus, "network.show", name=name)
    return Source(shown["file"], shown["file_name"])


def shipped(file_name: str) -> Path:
    """A network file that comes with the package, installed or checked out."""
    package = Path(__file__).parent.parent
    found = next((path for folder in (package, package.parent) if (path := folder / "networks" / file_name).is_file()), None)
    if found is None:
        raise NotFound(f"the network file {file_name} that belongs to this program is missing", "install it again")
    return found
