"""`dcnr metrics tail` prints what a real cluster publishes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Cluster, command, environment


@pytest.mark.nats
@pytest.mark.timeout(120)
def test_tail_shows_the_steps_of_a_run(cluster: Cluster, book: Path) -> None:
    """One object a message, of the subject that was asked for, until Ctrl-C."""
    env = environment(cluster.data_dir, NATS_URL=cluster.url)
    tail = subprocess.Popen(command("metrics", "tail", "dcnr.metrics.step.watched", "--json"), env=env, stdout=subprocess.PIPE, text=True)
    train = subprocess.Popen(
        command("train", TINY, "--text", str(book), "--steps", "100000", "--batch", "4", "--session", "watched", "--json"),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert tail.stdout is not None
    row = json.loads(tail.stdout.readline())
    assert (row["kind"], row["session"]) == ("StepMetrics", "watched")
    for process in (tail, train):
        process.send_signal(2)
        process.communicate(timeout=20)
        assert process.returncode == 130
    assert cluster.json("session", "suspend", "watched")["state"] == "suspended"
