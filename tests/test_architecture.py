"""The rules of the house that a machine can check, by reading the source and running none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "dcnr"
TESTS = ROOT / "tests"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 7

LAYERS = (
    {"cli", "dashboard"},
    {"client"},
    {"orchestrator", "agents"},
    {"metrics", "storage", "data"},
    {"placement"},
    {"passes"},
    {"network", "bus"},
    {"optim"},
    {"nodes"},
    {"backends", "text"},
    {"errors", "ids", "clock", "config", "log", "machine", "signals"},
)
"""Each part may import its own layer and those below. Neighbours that must not see each other are in `STRANGERS`."""

STRANGERS = ({"orchestrator", "agents"}, {"cli", "dashboard"}, {"network", "bus"}, {"backends", "text"})

CLIENT_MAY_IMPORT = {"client", "bus", "config", "errors", "ids"}
"""What talks to a cluster from outside needs none of its insides."""

PURE = (
    "network/*.py",
    "passes/*.py",
    "placement/*.py",
    "nodes/*.py",
    "optim/*.py",
    "bus/subjects.py",
    "bus/messages.py",
    "bus/codec.py",
    "bus/chunks.py",
    "bus/credit.py",
    "bus/pace.py",
    "bus/wire.py",
    "bus/lanes/handshake.py",
    "agents/events.py",
    "agents/commands.py",
    "agents/vnode.py",
    "agents/pnode.py",
    "agents/reading.py",
    "agents/segment.py",
    "agents/evaluation.py",
    "agents/routing.py",
    "orchestrator/events.py",
    "orchestrator/commands.py",
    "orchestrator/cluster.py",
    "orchestrator/fleet.py",
    "orchestrator/session.py",
    "orchestrator/reading.py",
    "orchestrator/readings.py",
    "orchestrator/sampling.py",
    "orchestrator/source.py",
    "orchestrator/deployment.py",
    "orchestrator/doubts.py",
    "orchestrator/checkpoints.py",
    "orchestrator/watchdog.py",
    "orchestrator/failover.py",
    "orchestrator/layout.py",
    "orchestrator/trainer.py",
    "orchestrator/validation.py",
    "orchestrator/feed.py",
    "orchestrator/state.py",
    "data/batches.py",
    "metrics/fold.py",
    "metrics/peak.py",
    "client/rows.py",
    "client/answers.py",
    "text/answer.py",
)
IMPURE_IMPORTS = {
    "asyncio", "concurrent", "ctypes", "datetime", "io", "logging", "multiprocessing", "nats", "os", "pathlib", "random", "secrets",
    "shutil", "signal", "socket", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"open", "input", "print"}

UNMIRRORED = {
    "errors.py": "declarations only",
    "ids.py": "a regular expression, held by every test of a name",
    "backends/base.py": "the Protocol; its contract is tested by every backend",
    "bus/base.py": "the Protocol; its contract is tested by bus/memory and bus/nats",
    "bus/messages.py": "declarations; tests/bus/test_codec.py sends every one",
    "storage/base.py": "the Protocol; its contract is tested by every storage",
    "nodes/base.py": "declarations and one product",
    "nodes/spec.py": "declarations",
    "network/spec.py": "declarations",
    "client/answers.py": "declarations, which tests/client/test_cluster.py reads from a real orchestrator",
}
DECLARATIONS = {"__init__.py", "events.py", "commands.py"}
"""File names that hold no logic wherever they stand; `__init__` is checked by hand for being empty or a table."""

VOCABULARIES = ("bus/messages.py", "agents/events.py", "agents/commands.py", "orchestrator/events.py", "orchestrator/commands.py")


def sources(*patterns: str) -> list[Path]:
    """The files of the package that match, sorted."""
    return sorted(path for pattern in patterns for path in SOURCE.glob(pattern))


def name_of(path: Path) -> str:
    """A path as test ids and messages show it."""
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer_of(part: str) -> int:
    """Index of a part's layer; 0 is the top."""
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def part_of(path: Path) -> str:
    """Which part of the package a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


ALL = sources("**/*.py")


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_imports_only_go_down(path: Path) -> None:
    """A part imports its own layer and lower ones, and never its stranger."""
    part = part_of(path)
    if part == "__init__":
        return
    for line, name in imports(tree_of(path)):
        parts = name.split(".")
        if parts[0] != "dcnr" or parts[1] in {"__version__", part}:
            continue
        assert layer_of(parts[1]) >= layer_of(part), f"{name_of(path)}:{line}: {part} must not import {parts[1]}"
        assert not any({part, parts[1]} <= pair for pair in STRANGERS), f"{name_of(path)}:{line}: {part} and {parts[1]} must not meet"


@pytest.mark.parametrize("path", sources("client/*.py"), ids=name_of)
def test_a_client_sees_only_the_wire(path: Path) -> None:
    """Programs that only talk to a cluster load neither a network nor a backend."""
    parts = {name.split(".")[1] for _, name in imports(tree_of(path)) if name.startswith("dcnr.")}
    assert parts <= CLIENT_MAY_IMPORT, f"{name_of(path)} imports {sorted(parts - CLIENT_MAY_IMPORT)}"


@pytest.mark.parametrize("path", sources(*PURE), ids=name_of)
def test_pure_files_touch_nothing(path: Path) -> None:
    """No coroutine, no clock, no file, no environment, no global randomness."""
    tree = tree_of(path)
    for line, name in imports(tree):
        assert name.split(".")[0] not in IMPURE_IMPORTS, f"{name_of(path)}:{line}: imports {name}"
    for node in ast.walk(tree):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{where}: a coroutine"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{where}: calls {node.func.id}"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_sizes(path: Path) -> None:
    """Files, functions and parameter lists stay small enough to read."""
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{name_of(path)} has {text.count(chr(10))} lines"
    for function in functions(ast.parse(text)):
        where = f"{name_of(path)}:{function.lineno}: {function.name}"
        assert lines_of(function) <= MAX_FUNCTION_LINES, f"{where} has {lines_of(function)} lines"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = sum(argument.arg not in {"self", "cls"} for argument in arguments)
        limit_holds = "backends" not in path.parts and not is_command(function)
        assert count <= MAX_PARAMETERS or not limit_holds, f"{where} has {count} parameters"


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether click calls it: its parameters are the options that users asked for."""
    return any(isinstance(one, ast.Call) and ast.unparse(one.func).endswith("command") for one in function.decorator_list)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_every_file_says_what_it_is(path: Path) -> None:
    """A file with code opens with a docstring."""
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree), f"{name_of(path)} does not say what it decides"


@pytest.mark.parametrize("path", sources("**/*.cu", "**/*.cuh"), ids=name_of)
def test_kernels_are_small_and_say_what_they_are(path: Path) -> None:
    """As Python files; and they include nothing but our own, since no toolkit need be there."""
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{name_of(path)} has {text.count(chr(10))} lines"
    assert text.startswith("//"), f"{name_of(path)} does not say what it is"
    for line in text.splitlines():
        if line.startswith("#include"):
            assert line.split()[1].strip('"').endswith((".cuh", "emulator.h")), f"{name_of(path)}: {line}"


@pytest.mark.parametrize("path", sources("**/*.py"), ids=name_of)
def test_only_the_device_imports_cupy(path: Path) -> None:
    """Operations see a device, so that tests can run them without a GPU."""
    borders = {SOURCE / "backends" / "cupy" / name for name in ("cuda.py", "copies.py", "ipc.py", "probe.py")}
    for line, name in imports(tree_of(path)):
        assert path in borders or name.split(".")[0] != "cupy", f"{name_of(path)}:{line}: imports {name}"


def test_sources_and_tests_mirror_each_other() -> None:
    """`dcnr/x/y.py` is tested by `tests/x/test_y.py`; what only a GPU can run by `tests/gpu/test_y.py`."""
    missing = []
    for path in ALL:
        inner = path.relative_to(SOURCE)
        if inner.name in DECLARATIONS or inner.as_posix() in UNMIRRORED:
            continue
        places = [inner.parent, *([Path("gpu")] if inner.parts[:2] == ("backends", "cupy") else [])]
        if not any((TESTS / place / f"test_{inner.name}").exists() for place in places):
            missing.append(f"tests/{inner.parent.as_posix()}/test_{inner.name}")
    assert not missing, "no tests: " + ", ".join(missing)


def test_exemptions_are_not_stale() -> None:
    """Whatever is excused above exists, and has no test file after all."""
    for inner in UNMIRRORED:
        assert (SOURCE / inner).exists(), f"{inner} is gone"
        assert not (TESTS / inner).with_name(f"test_{Path(inner).name}").exists(), f"{inner} is tested: take it off the list"


def classes_and_unions(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The dataclasses of a vocabulary, and every name in its unions (`A | B` assignments at the top)."""
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.decorator_list}
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Name):
            named |= {leaf.id for leaf in ast.walk(node.value) if isinstance(leaf, ast.Name)}
    return classes, named


def used_inside(tree: ast.Module) -> set[str]:
    """Names in the annotations of class bodies: parts of other messages."""
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [item.annotation for body in bodies for item in body if isinstance(item, ast.AnnAssign)]
    return {leaf.id for field in fields for leaf in ast.walk(field) if isinstance(leaf, ast.Name)}


@pytest.mark.parametrize("path", sources(*VOCABULARIES), ids=name_of)
def test_every_message_is_in_its_union_and_in_a_test(path: Path) -> None:
    """No event, command or message is forgotten by a `match` or by the tests."""
    tree = tree_of(path)
    classes, named = classes_and_unions(tree)
    assert classes, f"{name_of(path)} holds no dataclass"
    lost = classes - named - used_inside(tree)
    assert not lost, f"{name_of(path)}: in no union: {sorted(lost)}"
    tests = "\n".join(test.read_text() for test in TESTS.rglob("*.py"))
    untested = sorted(name for name in classes if name not in tests)
    assert not untested, f"{name_of(path)}: in no test: {untested}"
