"""How PNodes that cannot share memory get a direct connection: they ask each other over the bus, and whoever can reach the other connects.

1. we -> peer (request on its `meet` subject): our addresses, and a token by which one connection from it is let in
2. the peer tries to connect; if it cannot, it answers with its own addresses and a token for us, and we try

- Both sides may ask; the PNode with the smaller name does at once, the other one after a while, so usually there is one connection.
- Where neither reaches the other it is tried again, ever more rarely; tensors go over the bus meanwhile. A connection that breaks is
  made anew.
- We listen where the bus reaches us: on the loopback interface if the server is on this machine, else on all interfaces.
- Where the bus is encrypted, so is the connection: TLS 1.2 with an anonymous Diffie-Hellman exchange. It needs no certificates, since
  the handshake ties its proofs to the TLS session.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import ssl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from dcnr.bus import codec, subjects
from dcnr.bus.base import Subscription, Way
from dcnr.bus.lanes.base import LaneBroken, Port
from dcnr.bus.lanes.handshake import NONCE, TOKEN, Caller, Listener
from dcnr.bus.lanes.link import Inbox, Link
from dcnr.bus.messages import Address, Meet
from dcnr.errors import DcnrError, PeerError
from dcnr.ids import PNodeId

CONNECT_SECONDS = 1.0
"""For one address: whoever does not answer by then is not worth a lane."""
MAX_ADDRESSES = 16
TOKEN_SECONDS = 30.0
ASK_SECONDS = 25.0
"""For a peer to try all of our addresses."""
FIRST_PAUSE, LAST_PAUSE = 0.25, 60.0
"""Seconds between attempts; each pause is twice the one before."""
SECOND_SIDE = 3.0
"""Seconds for which the PNode with the larger name leaves it to the other."""
FRESH = 3.0
"""Who asks has no connection. One that we seem to have, and that is older than these seconds, is dead without our having noticed."""
STRANGERS = 32
"""Connections that may be in their handshake at one time."""
_CIPHERS = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"
_GROUP = Path(__file__).with_name("ffdhe3072.pem")

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Rendezvous:
    """The connections of one PNode. `way`: how its bus is reached."""

    def __init__(self, port: Port, inbox: Inbox, way: Way, patience: float) -> None:
        self._port = port
        self._inbox = inbox
        self._way = way
        self._patience = patience
        self._server: asyncio.Server | None = None
        self._served: Subscription | None = None
        self._tokens: dict[PNodeId, tuple[bytes, float]] = {}
        self._strangers: set[Link] = set()
        self._links: dict[PNodeId, list[Link]] = {}
        self._seekers: dict[PNodeId, asyncio.Task[None]] = {}
        self._wanted: set[PNodeId] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listen for connections and for those who ask. Without a port or TLS there is no direct lane, and a line in the log."""
        host = self._way.address if ipaddress.ip_address(self._way.address).is_loopback else None
        loop = asyncio.get_running_loop()
        try:
            tls = _tls(listening=True) if self._way.encrypted else None
            self._server = await loop.create_server(self._admit, host, 0, ssl=tls)
        except (OSError, ssl.SSLError) as error:
            _log.warning("no direct connections: they need a port, and TLS where the bus has it", pnode=self._port.me, error=str(error))
            return
        self._served = await self._port.bus.serve(subjects.peer(self._port.me, "meet"), self._answer)
        self.seek(self._wanted)

    def seek(self, peers: Iterable[PNodeId]) -> None:
        """Keep a connection to each of these peers, as far as possible, and to no other."""
        self._wanted = set(peers)
        for peer in self._seekers.keys() - self._wanted:
            self._seekers.pop(peer).cancel()
            for link in self._links.get(peer, ()):
                link.abort()
        if self._served is not None:
            for peer in self._wanted - self._seekers.keys():
                self._seekers[peer] = self._port.start(self._seek(peer))

    def link(self, peer: PNodeId) -> Link | None:
        """A connection that works."""
        return next((link for link in self._links.get(peer, ()) if link.is_open), None)

    async def met(self, peer: PNodeId) -> Link:
        """Wait for one whose speed is known."""
        while (link := self.link(peer)) is None or not link.rate:
            self._changed.clear()
            await self._changed.wait()
        return link

    def release(self, peer: PNodeId) -> None:
        """Who was connected is gone, and whoever bears the name now is another."""
        self._tokens.pop(peer, None)
        for link in self._links.get(peer, ()):
            link.abort()

    def established(self, link: Link) -> None:
        """A handshake is over. The token of one who called us is used up."""
        if link in self._strangers:
            self._strangers.remove(link)
            self._tokens.pop(link.peer, None)
        self._links.setdefault(link.peer, []).append(link)
        self._port.start(self._measure(link))

    def lost(self, link: Link) -> None:
        """A connection has ended."""
        self._strangers.discard(link)
        links = self._links.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[link.peer]

    async def close(self) -> None:
        """End every connection. The port has ended the tasks."""
        if self._served is not None:
            await self._served.stop()
        if self._server is not None:
            self._server.close()
        links = [*self._strangers, *(link for links in self._links.values() for link in links)]
        for link in links:
            link.abort()
        await asyncio.gather(*(link.ended for link in links))

    # -- letting in ------------------------------------------------------------------------------------------------------

    def _admit(self) -> Link:
        link = Link(Listener(self._port.me, self._token_of, secrets.token_bytes(NONCE)), self._inbox, self._patience)
        if len(self._strangers) >= STRANGERS:
            next(iter(self._strangers)).abort()
        self._strangers.add(link)
        return link

    def _token_of(self, peer: PNodeId) -> bytes | None:
        token, until = self._tokens.get(peer, (None, 0.0))
        return token if asyncio.get_running_loop().time() < until else None

    def _invitation(self, peer: PNodeId, connected: bool = False) -> Meet:
        token = b""
        if not connected:  # one that is on its way stays good: both sides may be asking
            token = self._token_of(peer) or secrets.token_bytes(TOKEN)
            self._tokens[peer] = (token, asyncio.get_running_loop().time() + TOKEN_SECONDS)
        return Meet(self._port.me, self._addresses(), token.hex(), self._way.encrypted, connected)

    def _addresses(self) -> tuple[Address, ...]:
        """Where we can be reached, loopback last."""
        found: dict[Address, bool] = {}
        for sock in self._server.sockets if self._server is not None else ():
            host, port = sock.getsockname()[:2]
            hosts = [host] if not ipaddress.ip_address(host).is_unspecified else _interfaces(sock.family)
            found |= {(one, port): ipaddress.ip_address(one).is_loopback for one in hosts}
        return tuple(sorted(found, key=lambda one: found[one]))[:MAX_ADDRESSES]

    # -- asking and being asked ------------------------------------------------------------------------------------------

    async def _answer(self, data: bytes) -> bytes:
        try:
            asked = codec.decode(data)
            if not isinstance(asked, Meet) or asked.pnode == self._port.me:
                raise PeerError(f"meet: a {type(asked).__name__} came instead, or our own")
            for link in self._links.get(asked.pnode, ()):
                if link.since + FRESH < asyncio.get_running_loop().time():
                    link.abort()
            connected = await self._connect(asked)
            return codec.encode(self._invitation(asked.pnode, connected))
        except PeerError as error:
            self._port.drop(error)
            return b""

    async def _seek(self, peer: PNodeId) -> None:
        pause = FIRST_PAUSE
        while True:
            if (link := self.link(peer)) is not None:
                await asyncio.wait([link.ended])
                pause = FIRST_PAUSE
            elif self._port.me > peer and pause == FIRST_PAUSE:
                await asyncio.sleep(SECOND_SIDE)
                pause *= 2
            else:
                await self._ask(peer)
                if self.link(peer) is None:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE)

    async def _ask(self, peer: PNodeId) -> None:
        try:
            question = codec.encode(self._invitation(peer))
            answer = codec.decode(await self._port.bus.request(subjects.peer(peer, "meet"), question, ASK_SECONDS))
            if not isinstance(answer, Meet) or answer.pnode != peer:
                raise PeerError(f"meet: a {type(answer).__name__} of another answered for {peer}")
            if not answer.connected:
                await self._connect(answer)
        except PeerError as error:
            self._port.drop(error)
        except DcnrError as error:
            _log.debug("a peer was not met", pnode=self._port.me, peer=peer, error=str(error))

    async def _connect(self, to: Meet) -> bool:
        """Try the addresses of a peer. Whether there is a connection after that."""
        if self.link(to.pnode) is not None:
            return True
        if to.encrypted != self._way.encrypted:
            raise PeerError(f"meet: one of {self._port.me} and {to.pnode} has TLS and the other has not")
        token = _unhex(to.token)
        for host, port in to.addresses[:MAX_ADDRESSES]:
            if await self._call(to.pnode, token, host, port):
                return True
        _log.info("a peer cannot be reached directly; tensors go over the bus", pnode=self._port.me, peer=to.pnode, tried=to.addresses)
        return False

    async def _call(self, peer: PNodeId, token: bytes, host: str, port: int) -> bool:
        loop = asyncio.get_running_loop()
        link = Link(Caller(self._port.me, peer, token, secrets.token_bytes(NONCE)), self._inbox, self._patience)
        tls = _tls(listening=False) if self._way.encrypted else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: link, host, port, ssl=tls)
                await link.ready
        except (OSError, TimeoutError, LaneBroken, UnicodeError, OverflowError, ValueError) as error:
            link.abort()
            _log.debug("no connection", pnode=self._port.me, peer=peer, address=f"{host}:{port}", error=str(error))
            return False
        return True

    async def _measure(self, link: Link) -> None:
        with suppress(LaneBroken):
            rate = await link.measure()
            _log.info("direct connection", pnode=self._port.me, peer=link.peer, mb_per_s=round(rate / 1e6))
        self._changed.set()


def _tls(listening: bool) -> ssl.SSLContext:
    """Encryption without certificates. Raises `ssl.SSLError` where the library has no such cipher."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    if listening:
        context.load_dh_params(str(_GROUP))
    return context


def _interfaces(family: int) -> list[str]:
    """Addresses of this machine. Link-local ones need a scope that only we know."""
    found = [address.address for several in psutil.net_if_addrs().values() for address in several if address.family == family]
    usable = []
    for text in found:
        with suppress(ValueError):  # IPv6 with a scope
            if not ipaddress.ip_address(text).is_link_local:
                usable.append(text)
    return usable


def _unhex(token: str) -> bytes:
    try:
        data = bytes.fromhex(token)
    except ValueError:
        data = b""
    if len(data) != TOKEN:
        raise PeerError(f"meet: a token of {len(data)} bytes")
    return data
