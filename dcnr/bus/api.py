"""Requests and their answers: msgpack `{"ok": {...}}` or `{"error": {"kind", "message", "remedy"}}`.

An error of ours is an answer: it is raised again on the caller's side as the class that `kind` names.
"""

from __future__ import annotations

from typing import Any

from dcnr import errors
from dcnr.bus import codec, subjects
from dcnr.bus.base import Bus
from dcnr.errors import DcnrError, PeerError

TIMEOUT = 10.0
"""Seconds. Verbs only start long work; none waits for it."""

_KINDS: dict[str, type[DcnrError]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, DcnrError) and cls is not errors.NetworkFileError
}


async def call(bus: Bus, verb: str, **fields: Any) -> dict[str, Any]:
    """Ask the orchestrator. Raises `BusUnavailable` if none runs, `WorldError` if none answers in time, or the error that it answered."""
    try:
        request = codec.pack(fields)
    except UnicodeEncodeError as error:  # what a shell passes on of bytes that are no UTF-8
        raise errors.UserError(f"character {error.start + 1} of a text is no Unicode character", "give valid UTF-8 text") from error
    try:
        reply = await bus.request(subjects.api(verb), request, TIMEOUT)
    except errors.BusUnavailable as error:
        raise errors.BusUnavailable("no orchestrator answers", "start one: dcnr up") from error
    return _opened(codec.unpack(reply))


def arguments(data: bytes) -> dict[str, Any]:
    """The fields of a request. Raises `PeerError`."""
    fields = codec.unpack(data)
    if not isinstance(fields, dict):
        raise PeerError("a request is not a map of fields")
    return fields


def ok(fields: dict[str, Any]) -> bytes:
    """A good answer."""
    return codec.pack({"ok": fields})


def failure(error: DcnrError) -> bytes:
    """An error as an answer."""
    return codec.pack({"error": {"kind": _kind(error), "message": error.message, "remedy": error.remedy}})


def _kind(error: DcnrError) -> str:
    """The nearest class that can be raised again from a message and a remedy."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _KINDS)


def _opened(reply: Any) -> dict[str, Any]:
    match reply:
        case {"ok": dict() as fields}:
            return fields
        case {"error": {"kind": str() as kind, "message": str() as message, "remedy": str() | None as remedy}}:
            raise _KINDS.get(kind, DcnrError)(message, remedy)
        case _:
            raise PeerError("the orchestrator's answer is neither ok nor error", "is it of the same version? see: dcnr doctor")
