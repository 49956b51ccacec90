"""The examples of docs/API.md run as they stand, as programs beside a real cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Cluster, environment

ROOT = Path(__file__).parents[2]
PROGRAM, WATCH, WRITE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "API.md").read_text(), re.DOTALL)
AROUND = """
import asyncio
import dcnr

async def main():
    async with dcnr.connect() as cluster:
        session = await cluster.train("tiny", DATASET, 3, "written")
{examples}
        print(step.step)

asyncio.run(main())
"""

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]


def run(program: str, cluster: Cluster, folder: Path) -> list[str]:
    """The lines that a program prints, started in `folder` as users start one."""
    env = environment(folder / "none", NATS_URL=cluster.url, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_documented_examples_run(cluster: Cluster, book: Path, tmp_path: Path) -> None:
    """1. the program trains and prints every step; 2. rows are written as they come; 3. a session that is there already is watched."""
    cluster.dcnr("train", TINY, "--text", str(book), "--steps", "1", "--batch", "4", "--session", "before")
    dataset = repr(cluster.json("session", "show", "before")["dataset"])
    changes = {'"networks/tiny.yml"': repr(TINY), '"books"': dataset, "steps=100": "steps=3", "batch=16": "batch=4"}
    program = PROGRAM
    for said, meant in changes.items():
        assert said in program
        program = program.replace(said, meant)
    *steps, checkpoints = run(program, cluster, tmp_path)
    assert [line.split()[0] for line in steps] == ["1", "2", "3"]
    assert re.fullmatch(r"\[Checkpoint\(session='(tiny-\w+)', step=0\), Checkpoint\(session='\1', step=3\)\]", checkpoints)

    watch = WATCH.replace('"tiny-1f6c2a"', "'before'")
    examples = "\n".join(f"        {line}" for line in f"{WRITE}\n{watch}".splitlines())
    assert run(AROUND.replace("DATASET", dataset).format(examples=examples), cluster, tmp_path) == ["3"]
    rows = [row.split(",") for row in (tmp_path / "run.csv").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["session", "step"], ["written", "1"], ["written", "2"], ["written", "3"]]
