"""What the bytes of a message are.

- A message is msgpack `[type name, [field values in order]]`; records inside it are maps. Last fields may be missing if they have defaults.
- `decode` checks every field against the dataclass, so nothing past this file meets a wrong type.
- A message with a tensor is `magic, header length, header, padding to 64, raw bytes`, so that the tensor can be used where it lies.
- What is larger than 8 KiB and not a tensor (network files) is compressed, since a server may allow only 64 KB a message.
- Ids are checked here too: they become parts of subjects and file names.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast, get_args, get_type_hints

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from dcnr.bus.messages import Message
from dcnr.errors import PeerError, UserError
from dcnr.ids import ID_RULE, NetworkId, NodeId, PNodeId, SessionId, is_id

ALIGNMENT = 64
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"DCN1"
_COMPRESSED = b"Z"
"""No message starts with it otherwise: all ours are arrays or maps."""
_COMPRESS_FROM = 8 << 10
_EXPANDED_LIMIT = 64 << 20

_ID_TYPES = (NetworkId, NodeId, PNodeId, SessionId)


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How one message class travels: all its values, the check of them, and where it holds ids."""

    values: Callable[[Any], tuple[Any, ...]]
    check: Callable[[ArgsKwargs], Any]
    ids: Mapping[str, Callable[[Any], str]]


def _form(cls: type) -> _Form:
    names = [field.name for field in dataclasses.fields(cls)]
    return _Form(attrgetter(*names), TypeAdapter(cls).validator.validate_python, {path: attrgetter(path) for path in _id_paths(cls)})


def _id_paths(cls: type) -> list[str]:
    paths = []
    for name, hint in get_type_hints(cls).items():
        if hint in _ID_TYPES:
            paths.append(name)
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            paths += [f"{name}.{inner}" for inner in _id_paths(hint)]
    return paths


_FORMS: Mapping[type, _Form] = {cls: _form(cls) for cls in get_args(Message)}
_CLASSES: Mapping[str, type] = {cls.__name__: cls for cls in _FORMS}


def pack(value: object) -> bytes:
    """Msgpack of plain values and dataclasses, compressed if it is long."""
    data = cast("bytes", msgpack.packb(value, default=_as_map))
    return _COMPRESSED + zlib.compress(data, 1) if len(data) > _COMPRESS_FROM else data


def unpack(data: bytes | memoryview) -> Any:
    """The value that was packed. Raises `PeerError` if `data` is anything else."""
    if bytes(data[:1]) == _COMPRESSED:
        data = _expand(data)
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise PeerError(f"not a message: {error}") from error


def encode(message: Message) -> bytes:
    """Bytes of a message without a tensor."""
    return pack(_as_list(message))


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. Raises `PeerError` that says what is wrong."""
    value = unpack(data)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or not isinstance(value[1], list):
        raise PeerError("not a message: expected [type name, fields]")
    name, fields = value
    cls = _CLASSES.get(name)
    if cls is None:
        raise PeerError(f"unknown message type '{name[:64]}'")
    form = _FORMS[cls]
    try:
        message = form.check(ArgsKwargs(tuple(fields)))
    except ValidationError as error:
        raise PeerError(f"{name}: {_what_is_wrong(cls, error)}") from error
    for path, get in form.ids.items():
        if not is_id(get(message)):
            raise PeerError(f"{name}: {path} is not an id ({ID_RULE})")
    return cast("Message", message)


def encode_with_payload(header: Message, payload: memoryview | bytes) -> bytes:
    """One buffer of header and raw bytes; the bytes start at a multiple of 64. `payload` must be of format 'B'."""
    head = cast("bytes", msgpack.packb(_as_list(header), default=_as_map))
    padding = -(_PREFIX.size + len(head)) % ALIGNMENT
    return b"".join((_PREFIX.pack(_MAGIC, len(head)), head, bytes(padding), payload))


def decode_with_payload(data: bytes) -> tuple[Message, memoryview]:
    """The header and a view of the bytes after it; the view keeps `data` alive. Raises `PeerError`."""
    if len(data) < _PREFIX.size:
        raise PeerError(f"a message of {len(data)} bytes is too short for a header")
    magic, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise PeerError("a tensor message does not start with DCN1")
    start = _PREFIX.size + length
    start += -start % ALIGNMENT
    view = memoryview(data)
    if start > len(data):
        raise PeerError(f"a header of {length} bytes does not fit a message of {len(data)} bytes")
    return decode(view[_PREFIX.size : _PREFIX.size + length]), view[start:]


def _as_list(message: Message) -> tuple[str, tuple[Any, ...]]:
    cls = type(message)
    return cls.__name__, _FORMS[cls].values(message)


def _as_map(value: object) -> dict[str, Any]:
    """What msgpack asks for where it meets a record inside a message."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, int):  # msgpack's own are at most 64 bits wide, what a user types is not
        raise UserError(f"the number {value} is too large", "the largest possible is 2**64 - 1")
    raise TypeError(f"{type(value).__name__} cannot be packed")


def _expand(data: bytes | memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        expanded = stream.decompress(data[1:], _EXPANDED_LIMIT)
    except zlib.error as error:
        raise PeerError(f"not a message: {error}") from error
    if not stream.eof:
        raise PeerError(f"a compressed message is cut short or longer than {_EXPANDED_LIMIT} bytes")
    return expanded


def _what_is_wrong(cls: type, error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    names = [field.name for field in dataclasses.fields(cls)]
    position, *inner = first["loc"] or ("fields",)
    name = names[position] if isinstance(position, int) and position < len(names) else position
    return f"{'.'.join(str(part) for part in (name, *inner))}: {first['msg']}"
