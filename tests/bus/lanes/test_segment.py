"""Shared segments: made whole or not at all, shared between processes, and swept when their owner was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from dcnr.bus.lanes import segment

_OWNER = """
import sys
from dcnr.bus.lanes import segment
owned = segment.create(4096)
print(segment.directory() / owned.name, flush=True)
sys.stdin.read()
owned.close()
"""


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tests do not touch segments of running clusters."""
    monkeypatch.setattr(segment, "directory", lambda: tmp_path)
    return tmp_path


def test_what_one_writes_the_other_reads_and_close_removes_the_file(own_directory: Path) -> None:
    """A reader that is still attached keeps its view."""
    ours = segment.create(8192)
    theirs = segment.attach(ours.name)
    ours.memory[100:105] = b"hello"
    assert theirs.memory[100:105] == b"hello"
    with pytest.raises(TypeError):
        theirs.memory[0] = 1
    ours.close()
    assert list(own_directory.iterdir()) == []
    assert theirs.memory[100:105] == b"hello"
    theirs.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "dcnr-1-x", "other", "", "dcnr-1-0000000a/..", "dcnr-1-0000000a\n"])
def test_only_names_of_segments_are_opened(name: str) -> None:
    """They come from outside."""
    with pytest.raises(ValueError, match="no shared segment"):
        segment.attach(name)


def test_a_missing_segment_and_a_link_are_errors(own_directory: Path) -> None:
    """A link could lead anywhere."""
    with pytest.raises(OSError, match="No such file"):
        segment.attach("dcnr-1-0000000a")
    (own_directory / "dcnr-1-0000000b").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        segment.attach("dcnr-1-0000000b")


def test_too_little_room_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, own_directory: Path) -> None:
    """Known before a write could kill us."""
    Room = namedtuple("Room", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: Room(16, 4096))
    with pytest.raises(OSError, match="65536 bytes free"):
        segment.create(40_000)
    monkeypatch.undo()
    assert list(own_directory.iterdir()) == []


def test_a_killed_owners_segment_is_swept_and_a_living_ones_is_not() -> None:
    """By the lock, not by the pid."""
    owners = [subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    places = []
    for owner in owners:
        assert owner.stdout is not None
        places.append(Path(owner.stdout.readline().strip()))
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    assert all(place.exists() for place in places)
    subprocess.run([sys.executable, "-c", "from dcnr.bus.lanes import segment; segment.sweep()"], check=True)
    assert [place.exists() for place in places] == [False, True]
    owners[1].communicate("")
    assert not places[1].exists()
    for owner in owners:
        owner.communicate()
