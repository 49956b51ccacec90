"""How two PNodes prove to each other, over a fresh connection, that both know a token that came over the bus. Pure.

1. the caller says who it is:          magic, version, name padded to 64 bytes, nonce
2. the listener shows that it knows:   its nonce, HMAC-SHA-256(token, "listener", both nonces, names, binding)
3. the caller shows that it knows:     HMAC-SHA-256(token, "caller", the same)

- The token itself never travels here; the listener lets it be used once, and for a short time.
- `binding` is what TLS derived for this very connection (`tls-unique`, RFC 5929), empty without TLS. Whoever stands in the middle of
  two TLS connections has two bindings and passes neither proof on, so nobody needs a certificate.
- Nobody learns anything from a listener without a token for his name: a wrong name and a wrong proof look alike.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable

from dcnr.errors import PeerError
from dcnr.ids import PNodeId, is_id

NONCE = 32
"""Bytes of a nonce."""
TOKEN = 32
"""Bytes of a token."""
_PROOF = 32
_MAGIC = b"DCNRtcp1"
_HELLO = struct.Struct(f"<8s64s{NONCE}s")

Find = Callable[[PNodeId], bytes | None]
"""The token that this peer was given and has not used."""


class Caller:
    """The side that connected. `expects`: bytes of the next message of the other side; 0 when the handshake is over."""

    def __init__(self, me: PNodeId, peer: PNodeId, token: bytes, nonce: bytes) -> None:
        self.peer = peer
        self.expects = NONCE + _PROOF
        self._me = me
        self._token = token
        self._nonce = nonce

    def opening(self) -> bytes:
        """What is said first."""
        return _HELLO.pack(_MAGIC, self._me.encode(), self._nonce)

    def answer(self, data: bytes, binding: bytes) -> bytes:
        """Our proof. Raises `PeerError` if the listener's is wrong."""
        said = self._nonce + data[:NONCE] + _names(self._me, self.peer) + binding
        if not hmac.compare_digest(data[NONCE:], _proof(self._token, b"listener", said)):
            raise PeerError(f"handshake: who answered at the address of {self.peer} does not know the token")
        self.expects = 0
        return _proof(self._token, b"caller", said)


class Listener:
    """The side that was connected to."""

    def __init__(self, me: PNodeId, find: Find, nonce: bytes) -> None:
        self.peer: PNodeId | None = None
        self.expects = _HELLO.size
        self._me = me
        self._find = find
        self._nonce = nonce
        self._token = b""
        self._said = b""

    def opening(self) -> bytes:
        """The caller speaks first."""
        return b""

    def answer(self, data: bytes, binding: bytes) -> bytes:
        """What to say to a message. Raises `PeerError` if the caller is nobody whom we expect."""
        if self.peer is None:
            return self._greet(data, binding)
        token = self._find(self.peer)
        proof = _proof(self._token, b"caller", self._said)
        if token != self._token or not hmac.compare_digest(data, proof):
            raise PeerError(f"handshake: a caller named {self.peer} does not know the token")
        self.expects = 0
        return b""

    def _greet(self, data: bytes, binding: bytes) -> bytes:
        magic, padded, nonce = _HELLO.unpack(data)
        name = padded.rstrip(b"\0").decode("ascii", "replace")
        if magic != _MAGIC or not is_id(name):
            raise PeerError("handshake: a caller that speaks something else")
        peer = PNodeId(name)
        token = self._find(peer)
        if token is None:
            raise PeerError(f"handshake: nobody named {peer} is expected")
        self.peer, self._token, self.expects = peer, token, _PROOF
        self._said = nonce + self._nonce + _names(peer, self._me) + binding
        return self._nonce + _proof(token, b"listener", self._said)


def _names(caller: PNodeId, listener: PNodeId) -> bytes:
    return f"{caller}/{listener}/".encode()


def _proof(token: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.new(token, side + said, hashlib.sha256).digest()
