"""`dcnr session`: a run is watched, suspended, resumed and deleted on a real cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Cluster, command, environment

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]


def test_the_life_of_a_session(cluster: Cluster, book: Path) -> None:
    """1. train, and Ctrl-C-free to the end; 2. resume with more steps; 3. watch it end; 4. delete; 5. it is gone."""
    options = ["--text", str(book), "--steps", "3", "--batch", "4", "--session", "life"]
    *steps, done = map(json.loads, cluster.dcnr("train", TINY, *options, "--json").stdout.splitlines())
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert done["session"] == "life"
    shown = cluster.json("session", "show", "life")
    assert (shown["state"], shown["step"], shown["batch"]) == ("done", 3, 4)
    assert set(shown["assignment"].values()) <= {"agent-1", "agent-2"}

    cluster.dcnr("session", "resume", "life", "--steps", "6")
    last = cluster.dcnr("session", "watch", "life", "--json").stdout.splitlines()[-1]
    assert json.loads(last)["event"] == "done"
    rows = {row["session"]: row for row in cluster.json("session", "list")["sessions"]}
    assert (rows["life"]["state"], rows["life"]["step"]) == ("done", 6)
    assert "life" in cluster.dcnr("session", "list").output

    cluster.dcnr("session", "delete", "life")
    assert "life" in cluster.dcnr("session", "show", "life", code=2).output


def test_suspend_and_detach(cluster: Cluster, book: Path) -> None:
    """Ctrl-C of `train` against a cluster only detaches; `suspend` stops the run and its watcher ends with a note."""
    options = ["--text", str(book), "--steps", "100000", "--batch", "4", "--session", "endless", "--json"]
    env = environment(cluster.data_dir, NATS_URL=cluster.url)
    process = subprocess.Popen(command("train", TINY, *options), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 1
    process.send_signal(2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "session endless goes on" in err

    watcher = subprocess.Popen(
        command("session", "watch", "endless", "--json"), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["event"] == "step"
    assert "would stay as it is" in cluster.dcnr("session", "rebalance", "endless", code=2).output
    cluster.dcnr("session", "suspend", "endless")
    out, err = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    end = json.loads(out.splitlines()[-1])
    assert (end["event"], end["session"], end["reason"]) == ("suspended", "endless", "suspended by request")
    assert "session endless is suspended" in err
    assert cluster.json("session", "show", "endless")["state"] == "suspended"
    cluster.dcnr("session", "delete", "endless")


@pytest.mark.parametrize("verb", ["show", "watch", "suspend", "resume", "rebalance", "delete"])
def test_an_unknown_session_is_code_2(cluster: Cluster, verb: str) -> None:
    """It is named."""
    assert "nothing" in cluster.dcnr("session", verb, "nothing", code=2).output


def test_the_numbers_of_a_run_are_written_and_drawn_afterwards(cluster: Cluster, book: Path, tmp_path: Path) -> None:
    """A watch writes the steps that nobody watched, a second one adds nothing; a picture; another ending is refused."""
    cluster.dcnr("train", TINY, "--text", str(book), "--steps", "3", "--batch", "4", "--session", "drawn")
    csv, out = tmp_path / "run.csv", tmp_path / "loss.png"
    for _ in range(2):
        cluster.dcnr("session", "watch", "drawn", "--csv", str(csv))
        assert [line.split(",")[1] for line in csv.read_text().splitlines()] == ["step", "1", "2", "3"]
    assert cluster.json("session", "plot", "drawn", "--out", str(out))["steps"] == 3
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "ends in none of" in cluster.dcnr("session", "plot", "drawn", "--out", str(tmp_path / "loss.gif"), code=2).output
    cluster.dcnr("session", "delete", "drawn")
