"""`dcnr train`: bad input ends in one line with code 2 and leaves nothing; good input trains for real."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from dcnr.cli import train
from dcnr.cli.corpus import prepare_text
from dcnr.cli.main import main
from dcnr.cli.source import read_source
from dcnr.cli.train import TrainPlan, parse_settings, start_training
from dcnr.data.transfer import push_dataset
from dcnr.errors import NotFound, UserError
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import no_progress
from tests.cli.conftest import TINY, command, environment, strays


def objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    """One JSON object a line, and nothing else."""
    return [json.loads(line) for line in lines]


def test_settings_become_the_fields_that_were_set() -> None:
    """Texts turn into numbers; what was not set is not sent."""
    assert parse_settings(["lr=1e-3", "warmup_steps=5", "schedule=cosine"]) == {"lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", "no '='"),
        ("rl=3", "no hyper-parameter 'rl'"),
        ("lr=fast", "--set lr=fast"),
        ("lr=-1", "greater than 0"),
        ("shards=0", "shards"),
    ],
)
def test_bad_settings_are_explained(setting: str, message: str) -> None:
    """With the key, and what it wants."""
    with pytest.raises(UserError, match=message):
        parse_settings([setting])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY], "either --dataset or --text"),
        ([TINY, "--text", "a.txt", "--dataset", "d"], "either --dataset or --text"),
        ([TINY, "--dataset", "d", "--batch", "8", "--micro-batches", "3"], "equal micro-batches"),
        ([TINY, "--dataset", "d", "--session", "no dots."], "not a valid session name"),
        ([TINY, "--dataset", "d", "--local", "2", "--pnodes", "3"], "more than the 2 agents"),
        (["nowhere.yml", "--dataset", "d", "--local", "2"], "no network file 'nowhere.yml'"),
        ([TINY, "--text", "nowhere.txt", "--local", "2"], "nowhere.txt"),
        ([TINY, "--dataset", "d", "--steps", "0"], "--steps"),
        ([TINY, "--dataset", "d", "--steps", str(2**53 + 1)], "--steps"),
        ([TINY, "--dataset", "d", "--batch", "65537"], "--batch"),
        ([TINY, "--dataset", "d", "--seed", str(2**63)], "--seed"),
        ([TINY, "--dataset", "d", "--backend", "numpy"], "--backend numpy is for the agents of --local"),
        ([TINY, "--dataset", "d", "--local", "2"], "no dataset 'd'"),
        ([TINY, "--text", TINY, "--text", "nowhere.txt", "--local", "2"], "'nowhere.txt' does not exist"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Found before anything is started, so nothing is left."""
    result = CliRunner().invoke(main, ["train", *arguments, "--data-dir", str(tmp_path / "data")])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "data").exists()


async def test_a_dataset_of_the_storage_is_good_enough(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of --local would fetch it too."""
    made = await prepare_text(tmp_path / "here", [str(book)], read_source(TINY).graph)
    await push_dataset(tmp_path / "here", made, FileStorage(tmp_path / "storage"), no_progress)
    monkeypatch.setenv("DCNR_STORAGE", f"file://{tmp_path}/storage")

    class Started(Exception):
        """What is tested comes before."""

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(train, "LocalCluster", start)
    plan = TrainPlan(TINY, made, (), 1, 1, 1, 0, (), False, 0, 1, None, "auto", tmp_path / "there", True)
    with pytest.raises(Started):
        await start_training(plan)
    with pytest.raises(NotFound, match=r"no dataset 'nothing' in .* nor in file://"):
        await start_training(replace(plan, dataset="nothing"))


@pytest.mark.parametrize("content", ["", "short"])
def test_a_text_that_is_too_short_leaves_nothing(content: str, tmp_path: Path) -> None:
    """Neither tokenizer nor dataset."""
    (tmp_path / "book.txt").write_text(content)
    data_dir = tmp_path / "data"
    result = CliRunner().invoke(main, ["train", TINY, "--text", str(tmp_path / "book.txt"), "--local", "2", "--data-dir", str(data_dir)])
    assert result.exit_code == 2, result.output
    assert not list(data_dir.rglob("*.json"))
    assert not list(data_dir.rglob("*.bin"))


@pytest.mark.nats
@pytest.mark.timeout(180)
def test_a_real_run_prints_the_promised_lines_and_leaves_nothing(book: Path, tmp_path: Path) -> None:
    """Five steps on two agents: one object a step, the end, no process left, and step 0 can be exported."""
    data_dir = tmp_path / "data"
    arguments = ["train", TINY, "--text", str(book), "--local", "2", "--steps", "5", "--batch", "4", "--session", "five", "--json"]
    done = subprocess.run(command(*arguments), env=environment(data_dir), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    *steps, end = objects(done.stdout.splitlines())
    keys = ["event", "step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens_per_s", "step_ms"]
    assert [list(step) for step in steps] == [keys] * 5
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert end == {"event": "done", "session": "five", "final_loss": steps[-1]["loss"]}
    assert strays(data_dir) == []
    out = tmp_path / "zero"
    exported = CliRunner().invoke(main, ["checkpoint", "export", "five@0", str(out), "--data-dir", str(data_dir)])
    assert exported.exit_code == 0, exported.output
    assert sorted(path.name for path in out.iterdir()) == ["dcnr.json", "model.safetensors", "network.yml", "tokenizer.json"]


@pytest.mark.nats
@pytest.mark.timeout(180)
@pytest.mark.parametrize("who", ["agent-2", "orchestrator"])
def test_a_run_that_loses_a_process_goes_on_and_says_so(book: Path, tmp_path: Path, who: str) -> None:
    """Every step is one line, once and in order, whatever was rolled back or got lost; what happened is told beside it."""
    data_dir = tmp_path / "data"
    arguments = ["train", TINY, "--text", str(book), "--local", "2", "--steps", "150", "--batch", "4", "--session", "hurt", "--json"]
    with (tmp_path / "err").open("w") as said:
        process = subprocess.Popen(
            command(*arguments), env=environment(data_dir), stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(5)]
    (child,) = [child for child in psutil.Process(process.pid).children() if any(who in word for word in child.cmdline())]
    child.kill()
    rest = process.stdout.read()  # with two pipes, `communicate` would leave out what `readline` has read ahead
    code, err = process.wait(20), (tmp_path / "err").read_text()
    process.stdout.close()
    assert code == 0, err
    *steps, end = objects([*first, *rest.splitlines()])
    assert [step["step"] for step in steps] == list(range(1, 151))
    assert (end["event"], end["session"]) == ("done", "hurt")
    assert "session hurt is" in err if who == "agent-2" else "orchestrator" in err
    assert "Traceback" not in err
    assert strays(data_dir) == []


@pytest.mark.nats
@pytest.mark.timeout(180)
def test_ctrl_c_suspends_and_says_how_to_go_on(book: Path, tmp_path: Path) -> None:
    """Within 3 s: a checkpoint, code 130, no process left."""
    data_dir = tmp_path / "data"
    arguments = ["train", TINY, "--text", str(book), "--local", "2", "--steps", "100000", "--batch", "4", "--session", "long", "--json"]
    process = subprocess.Popen(
        command(*arguments), env=environment(data_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["step"] == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["event"] == "suspended"
    assert "session long is suspended" in err
    assert "dcnr session resume long" in err
    assert strays(data_dir) == []
