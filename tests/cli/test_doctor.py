"""`dcnr doctor` tells what works, and what to do about what does not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcnr.backends.cupy import probe
from dcnr.cli import doctor
from dcnr.cli.doctor import Check, gpu_checks, look_at_shared_memory, look_at_storage
from dcnr.cli.main import main
from dcnr.errors import BackendUnavailable, UserError
from tests.cli.conftest import Cluster


def ask_doctor(url: str, data_dir: Path) -> dict[str, dict[str, str]]:
    """Findings by check."""
    result = CliRunner(env={"NATS_URL": url}).invoke(main, ["doctor", "--json", "--data-dir", str(data_dir)])
    assert result.exit_code == 0, result.output
    return {found["check"]: found for found in map(json.loads, result.stdout.splitlines())}


def test_without_a_cluster_everything_needed_works(tmp_path: Path) -> None:
    """The missing cluster is no failure, but has a remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
    findings = ask_doctor(url, tmp_path)
    for check in ("dcnr", "libraries", "nats-server", "backend numpy", "backend cpu", "storage"):
        assert findings[check]["status"] == "ok", findings[check]
    assert findings["cluster"]["status"] == "optional"
    assert findings["cluster"]["remedy"]


@pytest.mark.nats
@pytest.mark.timeout(120)
def test_a_running_cluster_is_found(cluster: Cluster, tmp_path: Path) -> None:
    """With JetStream."""
    assert "JetStream works" in ask_doctor(cluster.url, tmp_path)["cluster"]["found"]


def test_a_needed_thing_that_fails_is_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its remedy is printed."""

    def broken() -> str:
        raise UserError("it is broken", "mend it")

    monkeypatch.setattr(doctor, "checks", lambda data_dir: (Check("thing", broken), Check("luxury", broken, needed=False)))
    result = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.output.splitlines()] == ["FAIL", "mend", "-", "mend"]


def test_storage_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        look_at_storage(tmp_path / "file" / "data")


def test_shared_memory_is_looked_at() -> None:
    """It says how much, or that the system manages it."""
    assert look_at_shared_memory()


def refuse() -> int:
    """A part that is not there."""
    raise BackendUnavailable("it is not there", "get it")


@pytest.mark.parametrize(
    ("package", "count", "names"),
    [
        (refuse, refuse, ["package"]),
        (lambda: 0, refuse, ["package", "driver"]),
        (lambda: 0, lambda: 2, ["package", "driver", "compiler", "products", "0", "1"]),
    ],
    ids=["no package", "no driver", "two gpus"],
)
def test_a_gpu_is_looked_at_as_far_as_there_is_one(
    package: Callable[[], int], count: Callable[[], int], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that is missing is the last that is asked for; none of it is needed."""
    monkeypatch.setattr(probe, "cupy", package)
    monkeypatch.setattr(probe, "device_count", count)
    checks = list(gpu_checks())
    assert [check.name for check in checks] == [f"gpu {name}" for name in names]
    assert not any(check.needed for check in checks)
