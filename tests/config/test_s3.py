from __future__ import annotations

import pytest

from asyncgrpo_agent.config.s3 import S3Address, endpoint_fault, s3_address


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://my-bucket", "my-bucket", ""),
        ("s3://my-bucket/", "my-bucket", ""),
        ("s3://my.bucket_1/runs", "my.bucket_1", "runs/"),
        ("s3://my-bucket/a/b/", "my-bucket", "a/b/"),
        ("s3://b--use1-az4--x-s3/a=1/b c/", "b--use1-az4--x-s3", "a=1/b c/"),
    ],
)
def test_addresses(url: str, bucket: str, prefix: str) -> None:
    assert s3_address(url) == S3Address(bucket=bucket, prefix=prefix)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "expected s3://"),
        ("my-bucket", "expected s3://"),
        ("https://my-bucket/", "expected s3://"),
        ("s3:my-bucket", "expected s3://"),
        ("s3://", "no name of a bucket"),
        ("s3://ab/", "no name of a bucket"),
        ("s3://-flag/", "no name of a bucket"),
        ("s3://key:secret@bucket/", "no name of a bucket"),
        ("s3://" + "a" * 256, "no name of a bucket"),
        ("s3://my-bucket//", "no folder"),
        ("s3://my-bucket/a//b/", "no folder"),
        ("s3://my-bucket/../b/", "no folder"),
        ("s3://my-bucket/a\nb/", "no folder"),
    ],
)
def test_no_addresses(url: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        s3_address(url)


@pytest.mark.parametrize("url", ["https://minio", "http://[::1]:9000/", "https://s3.example.org:9"])
def test_endpoints(url: str) -> None:
    assert endpoint_fault(url) == ""


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("minio:9000", "expected https://"),
        ("ftp://minio", "expected https://"),
        ("https://", "expected https://"),
        ("https://minio:x", "not a URL"),
        ("https://me:pw@minio", "credentials"),
        ("https://minio/bucket", "bucket.url"),
        ("https://minio?x=1", "bucket.url"),
    ],
)
def test_no_endpoints(url: str, what: str) -> None:
    assert what in endpoint_fault(url)
