"""One network in a folder, for other tools and other clusters: weights, network file and tokenizer, out and in again.

    <folder>/model.safetensors     the weights, under the names of the network file, float32
    <folder>/network.yml           the text that the session was created with
    <folder>/tokenizer.json        of the `tokenizers` library; missing where nobody knows the session's tokenizer
    <folder>/dcnr.json             what it is, and the sha256 of the others: `Description`

Rule 1: a folder is written whole or not at all.
Rule 2: a tied matrix stands once, under its owner's name; `tied` in the description and in the safetensors metadata says who else reads it.
Rule 3: a folder is checked before anything of it is kept: hashes, tensors against the network, tokenizer against the vocabulary. Everything
that is wrong with the tensors is told at once.
Rule 4: what is imported is a checkpoint like any other, at the step at which it was exported; its moments are zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from dcnr import __version__
from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP
from dcnr.data.dataset import Dataset
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import NEVER, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.network.instantiate import instantiate
from dcnr.network.load import load_graph
from dcnr.nodes.base import Shape
from dcnr.optim.decide import initial_state
from dcnr.optim.hyper import Hyper
from dcnr.optim.update import moments_of
from dcnr.passes import prepare
from dcnr.storage.base import Storage
from dcnr.storage.checkpoint import (
    Manifest,
    manifest_keys,
    part_key,
    read_manifest,
    read_tensors,
    sha256_of,
    tokenizer_key,
    write_manifest,
    write_part,
)
from dcnr.storage.file import Buffer, write_file
from dcnr.storage.tensors import Float32Array, encode_tensors
from dcnr.text.tokenizer import Tokenizer

FileName = Literal["model.safetensors", "network.yml", "tokenizer.json"]

MODEL: Final = "model.safetensors"
NETWORK: Final = "network.yml"
TOKENIZER: Final = "tokenizer.json"
DESCRIPTION = "dcnr.json"
AGAIN = "export it again"
MAX_TOLD = 8
"""So many problems of the tensors are told one by one."""


class Training(BaseModel):
    """How the session trained, so that an import can go on so."""

    model_config = ConfigDict(frozen=True)

    total_steps: int = Field(ge=1, le=MAX_STEP)
    batch: int = Field(ge=1, le=MAX_BATCH)
    micro_batches: int = Field(ge=1)
    seed: int = Field(ge=0, le=MAX_SEED)
    fuse: bool
    hyper: Hyper

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch % self.micro_batches:
            raise ValueError(f"a batch of {self.batch} cannot be cut into {self.micro_batches} equal micro-batches")
        return self


class Description(BaseModel):
    """`dcnr.json`. `tokenizer`: its name where it was made, if that is known. `tied`: which parameter is which other one."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1]
    dcnr_version: str
    session: str
    step: int = Field(ge=0, le=MAX_STEP)
    network: str
    dataset: str
    tokenizer: str | None
    training: Training
    tied: dict[str, str]
    files: dict[FileName, str]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that was read and fits together. `graph` is the prepared one, unfused."""

    description: Description
    network_file: str
    graph: Graph
    weights: Mapping[str, Float32Array]
    tokenizer: Tokenizer | None


# -- out -------------------------------------------------------------------------------------------------------------------


async def export_folder(storage: Storage, data_dir: Path, session: SessionId, step: int | None, folder: Path) -> tuple[Description, str]:
    """Write one checkpoint, the newest if `step` is None. Returns what was written, and in words why there is no tokenizer, if so."""
    folder = folder.absolute()
    _check_free(folder)
    manifest = await read_manifest(storage, session, step)
    graph = prepare(load_graph(manifest.network_file, f"the network of {session}"), fuse=False)
    weights = await read_tensors(storage, manifest, shapes_of(graph))
    tied = tied_in(graph)
    metadata = {"format": "pt", "network": manifest.network, "session": session, "step": str(manifest.step), "tied": json.dumps(tied)}
    files: dict[str, Sequence[Buffer]] = {MODEL: encode_tensors(weights, metadata), NETWORK: [manifest.network_file.encode()]}
    name, missing = None, ""
    try:
        name, tokenizer = await _tokenizer_of(storage, data_dir, manifest)
        files[TOKENIZER] = [tokenizer.to_json().encode()]
    except UserError as error:
        missing = str(error)
    hashes = {file: await asyncio.to_thread(sha256_of, data) for file, data in files.items()}
    description = _describe(manifest, name, tied, hashes)
    files[DESCRIPTION] = [description.model_dump_json(indent=2).encode() + b"\n"]
    await asyncio.to_thread(_write_folder, folder, files)
    return description, missing


def _describe(manifest: Manifest, tokenizer: str | None, tied: dict[str, str], hashes: Mapping[str, str]) -> Description:
    training = {name: getattr(manifest, name) for name in Training.model_fields}
    fields = {name: getattr(manifest, name) for name in ("session", "step", "network", "dataset")}
    return Description.model_validate(
        {
            "version": 1,
            "dcnr_version": __version__,
            **fields,
            "tokenizer": tokenizer,
            "training": training,
            "tied": tied,
            "files": hashes,
        }
    )


async def tokenizer_of(storage: Storage, data_dir: Path, manifest: Manifest) -> Tokenizer:
    """What the ids of a session mean: the tokenizer that it was imported with, else that of its dataset. Raises `UserError`."""
    return (await _tokenizer_of(storage, data_dir, manifest))[1]


async def imported_tokenizer(storage: Storage, session: SessionId) -> Tokenizer | None:
    """The tokenizer that `session` was imported with, if it was."""
    key = tokenizer_key(session)
    if not await storage.exists(key):
        return None
    return Tokenizer.parse(bytes(await storage.get(key)), f"{storage.url}/{key}")


async def _tokenizer_of(storage: Storage, data_dir: Path, manifest: Manifest) -> tuple[str | None, Tokenizer]:
    own = await imported_tokenizer(storage, manifest.session)
    if own is not None:
        return None, own
    dataset = await asyncio.to_thread(Dataset.open, data_dir, manifest.dataset, storage)
    return dataset.manifest.tokenizer, await asyncio.to_thread(dataset.tokenizer)


def shapes_of(graph: Graph) -> dict[str, Shape]:
    """The shape of every parameter of a prepared graph, by its name in checkpoints."""
    return {
        f"{part.node}.{part.name}": (part.stop - part.start, *parameter.shape[1:])
        for node in graph.nodes
        for parameter in instantiate(node).parameters
        for part in parameter.parts
    }


def tied_in(graph: Graph) -> dict[str, str]:
    """The parameter of every tied node, and the one of its owner that it is."""
    return {f"{node.id}.weight": f"{node.tied_to}.weight" for node in graph.nodes if node.tied_to is not None}


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise AlreadyExists(f"{folder} exists and is not an empty folder", "choose another one, or remove it")


def _write_folder(folder: Path, files: Mapping[str, Sequence[Buffer]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as outer:
        hidden = Path(outer) / folder.name
        for name, data in files.items():
            write_file(hidden / name, *data)
        _check_free(folder)
        hidden.rename(folder)


# -- in --------------------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Folder:
    """All of an exported folder, checked. Blocks; raises `UserError` that says which file is wrong and how."""
    description = _read_description(folder)
    for name in (MODEL, NETWORK, TOKENIZER):
        _check_hash(folder / name, description.files.get(name))
    text = _text_of(folder / NETWORK)
    graph = prepare(load_graph(text, str(folder / NETWORK)), fuse=False)
    weights = _read_weights(folder / MODEL, graph)
    tokenizer = None
    if TOKENIZER in description.files:
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        _check_vocabulary(folder / TOKENIZER, tokenizer, load_graph(text, str(folder / NETWORK)))
    return Folder(description, text, graph, weights, tokenizer)


async def import_folder(storage: Storage, folder: Folder, session: SessionId, dataset: str | None = None) -> Manifest:
    """Keep `folder` as the checkpoint of a new session, which trains on `dataset` (None: the one of that name where it was exported)."""
    taken = await manifest_keys(storage, session)
    if taken:
        raise AlreadyExists(f"there are checkpoints of a session '{session}' in {storage.url}", "choose another name")
    description, training, graph = folder.description, folder.description.training, folder.graph
    writer = PNodeId(f"import-{description.files[MODEL][:12]}")  # so that two imports under one name never write the same part
    part = await write_part(
        storage, part_key(session, description.step, writer, NEVER), _with_moments(folder.weights, graph, training.hyper)
    )
    float16 = any("float16" in (node.param_precision, node.activation_precision) for node in graph.nodes)
    manifest = Manifest(
        session=session,
        network=graph.name,
        network_file=folder.network_file,
        dataset=dataset if dataset is not None else description.dataset,
        step=description.step,
        epoch=NEVER,
        seed=training.seed,
        total_steps=training.total_steps,
        batch=training.batch,
        micro_batches=training.micro_batches,
        fuse=training.fuse,
        hyper=training.hyper.model_dump(),
        state=initial_state(training.hyper, float16),
        parts=(part,),
        kernel="imported",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dcnr_version=__version__,
    )
    if folder.tokenizer is not None:
        await storage.put(tokenizer_key(session), folder.tokenizer.to_json().encode())
    await write_manifest(storage, manifest)
    return manifest


def _with_moments(weights: Mapping[str, Float32Array], graph: Graph, hyper: Hyper) -> dict[str, Float32Array]:
    """The weights, and for each the zeros that its optimizer starts with."""
    moments = {
        f"{part.node}.{part.name}:{moment}": np.zeros_like(weights[f"{part.node}.{part.name}"])
        for node in graph.nodes
        for parameter in instantiate(node).parameters
        for part in parameter.parts
        for moment in moments_of(hyper, node.config)
    }
    return {**weights, **moments}


def _read_description(folder: Path) -> Description:
    path = folder / DESCRIPTION
    try:
        description = Description.model_validate_json(_text_of(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where or 'it'}: {first['msg']}", AGAIN) from error
    for name in (MODEL, NETWORK):
        if name not in description.files:
            raise UserError(f"{path} names no {name}", AGAIN)
    return description


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise NotFound(f"there is no {path}", f"an exported folder has {MODEL}, {NETWORK} and {DESCRIPTION}: see `dcnr checkpoint export`")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {error.start}", AGAIN) from error


def _check_hash(path: Path, wanted: str | None) -> None:
    """`wanted` is None for a file that the description does not name: then it must not be there."""
    if wanted is None and path.exists():
        raise UserError(f"{path} is not named in {DESCRIPTION}", f"remove it, or add its sha256 to {DESCRIPTION}")
    if wanted is None:
        return
    if not path.is_file():
        raise NotFound(f"{path} is missing", AGAIN)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        remedy = f"copy it again; if you changed it on purpose, write its sha256 into {DESCRIPTION}"
        raise UserError(f"{path} is not what was exported: its sha256 is {found}, not {wanted}", remedy)


def _read_weights(path: Path, graph: Graph) -> dict[str, Float32Array]:
    wanted, tied = shapes_of(graph), tied_in(graph)
    try:
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
            slices = {name: file.get_slice(name) for name in names & wanted.keys()}
            found = {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
            problems = [f"'{name}' {list(shape)} is missing" for name, shape in wanted.items() if name not in names]
            problems += [_surplus(name, tied) for name in sorted(names - wanted.keys())]
            problems += [
                _misfit(name, *found[name], wanted[name]) for name in wanted if name in found and found[name] != ("F32", wanted[name])
            ]
            if not problems:
                return {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}", AGAIN) from error
    more = f"; and {len(problems) - MAX_TOLD} more" if len(problems) > MAX_TOLD else ""
    raise UserError(f"{path} does not fit network '{graph.name}': {'; '.join(problems[:MAX_TOLD])}{more}", AGAIN)


def _surplus(name: str, tied: Mapping[str, str]) -> str:
    owner = tied.get(name)
    return f"'{name}' is tied to '{owner}', under which it stands once" if owner else f"'{name}' belongs to no node of the network"


def _misfit(name: str, dtype: str, shape: Shape, wanted: Shape) -> str:
    return f"'{name}' is {dtype} {list(shape)} and should be F32 {list(wanted)}"


def _check_vocabulary(path: Path, tokenizer: Tokenizer, graph: Graph) -> None:
    for node in graph.nodes:
        known = getattr(node.config, "vocab_size", None)
        if known is not None and known < tokenizer.vocab_size:
            raise UserError(
                f"{path} has {tokenizer.vocab_size} ids, node '{node.id}' of network '{graph.name}' knows {known}",
                "give the tokenizer that the network was trained with",
            )
