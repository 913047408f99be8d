"""Looks at the objects of a store, copies them and removes some."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Self

from stores import PROGRAMS, Store

# Runs in the environment of the stores, which has boto3. It takes long to start.
_PROGRAM = """
import boto3, json, os, sys
from botocore.config import Config
client = boto3.client(
    "s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"],
    config=Config(s3={"addressing_style": "path"}),
)

def split(url):
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix and prefix + "/"

def listing(url):
    bucket, prefix = split(url)
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=prefix
    )
    return {
        item["Key"][len(prefix):]: item["ETag"]
        for page in pages for item in page.get("Contents", [])
    }

def copy(url, to):
    bucket, prefix = split(url)
    for key in listing(url):
        source = {"Bucket": bucket, "Key": prefix + key}
        client.copy_object(
            Bucket=split(to)[0], Key=split(to)[1] + key, CopySource=source
        )

def put(url, key):
    bucket, prefix = split(url)
    client.put_object(Bucket=bucket, Key=prefix + key, Body=b"x")

def delete(url, key):
    bucket, prefix = split(url)
    client.delete_object(Bucket=bucket, Key=prefix + key)

for line in sys.stdin:
    name, *words = json.loads(line)
    print(json.dumps(globals()[name](*words)), flush=True)
"""


class Objects:
    """The objects of a store. Prefixes are s3://BUCKET/PREFIX."""

    def __init__(self, store: Store) -> None:
        self._process = subprocess.Popen(
            [PROGRAMS / "python", "-c", _PROGRAM],
            env=store.environment(PYTHONPATH=""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, *words: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def listing(self, url: str) -> dict[str, str]:
        """Returns the ETag of each object below the prefix."""
        found: dict[str, str] = self._ask("listing", url)
        return found

    def copy(self, url: str, to: str) -> None:
        self._ask("copy", url, to)

    def put(self, url: str, key: str) -> None:
        """Makes a small object."""
        self._ask("put", url, key)

    def delete(self, url: str, key: str) -> None:
        self._ask("delete", url, key)
