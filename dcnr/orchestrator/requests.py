"""What the fields of each request of the API may be."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dcnr.data.batches import MAX_BATCH, MAX_SEED, MAX_STEP

MAX_TOKENS = 1_000_000


class Request(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Nothing(Request):
    """No fields."""


class CreateNetwork(Request):
    """Register a network file, given as its text."""

    file: str
    file_name: str = "network.yml"
    replace: bool = False


class NamedNetwork(Request):
    """One network."""

    name: str


class CreateSession(Request):
    """Train `network` on `dataset`. `pnodes`: how many to use, 0 for all.

    With `file`, its text, the network is registered along with the session, in place of an older one of its name: both or neither. Then
    `network` need not be said.
    """

    network: str | None = None
    file: str | None = None
    file_name: str = "network.yml"
    dataset: str
    steps: int = Field(ge=1, le=MAX_STEP)
    batch: int = Field(ge=1, le=MAX_BATCH)
    micro_batches: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    hyper: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    fuse: bool = True
    pnodes: int = Field(default=0, ge=0)
    session: str | None = None
    start: bool = True

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch % self.micro_batches:
            raise ValueError(f"a batch of {self.batch} cannot be cut into {self.micro_batches} equal micro-batches")
        return self

    @model_validator(mode="after")
    def _is_of_something(self) -> Self:
        if self.network is None and self.file is None:
            raise ValueError("neither a network nor a file is given")
        return self


class NamedSession(Request):
    """One session."""

    session: str


class ResumeSession(NamedSession):
    """Go on with a session; `steps` is a new total."""

    steps: int | None = Field(default=None, ge=1, le=MAX_STEP)


class ImportSession(NamedSession):
    """Know the checkpoint that was put into storage as one of a session of this name. `dataset`: one that must fit it, to train on."""

    dataset: str | None = None


class SessionRows(NamedSession):
    """Rows of a session's training log, from step `first` to step `last`, of which those whose step is a multiple of `every`."""

    first: int = Field(ge=1, le=MAX_STEP)
    last: int = Field(ge=1, le=MAX_STEP)
    every: int = Field(default=1, ge=1, le=MAX_STEP)


class Generate(NamedSession):
    """Go on from `prompt`, by the newest checkpoint of a session or that of `step`. `pnodes`: how many to use, 0 for as few as hold it."""

    step: int | None = Field(default=None, ge=0, le=MAX_STEP)
    prompt: str
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=256, ge=1, le=MAX_TOKENS)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    cache: bool = True
    pnodes: int = Field(default=0, ge=0)


class NextText(Request):
    """What has come of a request for text since `after`: 0 at first, then what the last answer said."""

    request: str
    after: int = Field(default=0, ge=0)


class StopText(Request):
    """End a request for text."""

    request: str


class NamedPNode(Request):
    """One PNode."""

    pnode: str
