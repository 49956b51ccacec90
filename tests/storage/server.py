"""A real S3 server for tests: moto's, as a process of its own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "dcnr-tests",
    "AWS_SECRET_ACCESS_KEY": "told-to-nobody",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The environment of whoever speaks to it. The server takes any credentials until it is told to check them."""
SMALLEST_PART = 64 << 10
"""Of a multipart upload; S3 itself wants 5 MiB."""


class S3Server:
    """Empty at every start. `port`: 0 for a free one."""

    def __init__(self, port: int = 0) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=clean | {"S3_UPLOAD_PART_MIN_SIZE": str(SMALLEST_PART)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError(f"the S3 server ended: {said}")
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)  # it says a line for each request
        self._reader.start()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, bucket: str, prefix: str = "") -> str:
        """The storage URL of a place on it."""
        return f"s3://{bucket}/{prefix}?endpoint_url={self.endpoint}&region=us-east-1&path_style=1"

    def make_bucket(self, name: str) -> None:
        """Make one."""
        self._ask(f"/{name}", "PUT")

    def check_credentials(self, check: bool) -> None:
        """Whether requests from now on need credentials of a user, of which there is none."""
        self._ask("/moto-api/reset-auth", "POST", b"0" if check else b"inf")

    def stop(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def put_many(self, bucket: str, keys: Sequence[str]) -> None:
        """Empty objects, faster than through a client that signs."""

        def put(some: Sequence[str]) -> None:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
                for key in some:
                    connection.request("PUT", f"/{bucket}/{key}", b"")
                    assert connection.getresponse().read() == b""

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(put, (keys[first::16] for first in range(16))))

    def _ask(self, path: str, method: str, data: bytes | None = None) -> None:
        request = urllib.request.Request(self.endpoint + path, data, {"Content-Type": "text/plain"}, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
