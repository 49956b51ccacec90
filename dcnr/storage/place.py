"""What an `s3://` URL says.

Rule: an option that is unknown is refused, and so is a user or password anywhere, without being shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from dcnr.errors import UserError
from dcnr.storage.keys import is_key

FORM = "s3://bucket/prefix?endpoint_url=http://host:9000&region=eu-west-1&path_style=1, where all after the bucket may be left away"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and the start of keys in it, empty or ending with a slash. None: as the usual chain of settings says."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    """The bucket stands in the path, as most servers other than AWS want it, and not in the host's name."""

    @property
    def url(self) -> str:
        """The same in one canonical form."""
        chosen = {"endpoint_url": self.endpoint, "region": self.region, "path_style": "1" if self.path_style else None}
        options = urlencode({name: value for name, value in chosen.items() if value is not None}, safe=":/")
        path = f"/{quote(self.prefix[:-1])}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + (f"?{options}" if options else "")

    def __str__(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{at}"


def read_place(url: str) -> Place:
    """Read a URL. Raises `UserError`."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"the storage URL is none: {error}", f"use {FORM}") from error
    shown = f"s3://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc:
        remedy = "leave them to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role"
        raise UserError(f"the storage URL {shown} holds credentials, which others would see", remedy)
    if _BUCKET.fullmatch(parts.netloc) is None:
        raise UserError(f"{shown}: '{parts.netloc}' is not the name of a bucket", f"use {FORM}")
    prefix = parts.path.strip("/")
    if prefix and not is_key(prefix):
        raise UserError(f"{shown}: a prefix holds letters, digits, '_', '-', '.' and '/', and no part starts with '.'", f"use {FORM}")
    options = _options(parts, shown)
    return Place(
        parts.netloc,
        f"{prefix}/" if prefix else "",
        _endpoint(options["endpoint_url"], shown) if "endpoint_url" in options else None,
        options.get("region"),
        options.get("path_style") == "1",
    )


def _options(parts: SplitResult, shown: str) -> dict[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    unknown = sorted(set(options) - {"endpoint_url", "region", "path_style"})
    if unknown or parts.fragment or len(options) < len(pairs):
        wrong = f"'{unknown[0]}' is no option" if unknown else "an option stands twice" if len(options) < len(pairs) else "it holds a '#'"
        raise UserError(f"{shown}: {wrong}", f"use {FORM}")
    if _REGION.fullmatch(options.get("region", "x")) is None or options.get("path_style", "1") not in {"0", "1"}:
        raise UserError(f"{shown}: region is a name such as eu-west-1, and path_style is 0 or 1", f"use {FORM}")
    return options


def _endpoint(url: str, shown: str) -> str:
    wrong = UserError(f"{shown}: its endpoint_url is not http://host:port or https://host:port", f"use {FORM}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise wrong from error
    if "@" in parts.netloc:
        raise UserError(f"{shown}: its endpoint_url holds credentials, which others would see", "leave them to the environment")
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong
    return url.rstrip("/")
