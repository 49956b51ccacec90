"""Tokenizer and detokenizer nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.errors import UserError
from dcnr.nodes.base import Env, Node
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs, ShapeError
from dcnr.nodes.text import DetokenizerConfig, TokenizerConfig
from dcnr.text.tokenizer import Tokenizer

TEXTS = ["the cat", "a cat and the other cat", ""]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "text").write_text("the cat and the other cat saw a cat\n" * 20)
    Tokenizer.train([folder / "text"], vocab_size=300).save(folder / "tokenizer.json")
    return str(folder / "tokenizer.json")


def build(kind: str, **config: object) -> Node:
    """The node of that config."""
    row = NODE_TYPES[kind]
    return row.build(BuildArgs(kind, row.config.model_validate(config), ((),), ((),), False, (kind,)))


@pytest.fixture
def env() -> Env:
    """Nothing but a backend is needed."""
    return Env(NumpyBackend(), {}, {}, False, "float32", 0, 1, 0, False, 1.0, 1.0)


@pytest.mark.parametrize("boundary", [True, False])
def test_text_survives_the_round_trip(vocabulary: str, env: Env, boundary: bool) -> None:
    """Ids are filled up with pad_id, which the detokenizer leaves out."""
    encode = build("tokenizer", vocab_path=vocabulary, pad_length="32", pad_id=0, use_word_boundary_tokens=boundary)
    decode = build("detokenizer", vocab_path=vocabulary, pad_id=0, use_word_boundary_tokens=boundary)
    ((ids_BT,), _) = encode.forward(env, (TEXTS,))
    assert ids_BT.shape == (3, 32)
    assert ids_BT.dtype == np.int64
    assert decode.forward(env, (ids_BT,))[0][0] == TEXTS
    assert encode.backward(env, (), (None,)) == decode.backward(env, (), (None,)) == (None,)


def test_the_first_word_gets_the_token_it_has_inside_a_text(vocabulary: str, env: Env) -> None:
    """That is what word boundary tokens are for."""
    inside = build("tokenizer", vocab_path=vocabulary, pad_length=1, use_word_boundary_tokens=True)
    at_start = build("tokenizer", vocab_path=vocabulary, pad_length=1)
    wanted = Tokenizer.load(Path(vocabulary)).encode("a cat")[-1]
    assert inside.forward(env, (["cat"],))[0][0].tolist() == [[wanted]]
    assert at_start.forward(env, (["cat"],))[0][0].tolist() != [[wanted]]


def test_long_texts_are_cut(vocabulary: str, env: Env) -> None:
    """To pad_length."""
    whole = Tokenizer.load(Path(vocabulary)).encode(TEXTS[1])
    ((ids,), _) = build("tokenizer", vocab_path=vocabulary, pad_length=3).forward(env, ([TEXTS[1]],))
    assert ids.tolist() == [whole[:3]]


def test_a_detokenizer_reads_the_largest_logit(vocabulary: str, env: Env) -> None:
    """[seq, vocab] → text."""
    ids = Tokenizer.load(Path(vocabulary)).encode("the other cat")
    logits = np.eye(300, dtype=np.float16)[ids][None]
    assert build("detokenizer", vocab_path=vocabulary).forward(env, (logits,))[0][0] == ["the other cat"]


def test_logits_wider_than_the_vocabulary_file_are_read_within_it(vocabulary: str, env: Env) -> None:
    """An lm_head that was rounded up may favour an id that stands for nothing."""
    ids = Tokenizer.load(Path(vocabulary)).encode("the cat")
    logits = np.eye(320, dtype=np.float32)[ids][None]
    logits[..., 310] = 2
    assert build("detokenizer", vocab_path=vocabulary).forward(env, (logits,))[0][0] == ["the cat"]


def test_a_node_without_vocabulary_says_so(env: Env) -> None:
    """By name."""
    with pytest.raises(UserError, match="node 'tokenizer' has no vocabulary"):
        build("tokenizer", pad_length=3).forward(env, (TEXTS,))


def test_shapes() -> None:
    """Text has shape []."""
    encode, decode = NODE_TYPES["tokenizer"].shapes, NODE_TYPES["detokenizer"].shapes
    assert encode(TokenizerConfig(pad_length=8), (None,)) == ((8,),)
    assert decode(DetokenizerConfig(), ((8,),)) == decode(DetokenizerConfig(vocab_size=300), ((8, 300),)) == ((),)
    with pytest.raises(ShapeError, match=r"text \(shape \[\]\), got \[8\]"):
        encode(TokenizerConfig(pad_length=8), ((8,),))
    with pytest.raises(ShapeError, match=r"logits \[seq, 300\], got \[8, 301\]"):
        decode(DetokenizerConfig(vocab_size=300), ((8, 301),))
