"""`docs/FAILURES.md` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "FAILURES.md"
NAMED = sorted(set(re.findall(r"`([a-z_0-9/]+\.py)::(\w+)`", DOCUMENT.read_text())))


def test_every_row_names_a_test() -> None:
    """The last column is never empty."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|") and line.count("|") == 6]
    faults = [row for row in rows if not row.startswith(("| fault |", "|---"))]
    assert len(faults) > 30
    assert [row for row in faults if "::test_" not in row.split("|")[5]] == []


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str) -> None:
    """Under that name, in that file."""
    assert re.search(rf"^\s*(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"tests/{file} has no {name}"
