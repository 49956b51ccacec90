"""Children stop in order, are reported when they die, and never outlive their parent, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dcnr.cli.children import PAUSES, SOON, Children, DirectoryLock, Guard, is_hopeless
from dcnr.errors import DcnrError, UserError

WAITING = [sys.executable, "-c", "import signal; print('here', flush=True); signal.sigwait({signal.SIGUSR1})"]
STUBBORN = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); print('here', flush=True); signal.sigwait({10})"]
BROKEN = [sys.executable, "-c", "print('bad luck'); raise SystemExit(3)"]


def wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Until `condition` holds."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


@asynccontextmanager
async def household(data_dir: Path) -> AsyncIterator[Children]:
    """Lock, guard and children, put away at the end."""
    lock = DirectoryLock(data_dir)
    guard = Guard(lock)
    children = Children(guard, data_dir / "logs")
    try:
        yield children
        await children.stop(children.names, patience=0.1)
    finally:
        await asyncio.to_thread(guard.close)
        lock.release()


async def wait_until(condition: Callable[[], bool]) -> None:
    """Until `condition` holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def wait_until_here(log: Path) -> None:
    """Until the child has printed."""
    await wait_until(lambda: "here" in log.read_text())


async def test_stop_ends_the_willing_and_the_stubborn(tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL after the patience; the log keeps what they printed."""
    async with household(tmp_path) as children:
        willing, stubborn = await children.start("willing", WAITING, {}), await children.start("stubborn", STUBBORN, {})
        await wait_until_here(willing.log)
        await wait_until_here(stubborn.log)
        await children.stop(["willing", "stubborn"], patience=0.3)
        assert (willing.process.returncode, stubborn.process.returncode) == (-signal.SIGTERM, -signal.SIGKILL)
        assert children.names == ()


async def test_a_death_is_told_in_one_line(tmp_path: Path) -> None:
    """Who, how, the last words, and where to read more."""
    async with household(tmp_path) as children:
        await children.start("steady", WAITING, {})
        await children.start("weak", BROKEN, {})
        dead = await children.next_death()
        assert dead.epitaph() == f"weak ended with exit code 3: bad luck (log: {tmp_path / 'logs' / 'weak.log'})"
        assert isinstance(dead.failure(), DcnrError)
        assert not isinstance(dead.failure(), UserError)
        assert children.names == ("steady",)


async def test_one_that_died_lives_again_under_its_name(tmp_path: Path) -> None:
    """At once after a life, with the same command, and its log goes on."""
    async with household(tmp_path) as children:
        first = await children.start("steady", WAITING, {})
        await wait_until_here(first.log)
        first.process.kill()
        dead = replace(await children.death("steady"), born=time.monotonic() - SOON)
        second = await children.again(dead)
        await wait_until(lambda: second.log.read_text() == "here\nhere\n")
        assert children.pid("steady") == second.process.pid != first.process.pid


async def test_deaths_at_once_make_the_pauses_longer_until_it_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends by itself has as many lives as there are pauses."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async with household(tmp_path) as children:
        await children.start("weak", BROKEN, {})
        dead = await children.death("weak")
        monkeypatch.setattr("dcnr.cli.children.asyncio.sleep", note)
        while not is_hopeless(dead):
            await children.again(dead)
            dead = await children.death("weak")
        assert slept == list(PAUSES[1:])
        assert "weak ended with exit code 3: bad luck" in str(dead.failure())


async def test_whom_somebody_kills_is_never_given_up(tmp_path: Path) -> None:
    """However soon."""
    async with household(tmp_path) as children:
        child = await children.start("steady", WAITING, {})
        child.process.kill()
        dead = replace(await children.death("steady"), deaths=100)
        assert not is_hopeless(dead)


async def test_what_the_user_can_mend_stays_that(tmp_path: Path) -> None:
    """Exit code 2 of a child is the user's, and its message is not announced twice."""
    async with household(tmp_path) as children:
        await children.start("wrong", [sys.executable, "-c", "import sys; print('error: no such thing'); sys.exit(2)"], {})
        failure = (await children.next_death()).failure()
    assert isinstance(failure, UserError)
    assert failure.message.startswith("wrong ended with exit code 2: no such thing (log: ")


async def test_a_killed_child_has_no_last_words(tmp_path: Path) -> None:
    """What it printed before has nothing to do with it."""
    async with household(tmp_path) as children:
        child = await children.start("steady", WAITING, {})
        await wait_until_here(child.log)
        child.process.kill()
        assert (await children.next_death()).epitaph() == f"steady was ended by SIGKILL (log: {child.log})"


async def test_children_get_their_environment(tmp_path: Path) -> None:
    """What is given is added to ours."""
    async with household(tmp_path) as children:
        program = "import os; print(os.environ['DCNR_TEST'], 'PATH' in os.environ)"
        child = await children.start("curious", [sys.executable, "-c", program], {"DCNR_TEST": "given"})
        await child.process.wait()
        assert child.log.read_text() == "given True\n"


def test_a_directory_has_one_cluster(tmp_path: Path) -> None:
    """The second is told the pid of the first; after a release the directory is free."""
    lock = DirectoryLock(tmp_path)
    with pytest.raises(UserError, match=rf"already runs on .* \(pid {os.getpid()}\)"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


PARENT = """
import asyncio, sys
from pathlib import Path
from dcnr.cli.children import Children, DirectoryLock, Guard

async def main():
    folder = Path(sys.argv[1])
    children = Children(Guard(DirectoryLock(folder)), folder / "logs")
    child = await children.start("orphan", [sys.executable, "-c", "import signal; print('here', flush=True); signal.sigwait({10})"], {})
    print(child.process.pid, flush=True)
    await child.process.wait()

asyncio.run(main())
"""


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the parent: the child ends, and only then is the directory free again."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: "here" in (tmp_path / "logs" / "orphan.log").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: is_free(tmp_path))


def is_free(folder: Path) -> bool:
    """Whether a cluster could start."""
    try:
        DirectoryLock(folder).release()
    except UserError:
        return False
    return True
