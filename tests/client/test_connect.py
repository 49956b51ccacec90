"""The way in: what `import dcnr` costs, and what it says where nobody is. tests/cli/test_api_examples.py goes in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dcnr
from dcnr.errors import BusUnavailable

ROOT = Path(__file__).parents[2]


def test_importing_costs_nothing() -> None:
    """Nothing but the package itself, until a name is used; then all of them are there, and `dir` and typos behave."""
    code = "import dcnr, sys; print([name for name in sys.modules if name.startswith('dcnr.') or name in ('numpy', 'pydantic', 'nats')])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
    assert [name for name in dcnr.__all__ if getattr(dcnr, name).__name__ != name] == []
    assert set(dcnr.__all__) <= set(dir(dcnr))
    with pytest.raises(AttributeError, match="no attribute 'connct'"):
        _ = dcnr.connct  # type: ignore[attr-defined]  # which is the other half of this test


def test_what_type_checkers_see_is_what_is_there() -> None:
    """The two lists of public names agree."""
    tree = ast.parse((ROOT / "dcnr" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: home for home, names in dcnr._HOMES.items() for name in names}
    assert sorted(seen) == dcnr.__all__


def test_type_checkers_take_the_types_of_the_package() -> None:
    """The marker of PEP 561."""
    assert (ROOT / "dcnr" / "py.typed").exists()


async def test_no_server_is_an_error_that_says_so() -> None:
    """With the address."""
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        async with dcnr.connect("nats://127.0.0.1:1"):
            pass
