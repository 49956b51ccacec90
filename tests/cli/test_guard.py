"""The guard ends what a killed command left behind, and nothing else."""

from __future__ import annotations

import subprocess
import sys

from dcnr.cli.guard import end_groups, read_groups

WAITING = "import signal, sys; print(1, flush=True); signal.sigwait({signal.SIGUSR1})"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"


def start(program: str) -> subprocess.Popen[bytes]:
    """A child in a group of its own that is ready to be signalled."""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    return child


def test_reaped_groups_are_forgotten() -> None:
    """A pid that was reaped may belong to a stranger by now."""
    assert read_groups(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


def test_a_willing_group_ends_on_request() -> None:
    """SIGTERM is enough."""
    child = start(WAITING)
    end_groups([child.pid], patience=0.2)
    assert child.wait(timeout=10) == -15


def test_a_stubborn_group_is_killed() -> None:
    """Who ignores SIGTERM gets SIGKILL after the patience."""
    child = start(STUBBORN)
    end_groups([child.pid], patience=0.2)
    assert child.wait(timeout=10) == -9


def test_groups_that_are_gone_are_fine() -> None:
    """Nothing to end is no error."""
    child = start(WAITING)
    child.kill()
    child.wait()
    end_groups([child.pid], patience=0.1)
