"""`dcnr chaos` strikes processes of this machine that are what they say, waits until training went on, and leaves nobody stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from dcnr.cli.chaos import Duration, Victim, checked
from dcnr.cli.main import main
from dcnr.errors import UserError
from tests.acceptance.networks import VOCABULARY, small
from tests.acceptance.running import make_dataset
from tests.cli.conftest import Cluster, command, environment, start_up, strays

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two agents in which a session trains on and on."""
    data_dir = tmp_path_factory.mktemp("chaos")
    make_dataset(data_dir, VOCABULARY)
    (data_dir / "network.yml").write_text(small("chaotic", "float32"))
    process, ready = start_up(data_dir, "--agents", "2")
    one = Cluster(ready["url"], data_dir)
    train = [str(data_dir / "network.yml"), "--dataset", "text", "--steps", "1000000", "--batch", "4", "--set", "checkpoint_every=20"]
    watching = subprocess.Popen(
        command("train", *train, "--session", "endless", "--json"),
        env=environment(data_dir, NATS_URL=one.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["event"] == "step"
    watching.kill()
    watching.communicate()
    yield one
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert strays(data_dir) == []


def events(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    """What a whole run of the command says."""
    return [json.loads(line) for line in cluster.dcnr("chaos", *arguments, "--json").stdout.splitlines()]


def test_agents_are_killed_and_training_goes_on(training: Cluster) -> None:
    """Twice, each in a line with the time that it took, and summed up."""
    begin, *faults, summary = events(training, "--kill", "agent", "--every", "1s", "--count", "2", "--seed", "5")
    assert begin == {"event": "chaos", "kill": "agent", "seed": 5}
    assert [fault["kind"] for fault in faults] == ["agent", "agent"]
    assert all("endless trains again after" in fault["text"] and 0 <= fault["seconds"] < 60 for fault in faults)
    assert (summary["faults"], summary["lost"]) == (2, 0)
    assert summary["worst"] == max(fault["seconds"] for fault in faults)


@pytest.mark.parametrize("kind", ["orchestrator", "nats"])
def test_orchestrator_and_server_are_killed_where_they_are_local(training: Cluster, kind: str) -> None:
    """Found by the lease, and by the pid file of the data directory."""
    _, fault, summary = events(training, "--kill", kind, "--count", "1")
    assert (fault["kind"], summary["lost"]) == (kind, 0)
    assert not psutil.pid_exists(fault["pid"]) or psutil.Process(fault["pid"]).status() == psutil.STATUS_ZOMBIE


def test_who_was_stopped_is_continued(training: Cluster) -> None:
    """Once the others train again."""
    _, fault, _ = events(training, "--kill", "agent", "--signal", "STOP", "--count", "1")
    assert "stopped: endless trains again" in fault["text"]
    assert psutil.Process(fault["pid"]).status() != psutil.STATUS_STOPPED


def test_ctrl_c_sums_up(training: Cluster) -> None:
    """Exit code 130, after the summary."""
    process = subprocess.Popen(
        command("chaos", "--kill", "agent", "--every", "1h", "--json", "--data-dir", str(training.data_dir)),
        env=environment(training.data_dir, NATS_URL=training.url),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["event"] for _ in range(2)] == ["chaos", "fault"]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert json.loads(out)["event"] == "summary"


def test_processes_of_other_machines_are_refused(training: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, for agents and orchestrators."""
    monkeypatch.setattr("dcnr.cli.chaos.host_id", lambda: "another")
    assert "no PNode of this cluster runs on this machine (agent-" in training.dcnr("chaos", "--kill", "agent", code=2).stderr
    assert "does not run on this machine" in training.dcnr("chaos", "--kill", "orchestrator", code=2).stderr


def test_a_server_that_is_not_ours_is_refused(training: Cluster, tmp_path: Path) -> None:
    """Another data directory has no server."""
    said = training.dcnr("chaos", "--kill", "nats", "--data-dir", str(tmp_path), code=2).stderr
    assert "only a server that `dcnr up` started" in said


def test_a_process_that_is_something_else_is_refused() -> None:
    """Its number was given to another one meanwhile, or it is gone."""
    with pytest.raises(UserError, match="is not agent-1, but: "):
        checked(Victim("agent", "agent-1", os.getpid()))
    with pytest.raises(UserError, match="cannot be found"):
        checked(Victim("agent", "agent-1", 2**22 + 1))


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10.0), ("1.5m", 90.0), ("500ms", 0.5), ("2h", 7200.0), ("3", 3.0)])
def test_durations(text: str, seconds: float) -> None:
    """As people write them."""
    assert Duration().convert(text, None, None) == seconds


def test_what_is_no_duration_is_said() -> None:
    """With the way to write it."""
    result = CliRunner().invoke(main, ["chaos", "--kill", "agent", "--every", "soon"])
    assert result.exit_code == 2
    assert "write it like 10s" in result.output
