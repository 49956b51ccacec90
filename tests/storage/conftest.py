"""One S3 server for all tests of this folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.storage.server import CREDENTIALS, S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """It keeps what every test puts there: use a bucket of your own."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the server takes, and nothing of the person who runs the tests."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bucket_url(s3_server: S3Server, credentials: None) -> str:
    """A place in a fresh bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    s3_server.make_bucket(name)
    return s3_server.url(name, "some/prefix")
