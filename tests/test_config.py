"""An option wins over the environment, which wins over the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.config import DEFAULT_NATS_URL, FusedPaths, from_environment, fused_paths, resolve
from dcnr.errors import UserError


def test_defaults() -> None:
    """`~/.dcnr` and the usual port."""
    config = resolve({"HOME": "/home/u"})
    assert config.data_dir == Path("/home/u/.dcnr")
    assert config.nats_url == DEFAULT_NATS_URL
    assert config.storage == "file:///home/u/.dcnr"


def test_the_environment_is_followed_and_options_win() -> None:
    """Empty variables count as absent."""
    environ = {"HOME": "/home/u", "DCNR_DATA_DIR": "/data", "NATS_URL": "nats://n:1"}
    assert resolve(environ).data_dir == Path("/data")
    assert resolve(environ).nats_url == "nats://n:1"
    assert resolve(environ, data_dir="/other", nats_url="nats://o:2").data_dir == Path("/other")
    assert resolve(environ, nats_url="nats://o:2").nats_url == "nats://o:2"
    assert resolve({"HOME": "/home/u", "DCNR_DATA_DIR": "", "NATS_URL": "", "DCNR_STORAGE": ""}) == resolve({"HOME": "/home/u"})


def test_checkpoints_are_kept_in_the_data_directory_unless_a_storage_is_named() -> None:
    """Option, environment, data directory; spaces in a path are quoted in its URL."""
    environ = {"HOME": "/home/u", "DCNR_STORAGE": "s3://bucket/a"}
    assert resolve(environ).storage == "s3://bucket/a"
    assert resolve(environ, storage="file:///shared").storage == "file:///shared"
    assert resolve({"HOME": "/home/u"}, data_dir="/my data").storage == "file:///my%20data"


def test_the_data_directory_is_absolute_and_has_its_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Children with another working directory get the same one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCNR_DATA_DIR", "here")
    config = from_environment()
    assert config.data_dir == tmp_path / "here"
    assert config.tokenizers == tmp_path / "here" / "tokenizers"
    assert config.datasets == tmp_path / "here" / "datasets"
    assert config.checkpoints == tmp_path / "here" / "checkpoints"
    assert config.nats_store == tmp_path / "here" / "nats"


def test_fast_paths_are_on_until_they_are_switched_off() -> None:
    """Each by a variable of its own."""
    assert fused_paths({}) == FusedPaths(attention=True, lm_head=True, hopper=True)
    assert fused_paths({"DCNR_FUSED_ATTENTION": "0", "DCNR_FUSED_LM_HEAD": "1"}) == FusedPaths(attention=False, lm_head=True, hopper=True)
    assert fused_paths({"DCNR_FUSED_ATTENTION": "", "DCNR_FUSED_LM_HEAD": "0"}) == FusedPaths(attention=True, lm_head=False, hopper=True)


def test_a_switch_has_two_positions() -> None:
    """Other words are an error that names the variable."""
    with pytest.raises(UserError, match="DCNR_FUSED_LM_HEAD is 'off'"):
        fused_paths({"DCNR_FUSED_LM_HEAD": "off"})
