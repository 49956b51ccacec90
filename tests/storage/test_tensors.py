"""Our safetensors files against the package's own."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from dcnr.errors import InvariantError, PeerError
from dcnr.storage.tensors import Float32Array, decode_tensors, encode_tensors


def some_tensors() -> dict[str, Float32Array]:
    """A matrix, a vector, a scalar, an empty one, a transposed one."""
    generator = np.random.Generator(np.random.Philox(1))
    shapes = {"b.weight": (3, 5), "a.bias": (7,), "scalar": (), "é.weight:m": (2, 1, 3)}
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors["turned"] = generator.standard_normal((4, 6), np.float32).T
    return tensors


def same(one: dict[str, Float32Array], two: dict[str, Float32Array]) -> bool:
    """Equal names, shapes and bits."""
    return one.keys() == two.keys() and all(
        one[name].shape == two[name].shape and one[name].tobytes() == two[name].tobytes() for name in one
    )


def test_the_package_reads_what_we_write() -> None:
    """Tensors and metadata."""
    data = b"".join(encode_tensors(some_tensors(), {"session": "run", "network_file": "name: é\n"}))
    assert same(safetensors.numpy.load(data), some_tensors())


def test_we_read_what_the_package_writes() -> None:
    """With its metadata skipped."""
    ours = {name: tensor.copy(order="C") for name, tensor in some_tensors().items()}
    assert same(decode_tensors(safetensors.numpy.save(ours, {"a": "b"})), some_tensors())


def test_nothing_is_copied() -> None:
    """Buffers are the arrays' own memory, and what is read is the file's."""
    array = np.ones((3, 4), np.float32)
    assert np.shares_memory(np.frombuffer(encode_tensors({"a": array})[1], np.float32), array)
    data = b"".join(encode_tensors({"a": array}))
    assert np.shares_memory(decode_tensors(data)["a"], np.frombuffer(data, np.uint8))


def test_data_begins_aligned() -> None:
    """So that arrays can be read in place, whatever the length of the header."""
    for length in range(1, 20):
        assert encode_tensors({"x" * length: np.ones(1, np.float32)})[0].nbytes % 8 == 0


def test_only_float32_is_kept() -> None:
    """Anything else is a bug of ours."""
    with pytest.raises(InvariantError, match="'a' is float16"):
        encode_tensors({"a": np.ones(2, np.float16)})


GOOD = b"".join(encode_tensors({"a": np.ones(4, np.float32)}))
HALF = safetensors.numpy.save({"a": np.ones(4, np.float16)})


@pytest.mark.parametrize("data", [b"", b"1234", GOOD[:-1], GOOD[:20], b"\xff" * 40, HALF, (2).to_bytes(8, "little") + b"[]"])
def test_other_files_are_refused(data: bytes) -> None:
    """Cut off, random, or of another type."""
    with pytest.raises(PeerError, match="not a safetensors file"):
        decode_tensors(data)
