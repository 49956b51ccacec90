"""Both sides know the token or nobody gets in."""

from __future__ import annotations

import pytest

from dcnr.bus.lanes.handshake import NONCE, TOKEN, Caller, Listener
from dcnr.errors import PeerError
from dcnr.ids import PNodeId

A, B = PNodeId("a"), PNodeId("b")
KEY, WRONG = bytes(range(TOKEN)), bytes(TOKEN)
N1, N2 = b"1" * NONCE, b"2" * NONCE


def shake(caller: Caller, listener: Listener, bindings: tuple[bytes, bytes] = (b"", b"")) -> None:
    """The three messages."""
    answer = listener.answer(caller.opening(), bindings[1])
    assert len(answer) == caller.expects
    proof = caller.answer(answer, bindings[0])
    assert len(proof) == listener.expects
    assert listener.answer(proof, bindings[1]) == b""


def test_who_knows_the_token_is_let_in() -> None:
    """And each side knows who the other is."""
    caller, listener = Caller(A, B, KEY, N1), Listener(B, {A: KEY}.get, N2)
    shake(caller, listener, (b"tls", b"tls"))
    assert (listener.peer, caller.peer, listener.expects, caller.expects) == (A, B, 0, 0)


def test_the_token_never_travels() -> None:
    """Nor do two handshakes look alike."""
    said = []
    for nonce in (N1, N2):
        caller, listener = Caller(A, B, KEY, nonce), Listener(B, {A: KEY}.get, nonce)
        answer = listener.answer(caller.opening(), b"")
        said.append((caller.opening(), answer, caller.answer(answer, b"")))
    assert all(one != other for one, other in zip(*said, strict=True))
    assert KEY not in b"".join(part for one in said for part in one)


def test_a_caller_notices_a_listener_without_the_token() -> None:
    """Somebody else may listen at the address."""
    caller, listener = Caller(A, B, KEY, N1), Listener(B, {A: WRONG}.get, N2)
    with pytest.raises(PeerError, match="does not know the token"):
        caller.answer(listener.answer(caller.opening(), b""), b"")


def test_a_listener_refuses_a_caller_without_the_token() -> None:
    """Also one that does not care about the listener's proof."""
    listener = Listener(B, {A: KEY}.get, N2)
    listener.answer(Caller(A, B, WRONG, N1).opening(), b"")
    with pytest.raises(PeerError, match="a caller named a does not know the token"):
        listener.answer(bytes(listener.expects), b"")


def test_a_token_that_was_used_meanwhile_lets_nobody_in() -> None:
    """One token, one connection."""
    tokens = {A: KEY}
    caller, listener = Caller(A, B, KEY, N1), Listener(B, tokens.get, N2)
    proof = caller.answer(listener.answer(caller.opening(), b""), b"")
    del tokens[A]
    with pytest.raises(PeerError, match="does not know the token"):
        listener.answer(proof, b"")


def test_whoever_stands_between_two_tls_connections_passes_nothing_on() -> None:
    """Each connection has its own binding."""
    with pytest.raises(PeerError, match="does not know the token"):
        shake(Caller(A, B, KEY, N1), Listener(B, {A: KEY}.get, N2), (b"one", b"other"))


def test_an_own_answer_thrown_back_proves_nothing() -> None:
    """The two proofs differ in who gives them."""
    caller, listener = Caller(A, B, KEY, N1), Listener(B, {A: KEY}.get, N2)
    answer = listener.answer(caller.opening(), b"")
    with pytest.raises(PeerError, match="does not know the token"):
        listener.answer(answer[NONCE:], b"")


@pytest.mark.parametrize("hello", [bytes(104), b"x" * 104, Caller(PNodeId("no such name!"), B, KEY, N1).opening()])
def test_other_protocols_and_unknown_names_are_refused(hello: bytes) -> None:
    """Ports are found by all sorts of programs."""
    listener = Listener(B, {A: KEY}.get, N2)
    assert len(hello) == listener.expects
    with pytest.raises(PeerError, match="handshake"):
        listener.answer(hello, b"")
    with pytest.raises(PeerError, match="nobody named c is expected"):
        listener.answer(Caller(PNodeId("c"), B, KEY, N1).opening(), b"")
