"""Storage URLs of S3."""

from __future__ import annotations

import pytest

from dcnr.errors import UserError
from dcnr.storage.place import Place, read_place


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", Place("bucket")),
        ("s3://bucket/", Place("bucket")),
        ("s3://my.bucket-1/a/b/", Place("my.bucket-1", "a/b/")),
        (
            "s3://bucket/a?endpoint_url=http://127.0.0.1:9000/&region=eu-west-1&path_style=1",
            Place("bucket", "a/", "http://127.0.0.1:9000", "eu-west-1", True),
        ),
        ("s3://bucket?endpoint_url=https%3A%2F%2Fs3.example.org&path_style=0", Place("bucket", "", "https://s3.example.org")),
    ],
)
def test_a_url_says_bucket_prefix_and_how_to_get_there(url: str, place: Place) -> None:
    """And the canonical form of a place leads to the same one."""
    assert read_place(url) == place
    assert read_place(place.url) == place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "'' is not the name of a bucket"),
        ("s3:///prefix", "'' is not the name of a bucket"),
        ("s3://Bucket", "'Bucket' is not the name of a bucket"),
        ("s3://bucket:80/x", "is not the name of a bucket"),
        ("s3://bucket/a/../b", "a prefix holds letters"),
        ("s3://bucket/.hidden", "a prefix holds letters"),
        ("s3://bucket?endpoint=http://x", "'endpoint' is no option"),
        ("s3://bucket?region=a&region=b", "an option stands twice"),
        ("s3://bucket#x", "it holds a '#'"),
        ("s3://bucket?region=EU%20west", "region is a name"),
        ("s3://bucket?region=", "region is a name"),
        ("s3://bucket?path_style=yes", "path_style is 0 or 1"),
        ("s3://bucket?endpoint_url=host:9000", "endpoint_url is not http://host:port"),
        ("s3://bucket?endpoint_url=ftp://host", "endpoint_url is not http://host:port"),
        ("s3://bucket?endpoint_url=http://host:99999", "endpoint_url is not http://host:port"),
        ("s3://bucket?endpoint_url=http://host?x=1", "endpoint_url is not http://host:port"),
        ("s3://bucket?endpoint_url=", "endpoint_url is not http://host:port"),
        ("s3://bucket?endpoint_url=http://[h", "endpoint_url is not http://host:port"),
        ("s3://[x", "the storage URL is none"),
    ],
)
def test_what_is_wrong_is_told_with_the_form(url: str, message: str) -> None:
    """One sentence, and what it should look like."""
    with pytest.raises(UserError, match="s3://bucket/prefix\\?endpoint_url=") as error:
        read_place(url)
    assert message in error.value.message


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAME:hunter2@bucket/x",
        "s3://bucket?endpoint_url=http://AKIAME:hunter2@host:9000",
        "s3://bucket?secret_access_key=hunter2",
        "s3://bucket?access_key=AKIAME&secret=hunter2#hunter2",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    """A URL is shown, logged and sent to every PNode."""
    with pytest.raises(UserError) as error:
        read_place(url)
    assert "hunter2" not in str(error.value)
    assert "AKIAME" not in str(error.value)
