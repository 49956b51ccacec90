"""The demo's text is real, and its whole story works when it is short."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dcnr.cli import demo
from dcnr.cli.main import main
from tests.cli.conftest import strays


def test_the_text_is_the_standard_library(tmp_path: Path) -> None:
    """Python source, valid UTF-8, of the size that was promised."""
    said = demo.write_text(tmp_path / "text.txt")
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert "files of Python's standard library" in said
    assert demo.TEXT_BYTES // 2 < len(text.encode()) <= demo.TEXT_BYTES
    assert "def __init__(self" in text


@pytest.mark.nats
@pytest.mark.timeout(240)
def test_a_short_demo_tells_the_whole_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster, training, a sample that goes on from the prompt, and no process left."""
    monkeypatch.delenv("NATS_URL", raising=False)
    monkeypatch.setattr(demo, "TEXT_BYTES", 200_000)
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "SAMPLE_TOKENS", 4)
    result = CliRunner().invoke(main, ["demo", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "step 3/3" in result.output
    assert f"\n\n{demo.PROMPT}" in result.output
    assert strays(tmp_path) == []
