"""One tree of errors, sorted by whose fault it is.

- `DcnrError`                what every error of ours is; carries a sentence and a remedy
  - `UserError`              the user can mend it: wrong file, wrong option, nothing running (CLI exit code 2)
    - `NetworkFileError`     every problem of one network file, each with its place (network/load)
    - `NotFound`             a named thing that does not exist
    - `AlreadyExists`        a name that is taken
    - `BusUnavailable`       no server answers (bus/nats)
    - `DoesNotFit`           no PNode has the memory (placement, agents)
  - `BackendUnavailable`     this machine or backend cannot do it (backends)
  - `PeerError`              a message or file from outside breaks the protocol: log, count, drop (bus/codec)
  - `WorldError`             time-outs and broken connections that survived every retry
  - `InvariantError`         a bug of ours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DcnrError(Exception):
    """An error that a person reads: what happened and where, and what to do about it."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UserError(DcnrError):
    """Something that the user can mend."""


class NotFound(UserError):
    """A named network, session, dataset or file does not exist."""


class AlreadyExists(UserError):
    """The name is taken."""


class BusUnavailable(UserError):
    """No NATS server answers at the given address."""


class DoesNotFit(UserError):
    """No PNode has room for what it was asked to hold."""


class BackendUnavailable(DcnrError):
    """A backend, or one operation of it, cannot run here."""


class PeerError(DcnrError):
    """A message or file from outside breaks the protocol."""


class WorldError(DcnrError):
    """A time-out or broken connection that retries did not mend."""


class InvariantError(DcnrError):
    """A bug in DCNR itself."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a network file. `line` and `column` count from 1; 0 where no place is known."""

    file: str
    line: int
    column: int
    node: str | None
    message: str
    remedy: str

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        who = f" node '{self.node}':" if self.node else ""
        return f"{at}:{who} {self.message}. {self.remedy}"


class NetworkFileError(UserError):
    """All problems of one network file at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
