"""Text in and text out: what makes a network usable on text as it stands. Neither takes part in training.

A batch of texts is a list of strings. The vocabulary file is read when the first text comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from pydantic import AliasChoices, Field

from dcnr.backends.base import Array, is_integer
from dcnr.errors import UserError
from dcnr.nodes.base import Env, Node, Parameter, Saved, Shape
from dcnr.nodes.rules import no_flops, one, refuse
from dcnr.nodes.spec import BuildArgs, NodeConfig, NodeType, Size

if TYPE_CHECKING:
    from dcnr.text.tokenizer import Tokenizer


class VocabularyKeys(NodeConfig):
    """`vocab_path`: a tokenizer.json. With `use_word_boundary_tokens` a text is read as if a space stood before it, so that its first word
    has the same token as inside a text; the detokenizer takes that space off again."""

    vocab_path: str | None = None
    vocab_size: Size | None = None
    use_word_boundary_tokens: bool = False


class TokenizerConfig(VocabularyKeys):
    """Ids are cut, or filled up with `pad_id`, to `pad_length`."""

    pad_length: Size = Field(validation_alias=AliasChoices("pad_length", "seq_len"))
    pad_id: int = Field(default=0, ge=0)


class DetokenizerConfig(VocabularyKeys):
    """Takes ids [seq], or logits [seq, vocab], of which it reads the largest that the vocabulary file has. Ids equal to `pad_id` are left
    out, if it is given."""

    pad_id: int | None = Field(default=None, ge=0)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer file behind a node."""

    node: str
    path: str | None
    size: int | None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises `UserError` where the node names no file, or a wrong one."""
        from dcnr.text.vocabulary import load_vocabulary

        if self.path is None:
            raise UserError(f"node '{self.node}' has no vocabulary", "give it vocab_path, the path of a tokenizer.json")
        return load_vocabulary(self.path, self.size)


@dataclass(frozen=True, slots=True)
class Encode:
    """Texts → ids."""

    vocabulary: Vocabulary
    config: TokenizerConfig
    parameters: tuple[Parameter, ...] = field(default=())

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """B strings → ids [B, pad_length]."""
        (texts,) = inputs
        length = self.config.pad_length
        ids_BT = np.full((len(texts), length), self.config.pad_id, dtype=np.int64)
        for row, text in enumerate(texts):
            spaced = f" {text}" if self.config.use_word_boundary_tokens else text
            ids = self.vocabulary.tokenizer.encode(spaced)[:length]
            ids_BT[row, : len(ids)] = ids
        return (env.backend.from_host(ids_BT),), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Text has no gradient."""
        return (None,)


@dataclass(frozen=True, slots=True)
class Decode:
    """Ids or logits → texts."""

    vocabulary: Vocabulary
    config: DetokenizerConfig
    parameters: tuple[Parameter, ...] = field(default=())

    def forward(self, env: Env, inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Saved]:
        """Ids [B, T] or logits [B, T, V] → B strings."""
        x = env.backend.to_host(inputs[0])
        size = self.vocabulary.tokenizer.vocab_size  # logits may be wider, as matrices like multiples of 64
        ids_BT = x if is_integer(x) else x[..., :size].astype(np.float32).argmax(axis=-1)
        texts = [self.vocabulary.tokenizer.decode([int(i) for i in row if i != self.config.pad_id]) for row in ids_BT]
        return ([text.removeprefix(" ") for text in texts] if self.config.use_word_boundary_tokens else texts,), ()

    def backward(self, env: Env, saved: Saved, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Text has no gradient."""
        return (None,)


def _encode_shapes(config: TokenizerConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    if inputs[0] not in (None, ()):
        refuse("text (shape [])", inputs[0])
    return ((config.pad_length,),)


def _decode_shapes(config: DetokenizerConfig, inputs: tuple[Shape | None, ...]) -> tuple[Shape, ...]:
    x = inputs[0]
    if x is None or len(x) not in (1, 2) or (len(x) == 2 and config.vocab_size not in (None, x[1])):
        refuse(f"ids [seq] or logits [seq, {config.vocab_size or 'vocab'}]", x)
    return ((),)


def _encode_build(args: BuildArgs) -> Node:
    return Encode(Vocabulary(args.id, args.config.vocab_path, args.config.vocab_size), args.config)


def _decode_build(args: BuildArgs) -> Node:
    return Decode(Vocabulary(args.id, args.config.vocab_path, args.config.vocab_size), args.config)


TOKENIZER = NodeType(
    name="tokenizer", aliases=(), config=TokenizerConfig, inputs=one, outputs=one, shapes=_encode_shapes,
    build=_encode_build, flops=no_flops, feeds=("text",), text_only=True, summary="Text → ids [pad_length].",
)  # fmt: skip
DETOKENIZER = NodeType(
    name="detokenizer", aliases=(), config=DetokenizerConfig, inputs=one, outputs=one, shapes=_decode_shapes,
    build=_decode_build, flops=no_flops, text_only=True, summary="Ids [seq] or logits [seq, vocab] → text.",
)  # fmt: skip
