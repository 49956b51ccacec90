"""Tokenizers: what goes in comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.text.preprocess import read_pieces
from dcnr.text.tokenizer import (
    MAX_VOCABULARY,
    Kind,
    Tokenizer,
    add_tokenizer,
    delete_tokenizer,
    fingerprint,
    import_tokenizer,
    list_tokenizers,
    open_tokenizer,
    tokenizer_path,
)

HARD = "a\n\tb\r\nc\0 d  e\n\n   f \u00e9 e\u0301 😀 👩\u200d👩\u200d👧 \ufeff \u2028 中文 'll don't 123 x"
ALPHABET = sorted(set(HARD))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with everything hard in it."""
    file = tmp_path_factory.mktemp("corpus") / "hard.txt"
    file.write_bytes((HARD + " the cat and the hat sat on the mat\n").encode() * 40)
    return file


@pytest.fixture(scope="module")
def bpe(corpus: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of 300 tokens."""
    return Tokenizer.train([corpus], "bpe", 300)


@pytest.fixture(scope="module")
def char(corpus: Path) -> Tokenizer:
    """A character-level tokenizer."""
    return Tokenizer.train([corpus], "char")


@settings(deadline=None)
@given(text=st.text())
def test_bpe_gives_back_every_text(bpe: Tokenizer, text: str) -> None:
    """Also text that it has never seen: it knows every byte."""
    assert bpe.decode(bpe.encode(text)) == text


@settings(deadline=None)
@given(text=st.text(alphabet=ALPHABET))
def test_char_gives_back_every_text_of_its_characters(char: Tokenizer, text: str) -> None:
    """One id per character, newlines, NUL and joiners among them."""
    ids = char.encode(text)
    assert len(ids) == len(text)
    assert char.decode(ids) == text


@pytest.mark.parametrize("text", ["", "\n", "\r\n", "\t\0\t", "e\u0301", "😀", "  ", " x", "x ", HARD])
def test_named_hard_texts_come_back(bpe: Tokenizer, char: Tokenizer, text: str) -> None:
    """The ones people trip over."""
    assert bpe.decode(bpe.encode(text)) == text
    assert char.decode(char.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_it_is_a_file_of_the_library(corpus: Path, tmp_path: Path, kind: Kind) -> None:
    """What is saved loads here and in the `tokenizers` library itself, with the same ids."""
    trained = Tokenizer.train([corpus], kind, 300)
    trained.save(tmp_path / "deep" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "deep" / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "deep" / "tokenizer.json"))
    assert (loaded.kind, loaded.vocab_size) == (kind, trained.vocab_size)
    assert loaded.encode(HARD) == trained.encode(HARD) == library.encode(HARD).ids
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tokenizer.json"]


def test_training_learns_what_is_frequent(bpe: Tokenizer) -> None:
    """Fewer tokens than bytes, and the vocabulary that was asked for."""
    assert bpe.vocab_size == 300
    assert len(bpe.encode("the cat and the hat")) < len("the cat and the hat") / 2


def test_training_twice_gives_the_same(corpus: Path, tmp_path: Path) -> None:
    """Byte for byte."""
    for name in ("one", "two"):
        Tokenizer.train([corpus], "bpe", 300).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_characters_are_numbered_by_code_point(tmp_path: Path) -> None:
    """So the same text always gives the same ids."""
    (tmp_path / "text").write_text("cab")
    assert Tokenizer.train([tmp_path / "text"], "char").encode("abc") == [0, 1, 2]


def test_progress_counts_bytes_to_the_end(corpus: Path) -> None:
    """The last call says that all was read."""
    seen: list[tuple[int, int]] = []
    Tokenizer.train([corpus, corpus], "char", on_progress=lambda done, total: seen.append((done, total)))
    size = 2 * corpus.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


@settings(deadline=None)
@given(size=st.integers(1, 40))
def test_tokens_of_the_pieces_are_the_tokens_of_the_file(bpe: Tokenizer, corpus: Path, size: int) -> None:
    """Streaming is invisible in the ids."""
    text = corpus.read_bytes().decode()
    streamed = [token for piece in read_pieces(corpus, size) for token in bpe.encode(piece)]
    assert streamed == bpe.encode(text)


def test_a_long_line_without_blanks_is_one_text(bpe: Tokenizer, tmp_path: Path) -> None:
    """A megabyte without a place to cut."""
    text = "abcdefgh" * (1 << 17)
    (tmp_path / "line").write_text(text)
    ids = [token for piece in read_pieces(tmp_path / "line") for token in bpe.encode(piece)]
    assert bpe.decode(ids) == text


def test_an_unknown_character_is_named(char: Tokenizer) -> None:
    """With its code point, and what to do."""
    with pytest.raises(UserError, match=r"does not know 'ß' \(U\+00DF\).*bpe"):
        char.encode("a ß")


def test_half_a_surrogate_is_no_text(bpe: Tokenizer) -> None:
    """As it comes from a file name that is not UTF-8."""
    with pytest.raises(UserError, match="character 1 of the text is half a surrogate"):
        bpe.encode("a\udcff")


@pytest.mark.parametrize("ids", [[300], [0, -1]])
def test_an_id_outside_the_vocabulary_is_an_error(bpe: Tokenizer, ids: list[int]) -> None:
    """The library would drop it in silence."""
    with pytest.raises(UserError, match=f"token id {ids[-1]} is not in the vocabulary.*0 to 299"):
        bpe.decode(ids)


@pytest.mark.parametrize(("kind", "size"), [("bpe", 255), ("bpe", MAX_VOCABULARY + 1), ("char", MAX_VOCABULARY + 1)])
def test_an_impossible_vocabulary_is_refused(corpus: Path, kind: Kind, size: int) -> None:
    """Less than the bytes, or more than 256K."""
    with pytest.raises(UserError, match=f"a vocabulary of {size} is not possible"):
        Tokenizer.train([corpus], kind, size)


def test_too_many_characters_are_refused(corpus: Path) -> None:
    """Nothing is cut off in silence."""
    with pytest.raises(UserError, match=f"has {len(set(corpus.read_bytes().decode()))} different characters"):
        Tokenizer.train([corpus], "char", 5)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_an_empty_text_teaches_nothing(tmp_path: Path, kind: Kind) -> None:
    """Both kinds refuse it, also where there are files that say so."""
    (tmp_path / "empty").touch()
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    for file in ("empty", "empty.jsonl"):
        with pytest.raises(UserError, match="the text is empty"):
            Tokenizer.train([tmp_path / file], kind)


@pytest.mark.parametrize("content", ["", "nope", "{}", json.dumps({"model": {"type": "BPE"}})])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    """Whatever is wrong with it."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(NotFound):
        Tokenizer.load(tmp_path / "missing.json")


def test_a_tokenizer_is_its_text(char: Tokenizer, bpe: Tokenizer) -> None:
    """What is written is read back as the same; what is not one is told with where it came from."""
    for one in (char, bpe):
        assert Tokenizer.parse(one.to_json().encode(), "here").to_json() == one.to_json()
    assert char.to_json() != bpe.to_json()
    with pytest.raises(UserError, match=r"over there is not a tokenizer\.json"):
        Tokenizer.parse(b"\xff", "over there")


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_special_tokens_stand_for_no_text(corpus: Path, kind: Kind) -> None:
    """They have the last ids; text that looks like one is text, and one of them ends documents."""
    trained = Tokenizer.train([corpus], kind, 310, special=("<|user|>", "<|endoftext|>"))
    plain = Tokenizer.train([corpus], kind, 308)
    size = trained.vocab_size
    assert trained.special == {"<|user|>": size - 2, "<|endoftext|>": size - 1}
    assert (trained.end_id, plain.end_id, plain.special) == (size - 1, None, {})
    assert trained.encode(HARD) == plain.encode(HARD)
    assert trained.decode([*trained.encode("hat"), size - 1]) == "hat<|endoftext|>"
    if kind == "bpe":
        ids = trained.encode("a <|endoftext|> b")
        assert size - 1 not in ids
        assert trained.decode(ids) == "a <|endoftext|> b"


def test_what_the_text_has_taught_is_no_special_token(tmp_path: Path) -> None:
    """It would stand for text."""
    (tmp_path / "text").write_text("### " * 1000)
    with pytest.raises(UserError, match="'###' cannot be a special token: the tokenizer has learned it"):
        Tokenizer.train([tmp_path / "text"], "bpe", 300, special=("<a>", "###"))


@pytest.mark.parametrize("special", [("",), ("x",), ("<a>", "<a>")])
def test_what_cannot_be_a_special_token_is_refused(corpus: Path, special: tuple[str, ...]) -> None:
    """Empty, one character, twice."""
    with pytest.raises(UserError, match="cannot be a special token"):
        Tokenizer.train([corpus], "bpe", 300, special=special)


@settings(deadline=None)
@given(text=st.text())
def test_tokens_know_how_many_bytes_they_stand_for(bpe: Tokenizer, text: str) -> None:
    """Their sum is the text's size in UTF-8, without decoding it."""
    assert bpe.token_bytes()[bpe.encode(text)].sum() == len(text.encode())


def test_characters_know_their_bytes_and_special_tokens_have_none(corpus: Path) -> None:
    """As UTF-8 counts them."""
    trained = Tokenizer.train([corpus], "char", special=("<|endoftext|>",))
    sizes = trained.token_bytes()
    assert sizes[trained.encode(HARD)].sum() == len(HARD.encode())
    assert sizes[trained.special["<|endoftext|>"]] == 0


def test_the_library_gives_the_same_characters(char: Tokenizer, tmp_path: Path) -> None:
    """The look-up that is used instead is only faster."""
    char.save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert char.encode(HARD * 3) == library.encode(HARD * 3).ids


def test_a_long_line_of_words_streams_as_it_is(bpe: Tokenizer, tmp_path: Path) -> None:
    """Half a megabyte without a newline: the pieces are small, and nothing is lost."""
    text = HARD.replace("\n", "") * 4_000
    (tmp_path / "line").write_bytes(text.encode())
    pieces = list(read_pieces(tmp_path / "line"))
    assert max(map(len, pieces)) < 200_000
    assert "".join(bpe.decode(bpe.encode(piece)) for piece in pieces) == text


def library_of(change: str) -> tokenizers.Tokenizer:
    """Another tool's tokenizer that is of no use here."""
    library = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=change == "prefix")
    library.decoder = decoders.ByteLevel()
    match change:
        case "lowercase":
            library.normalizer = normalizers.Lowercase()
        case "words":
            library.model = models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
        case "dropout":
            library.model.dropout = 0.1
        case "metaspace":
            library.decoder = decoders.Metaspace()
        case "letters":
            library.model = models.BPE(vocab={"a": 0, "X": 1, "\u0120": 2}, merges=[])
        case "bytes":
            alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter != "\u00c8"]
            library.model = models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
        case "strip":
            library.add_tokens([tokenizers.AddedToken("<m>", lstrip=True)])
        case "cut":
            library.enable_truncation(4)
            library.enable_padding(length=6, pad_token="!")
    return library


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", None),
        ("cut", None),
        ("letters", "changes text"),
        ("bytes", "changes text: '\u0200"),
        ("strip", "changes text: ' <m>"),
        ("prefix", "changes text: 'X' comes back as"),
        ("lowercase", "changes text"),
        ("words", "kind WordPiece that is not byte-level"),
        ("metaspace", "kind bpe that is not byte-level"),
        ("dropout", "differently every time"),
    ],
)
def test_an_imported_tokenizer_gives_every_text_back_or_is_refused(tmp_path: Path, change: str, message: str | None) -> None:
    """And is kept byte for byte."""
    library_of(change).save(str(tmp_path / "theirs.json"))
    if message is None:
        kept = import_tokenizer(tmp_path / "data", "t", tmp_path / "theirs.json")
        assert kept.read_bytes() == (tmp_path / "theirs.json").read_bytes()
        opened = open_tokenizer(tmp_path / "data", "t")
        assert opened.vocab_size == 256
        assert opened.decode(opened.encode(HARD)) == HARD
        assert len(opened.encode("a")) == 1
        return
    with pytest.raises(UserError, match=message):
        import_tokenizer(tmp_path / "data", "t", tmp_path / "theirs.json")
    assert list_tokenizers(tmp_path / "data") == []


def test_a_word_level_tokenizer_that_is_not_of_characters_is_refused(tmp_path: Path) -> None:
    """Its tokens are words."""
    tokenizers.Tokenizer(models.WordLevel({"word": 0})).save(str(tmp_path / "theirs.json"))
    with pytest.raises(UserError, match="its token 'word' is not one character"):
        import_tokenizer(tmp_path / "data", "t", tmp_path / "theirs.json")


@pytest.mark.parametrize("decoder", [None, decoders.CTC(), decoders.Replace("b", " ")])
def test_a_tokenizer_of_characters_that_changes_them_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    """Blanks between them, two of the same as one, another one in the place of one."""
    library = tokenizers.Tokenizer(models.WordLevel({character: i for i, character in enumerate("abc ")}))
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "good.json"))
    import_tokenizer(tmp_path, "good", tmp_path / "good.json")
    library.decoder = decoder
    library.save(str(tmp_path / "theirs.json"))
    with pytest.raises(UserError, match=r"the tokenizer changes text: '.*' comes back as"):
        import_tokenizer(tmp_path, "t", tmp_path / "theirs.json")


def test_a_data_directory_keeps_tokenizers_by_name(char: Tokenizer, bpe: Tokenizer, tmp_path: Path) -> None:
    """Add, list, open, delete; a name is taken once; each has its own fingerprint."""
    assert list_tokenizers(tmp_path) == []
    add_tokenizer(tmp_path, "b", bpe)
    add_tokenizer(tmp_path, "a", char)
    assert list_tokenizers(tmp_path) == ["a", "b"]
    assert open_tokenizer(tmp_path, "b").encode("hat") == bpe.encode("hat")
    assert fingerprint(tmp_path, "a") != fingerprint(tmp_path, "b")
    with pytest.raises(AlreadyExists, match="'a' already"):
        add_tokenizer(tmp_path, "a", bpe)
    delete_tokenizer(tmp_path, "a")
    assert not tokenizer_path(tmp_path, "a").parent.exists()
    with pytest.raises(NotFound, match=r"no tokenizer 'a' \(there are: b\)"):
        delete_tokenizer(tmp_path, "a")


def test_a_name_cannot_leave_the_data_directory(tmp_path: Path) -> None:
    """Names are ids."""
    with pytest.raises(UserError, match="not a valid tokenizer name"):
        tokenizer_path(tmp_path, "../x")
