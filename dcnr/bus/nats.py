"""The bus on a NATS server, through nats-py.

What nats-py 2.16 asks of its user, and what is done here:

- an exception in one of its callbacks ends its read loop in silence: ours only log and set flags
- `publish` swallows cancellation while it waits for the socket: we wait ourselves, before it would. `request` may swallow it too (through
  `asyncio.wait_for`, until Python 3.12), and waits out its time when the connection is lost: it runs in a task of its own
- a stale link with unsent data never fails over: `TCP_USER_TIMEOUT`, and a watchdog that aborts the transport
- some server errors close the client for good: it is then rebuilt with all its subscriptions
- it comes back by itself, for ever, to whichever server of the cluster answers; one that is about to end (lame duck) closes its
  connections one by one, and each client then goes to another
- pending limits drop messages: they are off, since callbacks only enqueue and tensors have credits
- a `flush` that is cancelled or takes too long leaves a cancelled future behind, and its PONG then ends the read loop: we flush ourselves.
  A client whose read loop has ended looks connected and hears nothing: it is closed, and so rebuilt
- the PING of a flush goes to the socket at once and overtakes what was sent just before, which waits for the flusher task; so one
  flush does not say that a SUB is at the server (another client's next message was lost 1 time in 30). By the time its PONG is here,
  though, the flusher has had its turn: a second flush says it
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsPySubscription
from nats.js.client import JetStreamContext

from dcnr.bus.base import Handler, Kv, OnMessage, Subscription, Way
from dcnr.bus.cancellation import heeded
from dcnr.bus.nats_kv import open_bucket
from dcnr.errors import BusUnavailable, UserError, WorldError

CONNECT_TIMEOUT = 2
FLUSH_TIMEOUT = 5
DRAIN_TIMEOUT = 1
RECONNECT_WAIT = 0.25
PING_INTERVAL = 2
WATCH_INTERVAL = 1.0
TCP_USER_TIMEOUT_MS = 5000
SAY_EVERY = 5.0
"""Seconds between two lines about a server that is waited for."""
PENDING_SIZE = 8 << 20
"""What nats-py may hold while there is no connection; more is an error of `publish`."""
_PENDING_HIGH = PENDING_SIZE // 2
_PUBLISH_POLL = 0.001
_NO_LIMIT = 0
_REMEDY = "is the NATS server running? see: dcnr doctor"

_OnMsg = Callable[[Msg], None]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def connect(url: str, name: str, patient: bool = False) -> NatsBus:
    """A connection to the server at `url` (several: comma-separated). Raises `BusUnavailable` within 3 s if none answers.

    With `patient` it waits until one does, and says so on the log. An address that is none, or a server that refuses us, is a `UserError`.
    """
    loop = asyncio.get_running_loop()
    said = -SAY_EVERY
    while True:
        bus = NatsBus(url, name)
        try:
            await bus.open()
        except BusUnavailable as error:
            if not patient:
                raise
            if loop.time() >= said + SAY_EVERY:
                said = loop.time()
                _log.warning(f"no NATS server at {_shown(url)} yet; trying again", bus=name, error=error.message)
            await asyncio.sleep(RECONNECT_WAIT * (1 + random.random()))
        else:
            return bus


class NatsSubscription:
    """One interest; it outlives reconnects and the rebuilding of the client."""

    def __init__(self, bus: NatsBus, subject: str, on_msg: _OnMsg) -> None:
        self._bus = bus
        self._subject = subject
        self._on_msg = on_msg
        self._inner: NatsPySubscription | None = None
        self._stopped = False

    async def attach(self, client: Client) -> None:
        """Subscribe at `client`."""
        self._inner = await client.subscribe(self._subject, cb=self._hear, pending_msgs_limit=_NO_LIMIT, pending_bytes_limit=_NO_LIMIT)

    async def stop(self) -> None:
        """No callback after this returns."""
        if self._stopped:
            return
        self._stopped = True
        self._bus.forget(self)
        if self._inner is not None:
            with suppress(nats.errors.Error):  # a closed or draining connection has no interests any more
                await self._inner.unsubscribe()

    async def _hear(self, msg: Msg) -> None:
        if not self._stopped:
            self._on_msg(msg)


class NatsBus:
    """One connection that comes back by itself."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._client = Client()
        self._subscriptions: list[NatsSubscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._down = False
        self._closing = False
        self._last_error = ""
        self._refused = ""
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection that stands now is lost."""

    async def open(self) -> None:
        """Connect; called once, by `connect`."""
        if not await _anyone_listens(_servers(self._url)):
            raise self._unavailable("no NATS server answers")
        await self._connect()
        self._start(self._watch())

    @property
    def max_payload(self) -> int:
        """Bytes of the largest message."""
        return self._client.max_payload

    @property
    def way(self) -> Way | None:
        """Our address on the way to the server, and whether there is TLS; None while there is no connection."""
        writer = self._writer()
        name = writer.get_extra_info("sockname") if writer is not None else None
        return None if writer is None or not name else Way(name[0], writer.get_extra_info("ssl_object") is not None)

    @property
    def is_connected(self) -> bool:
        """Whether the link to a server stands at this moment."""
        return self._client.is_connected

    async def publish(self, subject: str, data: bytes) -> None:
        """Send; waits while the socket is behind. Raises `WorldError` when disconnected for longer than the buffer lasts."""
        await self._publish(subject, data)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """Active at the server when this returns."""
        return await self._subscribe(subject, lambda msg: on_message(msg.data))

    async def request(self, subject: str, data: bytes, timeout: float) -> bytes:
        """Ask; the first answer counts."""
        self._check_size(data)
        await self._room()
        if not self._client.is_connected:
            raise WorldError(f"request to {subject} failed: there is no connection to the NATS server", _REMEDY)
        lost = self._lost
        asking = asyncio.ensure_future(self._client.request(subject, data, timeout))
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # nobody may be waiting for it
        ends: list[asyncio.Future[Any]] = [asking, lost]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        if not asking.done():
            raise WorldError(f"request to {subject} failed: the connection to the NATS server was lost", _REMEDY)
        with _translated(f"request to {subject}"):
            try:
                return asking.result().data
            except nats.errors.NoRespondersError as error:
                raise BusUnavailable(f"nobody serves {subject}") from error
            except nats.errors.TimeoutError as error:
                raise WorldError(f"no answer on {subject} within {timeout:g} s") from error

    async def serve(self, subject: str, handler: Handler) -> Subscription:
        """Answer requests, each in its own task."""

        async def answer(msg: Msg) -> None:
            result = await handler(msg.data)
            if msg.reply:
                try:
                    await self._publish(msg.reply, result)
                except (UserError, WorldError) as error:
                    _log.error("an answer could not be sent", subject=subject, error=str(error))

        return await self._subscribe(subject, lambda msg: self._start(answer(msg)))

    async def kv(self, bucket: str, make: bool = True) -> Kv:
        """The bucket, made if it is not there, or else `BucketGone` is raised."""
        return await open_bucket(self._jetstream, bucket, make)

    async def close(self) -> None:
        """Deliver what was published, then disconnect; returns within 3 s whatever the server does."""
        if self._closing:
            return
        self._closing = True
        with suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(2 * DRAIN_TIMEOUT):
                await self._client.drain()
        if not self._client.is_closed:
            self._abort()
            with suppress(nats.errors.Error, TimeoutError, OSError):
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await self._client.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self, subscription: NatsSubscription) -> None:
        """A stopped subscription is not made again."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    # -- sending ---------------------------------------------------------------------------------------------------------

    async def _publish(self, subject: str, data: bytes) -> None:
        self._check_size(data)
        await self._room()
        with _translated(f"publish to {subject}"):
            await self._client.publish(subject, data)

    async def _room(self) -> None:
        """Wait until nats-py can take a message without waiting; unlike its own wait, this one can be cancelled."""
        while self._client.is_connected and self._client.pending_data_size > _PENDING_HIGH:
            await asyncio.sleep(_PUBLISH_POLL)

    def _check_size(self, data: bytes) -> None:
        limit = self._client.max_payload
        if len(data) > limit:
            raise UserError(f"a message of {len(data)} bytes exceeds the server's max_payload of {limit}", "raise max_payload")

    # -- listening -------------------------------------------------------------------------------------------------------

    async def _subscribe(self, subject: str, on_msg: _OnMsg) -> NatsSubscription:
        subscription = NatsSubscription(self, subject, on_msg)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(subscription.stop)
            with _translated(f"subscribe to {subject}"):
                await subscription.attach(self._client)
                self._subscriptions.append(subscription)
                for _ in range(2):  # the first PING overtakes the SUB
                    await self._flush()
            undo.pop_all()
        return subscription

    async def _flush(self) -> None:
        """Until the server has answered a PING. The future stays as it is whatever happens to us: see above."""
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._client._send_ping(answered)
        await asyncio.wait([answered], timeout=FLUSH_TIMEOUT)
        if not answered.done() or answered.cancelled():
            raise nats.errors.FlushTimeoutError

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": f"a task of bus {self._name} failed", "exception": error, "task": task})

    # -- the connection --------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        client = self._client
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await client.connect(
                    servers=_servers(self._url),
                    name=self._name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    discovered_server_cb=self._on_discovered,
                    lame_duck_mode_cb=self._on_lame_duck,
                    connect_timeout=CONNECT_TIMEOUT,
                    max_reconnect_attempts=-1,
                    # nats-py has no jitter of its own: clients of one server would all come back at once
                    reconnect_time_wait=RECONNECT_WAIT * (1 + random.random()),  # type: ignore[arg-type]  # fractions work
                    ping_interval=PING_INTERVAL,
                    max_outstanding_pings=2,
                    pending_size=PENDING_SIZE,
                    drain_timeout=DRAIN_TIMEOUT,
                    **_credentials(self._url),
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            with suppress(nats.errors.Error, OSError):
                await client.close()
            if self._refused:
                refusal = f"the NATS server at {_shown(self._url)} refuses us: {self._refused}"
                raise UserError(refusal, "check the user, password and certificates that NATS_URL names") from error
            raise self._unavailable(f"no connection to NATS: {self._last_error or str(error) or 'time-out'}") from error
        self._tune()

    def _unavailable(self, what: str) -> BusUnavailable:
        return BusUnavailable(f"{what} at {_shown(self._url)}", "start a cluster: dcnr up; or set NATS_URL")

    async def _watch(self) -> None:
        """Look after a client that nats-py would leave hanging."""
        stuck = False
        while True:
            await asyncio.sleep(WATCH_INTERVAL * (0.5 + random.random()))  # clients of one server are not to come back all at once
            if self._client.is_closed and not self._closing:
                await self._rebuild()
            elif self._client.is_connected and self._is_deaf():
                with suppress(nats.errors.Error, OSError):
                    await self._client.close()
            elif self._client.is_reconnecting and not self._down:
                if stuck:
                    self._abort()
                stuck = True
            else:
                stuck = False

    async def _rebuild(self) -> None:
        self._client, self._refused = Client(), ""
        try:
            await self._connect()
            for subscription in tuple(self._subscriptions):
                await subscription.attach(self._client)
        except (UserError, nats.errors.Error) as error:
            _log.warning("NATS client not rebuilt yet", bus=self._name, error=str(error))
            with suppress(nats.errors.Error):
                await self._client.close()
        else:
            self._up()
            _log.info("NATS client rebuilt", bus=self._name)

    def _up(self) -> None:
        self._down = False
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()

    def _is_deaf(self) -> bool:
        reading: asyncio.Task[None] | None = getattr(self._client, "_reading_task", None)
        return reading is not None and reading.done()

    def _writer(self) -> asyncio.StreamWriter | None:
        """The stream under the client; nats-py has no public way to it."""
        return getattr(getattr(self._client, "_transport", None), "_io_writer", None)

    def _abort(self) -> None:
        if (writer := self._writer()) is not None:
            writer.transport.abort()

    def _tune(self) -> None:
        writer = self._writer()
        sock = writer.get_extra_info("socket") if writer is not None else None
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if sock is not None and option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, TCP_USER_TIMEOUT_MS)

    # -- what nats-py tells; none of these may raise ---------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        if not isinstance(error, nats.errors.Error | OSError):  # one of our own callbacks has a bug
            asyncio.get_running_loop().call_exception_handler({"message": f"a callback of bus {self._name} failed", "exception": error})
        said = str(error) or type(error).__name__
        if said != self._last_error:
            _log.debug("NATS error", bus=self._name, error=said)
        self._last_error = said
        if isinstance(error, ssl.SSLCertVerificationError) or "authorization violation" in said.lower():
            self._refused = said

    async def _on_disconnected(self) -> None:
        self._down = True
        if not self._lost.done():
            self._lost.set_result(None)
        if not self._closing:
            _log.warning("NATS connection lost", bus=self._name, error=self._last_error)

    async def _on_reconnected(self) -> None:
        self._up()
        self._tune()
        _log.info("NATS connection is back", bus=self._name)

    async def _on_lame_duck(self) -> None:
        _log.info("the NATS server is about to end; it will close this connection", bus=self._name)

    async def _on_closed(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        if not self._closing:
            _log.error("NATS client closed by an error; it will be rebuilt", bus=self._name, error=self._last_error)

    async def _on_discovered(self) -> None:
        _log.debug("NATS server discovered", bus=self._name)

    def _jetstream(self) -> JetStreamContext:
        return self._client.jetstream()


def _shown(url: str) -> str:
    """Without a password."""
    return re.sub(r"//[^/@]*@", "//***@", url)


def _servers(url: str) -> list[str]:
    return [part.strip() for part in url.split(",") if part.strip()]


def _credentials(url: str) -> dict[str, Any]:
    """Those of the first address, for all: servers that are discovered later have none in their addresses."""
    first = urlsplit(_servers(url)[0])
    match first.username, first.password:
        case str() as user, str() as password:
            return {"user": user, "password": password}
        case str() as token, None:
            return {"token": token}
        case _:
            return {}


def _address(server: str) -> tuple[str, int]:
    try:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        host, port = parts.hostname, parts.port or 4222
    except ValueError:
        host, port = None, 0
    if not host:
        raise UserError(f"'{server}' is not the address of a NATS server", "write it like nats://127.0.0.1:4222")
    return host, port


async def _anyone_listens(servers: list[str]) -> bool:
    """Whether any address takes a connection. nats-py itself would go on trying for ever."""

    async def listens(server: str) -> bool:
        host, port = _address(server)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT / 2):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    return any(await asyncio.gather(*(listens(server) for server in servers)))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Our errors for those of nats-py."""
    with heeded():
        try:
            yield
        except nats.errors.Error as error:
            raise WorldError(f"{what} failed: {str(error) or type(error).__name__}", _REMEDY) from error
