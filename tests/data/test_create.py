"""Text becomes a dataset: the same whoever makes it, in how many parts, and however often it was interrupted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dcnr.data import create, shards, units
from dcnr.data.create import Recipe, create_dataset
from dcnr.data.dataset import Dataset
from dcnr.data.manifest import DatasetManifest, dataset_folder, read_manifest, unfinished_folder
from dcnr.data.split import Split, SplitRule, Strategy
from dcnr.errors import AlreadyExists, UserError
from dcnr.text.documents import Reading
from dcnr.text.tokenizer import OnProgress, no_progress
from tests.data.texts import END, ids_of, make_tokenizer, text_of

RECIPE = Recipe(8)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A tokenizer `b`, and 30 files of text beside the data directory."""
    make_tokenizer(tmp_path / "data")
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number:02d}.txt").write_bytes(text_of(40 + number, number).encode())
    return tmp_path / "data"


def files_of(data_dir: Path) -> list[Path]:
    """The files of text."""
    return sorted((data_dir.parent / "text").iterdir())


def make(data_dir: Path, name: str, recipe: Recipe = RECIPE, on_progress: OnProgress = no_progress) -> DatasetManifest:
    """Of those files."""
    return create_dataset(data_dir, name, files_of(data_dir), "b", recipe, on_progress)


def text(data_dir: Path, manifest: DatasetManifest, split: Split) -> str:
    """What a split says."""
    return Dataset.open(data_dir, manifest.name).text(split, 0, manifest.tokens(split))


def documents(data_dir: Path, manifest: DatasetManifest, split: Split) -> list[str]:
    """The documents of a split."""
    *found, rest = text(data_dir, manifest, split).split(END)
    assert rest == ""
    return found


def test_every_document_is_followed_by_its_end(data_dir: Path) -> None:
    """In the order of the files; special tokens count no bytes."""
    made = make(data_dir, "d", Recipe(8, SplitRule(validation=0.0)))
    whole = [file.read_bytes().decode() for file in files_of(data_dir)]
    assert documents(data_dir, made, "train") == whole
    assert (made.documents, made.bytes_of("train")) == (30, sum(len(one.encode()) for one in whole))


@pytest.mark.parametrize("strategy", ["tail", "documents", "files", "windows", "kfold"])
def test_units_and_shards_are_invisible(data_dir: Path, strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens in the same order, however small the parts, also where a file is cut within a document."""
    recipe = Recipe(8, SplitRule(strategy, 0.3, folds=3))
    big = make(data_dir, "big", recipe)
    monkeypatch.setattr(units, "UNIT_BYTES", 300)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 77)
    small = make(data_dir, "small", recipe)
    assert len(small.shards) > len(big.shards) == 2
    for split in ("train", "validation"):
        assert (ids_of(data_dir, small, split) == ids_of(data_dir, big, split)).all()
    assert small.splits == big.splits
    seen = [Dataset.open(data_dir, name).batch("train", 1, 3, 50, 8) for name in ("big", "small")]
    assert (seen[0] == seen[1]).all()


@pytest.mark.parametrize("strategy", ["documents", "kfold"])
def test_a_document_stays_in_its_split_when_text_is_added(data_dir: Path, strategy: Strategy) -> None:
    """And is whole in one."""
    recipe = Recipe(8, SplitRule(strategy, 0.3, folds=3))
    before = make(data_dir, "before", recipe)
    for number in range(20):
        (data_dir.parent / "text" / f"a{number}.txt").write_text(text_of(15, 100 + number))
    after = make(data_dir, "after", recipe)
    for split in ("train", "validation"):
        assert documents(data_dir, before, split)
        assert not Counter(documents(data_dir, before, split)) - Counter(documents(data_dir, after, split))


def test_folds_are_everything_once(data_dir: Path) -> None:
    """The validation splits of all folds are the text."""
    made = [make(data_dir, f"f{fold}", Recipe(8, SplitRule("kfold", folds=3, fold=fold))) for fold in range(3)]
    found = [document for one in made for document in documents(data_dir, one, "validation")]
    assert Counter(found) == Counter(file.read_bytes().decode() for file in files_of(data_dir))


def test_files_go_by_their_names(data_dir: Path) -> None:
    """Another text under the same name stays where it was."""
    recipe = Recipe(8, SplitRule("files", 0.3))
    before = make(data_dir, "before", recipe)
    for file in files_of(data_dir):
        file.write_bytes(file.read_bytes() + b" more")
    after = make(data_dir, "after", recipe)
    grown = [f"{document} more" for document in documents(data_dir, before, "validation")]
    assert documents(data_dir, after, "validation") == grown


def test_named_files_are_for_validation(data_dir: Path) -> None:
    """Whatever else is read, and where it is read a second time by a folder."""
    file = files_of(data_dir)[4]
    made = make(data_dir, "d", Recipe(8, SplitRule("given"), given=(str(file),)))
    assert documents(data_dir, made, "validation") == [file.read_bytes().decode()]
    assert made.documents == 30


@pytest.mark.parametrize("rest", ["text", "text/../text/*.txt", "linked"])
def test_a_file_is_the_same_under_every_path(data_dir: Path, monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    """What is for validation is not trained on because it was named in another way."""
    monkeypatch.chdir(data_dir.parent)
    (data_dir.parent / "linked").symlink_to("text")
    file = files_of(data_dir)[4]
    made = create_dataset(data_dir, "d", [rest], "b", Recipe(8, SplitRule("given"), given=(str(file),)))
    assert documents(data_dir, made, "validation") == [file.read_bytes().decode()]
    assert made.documents == made.files == 30


def test_a_split_by_files_does_not_depend_on_how_they_were_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a folder, or one by one from within it."""
    recipe = Recipe(8, SplitRule("files", 0.3))
    before = make(data_dir, "before", recipe)
    monkeypatch.chdir(data_dir.parent / "text")
    after = create_dataset(data_dir, "after", sorted(file.name for file in files_of(data_dir)), "b", recipe)
    assert after.shards == before.shards


def test_separators_cut_documents(data_dir: Path) -> None:
    """The separator itself is gone, and an empty document is none."""
    files_of(data_dir)[0].write_text("one\n---\ntwo\n---\n\n---\nthree and more")
    recipe = Recipe(2, SplitRule(validation=0.0), Reading(separator="\n---\n"))
    made = create_dataset(data_dir, "d", files_of(data_dir)[:1], "b", recipe)
    assert documents(data_dir, made, "train") == ["one", "two", "three and more"]


class Interrupted(Exception):
    """Somebody pressed Ctrl-C."""


def interrupted_after(done_share: float) -> OnProgress:
    """Stops a creation when so much is done."""

    def on_progress(done: int, total: int) -> None:
        if done > done_share * total:
            raise Interrupted

    return on_progress


def test_an_interrupted_creation_goes_on_where_it_was(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were done are not tokenised again, and the result is that of a creation that was not interrupted."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    whole = make(data_dir, "whole")
    with pytest.raises(Interrupted):
        make(data_dir, "d", on_progress=interrupted_after(0.6))
    assert not dataset_folder(data_dir, "d").exists()
    done = sorted(path.name for path in unfinished_folder(data_dir, "d").glob("0*.json"))
    assert done
    encoded: list[int] = []

    def watched(work: Path, number: int, *rest: object) -> None:
        encoded.append(number)
        units.encode_unit(work, number, *rest)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(create, "encode_unit", watched)
    made = make(data_dir, "d")
    assert encoded
    assert not {f"{number:05d}.json" for number in encoded} & set(done)
    assert replace(made, name="whole") == whole
    assert not unfinished_folder(data_dir, "d").exists()


@pytest.mark.parametrize("recipe", [RECIPE, Recipe(8, SplitRule("files", 0.3))])
def test_another_recipe_or_another_text_begins_anew(data_dir: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """What was done is of no use then."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    with pytest.raises(Interrupted):
        make(data_dir, "d", on_progress=interrupted_after(0.6))
    if recipe is RECIPE:
        files_of(data_dir)[0].write_text("now it is another one")
    made = make(data_dir, "d", recipe)
    assert replace(made, name="whole") == make(data_dir, "whole", recipe)


def test_who_is_killed_while_beginning_anew_can_go_back_to_the_old_recipe(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of what was done is gone, and does not count as done."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    whole = make(data_dir, "whole")
    with pytest.raises(Interrupted):
        make(data_dir, "d", on_progress=interrupted_after(0.6))
    unlink = Path.unlink

    def once(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name.endswith("-train.ids"):
            raise Interrupted

    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", once)
        with pytest.raises(Interrupted):
            make(data_dir, "d", Recipe(8, SplitRule(validation=0.0)))
    assert replace(make(data_dir, "d"), name="whole") == whole


def test_bad_input_leaves_nothing_also_where_much_was_done(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and byte are named, though other threads were at work."""
    monkeypatch.setattr(units, "UNIT_BYTES", 500)
    files_of(data_dir)[-1].write_bytes(b"good \xff bad")
    with pytest.raises(UserError, match=r"29\.txt: invalid UTF-8 at byte 5"):
        make(data_dir, "d")
    assert not list((data_dir / "datasets").iterdir())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(0), "sequence length of 0"),
        (Recipe(8, SplitRule(validation=1.0)), "validation 1.0 is not possible"),
        (Recipe(8, SplitRule("kfold", folds=3, fold=3)), "fold 3 of 3 is not possible"),
        (Recipe(8, reading=Reading(separator="")), "separator is empty"),
        (Recipe(8, SplitRule("given")), "for validation names no sources"),
        (Recipe(8, given=("text",)), "for validation names sources, and is by tail"),
        (Recipe(100_000), "train split has"),
    ],
)
def test_what_cannot_be_is_refused(data_dir: Path, recipe: Recipe, message: str) -> None:
    """In words, and nothing is left."""
    with pytest.raises(UserError, match=message):
        make(data_dir, "d", recipe)
    assert not list(data_dir.glob("datasets/*"))


def test_sources_may_be_shown_under_other_names(data_dir: Path) -> None:
    """Such as stdin's."""
    assert make(data_dir, "d", Recipe(8, shown=("-",))).sources == ("-",)
    assert read_manifest(data_dir, "d").sources == ("-",)
    with pytest.raises(AlreadyExists):
        make(data_dir, "d")
