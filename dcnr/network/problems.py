"""How what is wrong with a file is collected and worded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcnr.errors import NetworkFileError, Problem
from dcnr.network.spec import Place

MAX_NAMES = 24
"""Known names in a remedy; a longer list would not help."""

MAX_LENGTH = 500
MAX_PROBLEMS = 200


@dataclass(slots=True)
class Problems:
    """Everything found so far. A message is a clause without full stop, a remedy a sentence."""

    found: list[Problem] = field(default_factory=list)

    def say(self, place: Place, node: str | None, message: str, remedy: str) -> None:
        """Add one problem. Raises `NetworkFileError` when there are so many that nobody would read on."""
        if len(message) > MAX_LENGTH:
            message = f"{message[:MAX_LENGTH]}…"
        self.found.append(Problem(place.file, place.line, place.column, node, message, remedy))
        if len(self.found) == MAX_PROBLEMS:
            self.found.append(Problem(place.file, 0, 0, None, f"there are more than {MAX_PROBLEMS} problems", "Mend these first."))
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise `NetworkFileError` with all of them in the order of the file, if there are any."""
        if self.found:
            raise NetworkFileError(sorted(self.found, key=lambda problem: (problem.line, problem.column)))


def nearest(word: str, known: Iterable[str], what: str) -> str:
    """The remedy for an unknown `word`: the nearest of `known`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known {what}: {', '.join(names[:MAX_NAMES])}{', …' if len(names) > MAX_NAMES else ''}."
