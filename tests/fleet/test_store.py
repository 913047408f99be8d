"""Runs the tests of object stores against real servers, also while requests get lost,
late, cut, refused and doubled, and shows what weftctl says of stores that will not
do."""

from __future__ import annotations

import http.server
import json
import os
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stores
from certificates import make_authority, make_identity
from fault_proxy import FAULTS, FaultProxy
from stores import Store

BUILD = Path(os.environ.get("WEFT_BUILD_DIR", stores.ROOT / "build" / "cpu"))
TESTS = BUILD / "tests" / "store" / "object_store_test"
WEFTCTL = BUILD / "client" / "weftctl" / "weftctl"
KINDS = ("seaweedfs", "moto")

pytestmark = pytest.mark.skipif(
    not stores.is_installed() or not TESTS.exists() or not WEFTCTL.exists(),
    reason="no build/store-venv, or no programs: object stores were NOT tested",
)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    """The store of the test's parameter."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Store)
    return found


def run_tests(environment: dict[str, str]) -> None:
    """Runs the tests of C++ that need a bucket."""
    result = subprocess.run(
        [TESTS, "--gtest_filter=*/s3", "--gtest_brief=1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "PASSED" in result.stdout


def probe(
    environment: dict[str, str], url: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Runs `weftctl state probe`, whose output must hold no secret."""
    result = subprocess.run(
        [WEFTCTL, "state", "probe", url, "--duration", "1s", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    for secret in (stores.SECRET, stores.READER_SECRET):
        assert secret not in result.stdout + result.stderr
    return result


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_bucket_passes_the_tests_of_a_folder(store: Store) -> None:
    run_tests(store.environment(WEFT_TEST_STORE=store.url))


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_bucket_passes_them_while_requests_break(store: Store) -> None:
    with FaultProxy(store.endpoint, seed=61, rate=0.08) as proxy:
        run_tests(
            store.environment(
                proxy.url, WEFT_TEST_STORE=store.url, WEFT_TEST_STORE_IS_FAULTY="1"
            )
        )
        assert set(proxy.faults) == set(FAULTS)


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    url = store.url
    result = probe(store.environment(), url, "--output", "json")
    assert result.returncode == 0, result.stdout + result.stderr
    checks = json.loads(result.stdout)
    assert len(checks) == 8 and all(check["ok"] for check in checks)
    # A probe of the prefix of all probes finds nothing that the first one left.
    left = subprocess.run(
        [stores.PROGRAMS / "python", "-c", _LIST, url.split("/", 3)[3]],
        env=store.environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=True,
    )
    assert left.stdout == "0\n"


_LIST = """
import boto3, os, sys
client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
print(client.list_objects_v2(Bucket="weft", Prefix=sys.argv[1])["KeyCount"])
"""


def test_a_store_that_ignores_conditions_is_refused(moto: Store) -> None:
    # moto checks no signatures, which cover the conditions.
    with FaultProxy(moto.endpoint, forget=0) as proxy:
        result = probe(moto.environment(proxy.url), moto.url)
    assert result.returncode == 1
    assert "FAILED_PRECONDITION" in result.stderr
    assert "does not keep conditional writes" in result.stderr
    assert "in spite of If-None-Match" in result.stderr


def test_the_probe_finds_what_the_start_does_not(moto: Store) -> None:
    # CheckConditions makes seven requests, and a writer that wins the eighth.
    with FaultProxy(moto.endpoint, forget=8) as proxy:
        result = probe(moto.environment(proxy.url), moto.url)
    assert result.returncode == 1
    assert re.search(r"FAILED +round \d+: both writers succeeded", result.stdout)
    assert "two processes could own the same state" in result.stderr


@pytest.mark.parametrize(
    ("changes", "bucket", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "weft", "the secret key is not that"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "weft", "does not know AWS_ACCESS_KEY_ID"),
        (
            {
                "AWS_ACCESS_KEY_ID": stores.READER,
                "AWS_SECRET_ACCESS_KEY": stores.READER_SECRET,
            },
            "weft",
            "the credentials have no permission for this",
        ),
        ({"AWS_ACCESS_KEY_ID": ""}, "weft", "no credentials for the store: set AWS_"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "weft", "but not AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "x", "AWS_ACCESS_KEY_ID": ""}, "weft", "credentials file"),
        ({"AWS_ENDPOINT_URL_S3": "store:80"}, "weft", "is not http:// or https://"),
        ({}, "We", "3 to 63 of a-z"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    seaweedfs: Store, tmp_path: Path, changes: dict[str, str], bucket: str, words: str
) -> None:
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    result = probe(seaweedfs.environment(**nowhere, **changes), f"s3://{bucket}/a")
    assert result.returncode == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_wrong_bucket_is_said(moto: Store) -> None:
    result = probe(moto.environment(), "s3://no-such-bucket/a")
    assert result.returncode == 1
    assert "NoSuchBucket" in result.stderr and "create the bucket" in result.stderr


def test_a_store_that_is_away_is_said_in_time(moto: Store) -> None:
    (port,) = stores.free_ports(1)
    start = time.monotonic()
    result = probe(moto.environment(f"http://127.0.0.1:{port}"), "s3://weft/a")
    assert result.returncode == 1 and "UNAVAILABLE" in result.stderr
    assert "attempts in" in result.stderr
    assert time.monotonic() - start < 20


@contextmanager
def tls_server(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the URL of a server with a certificate of an own authority, and that
    authority's certificate. It refuses all requests."""
    authority = make_authority(folder, "authority")
    identity = make_identity(folder, "server", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    )
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}", authority.certificate
    finally:
        server.shutdown()
        server.server_close()


def test_a_certificate_is_verified(moto: Store, tmp_path: Path) -> None:
    with tls_server(tmp_path) as (url, authority):
        environment = moto.environment(url, NO_PROXY="localhost", no_proxy="localhost")
        result = probe(environment, "s3://weft/a")
        assert "FAILED_PRECONDITION" in result.stderr
        assert "certificate" in result.stderr
        environment["AWS_CA_BUNDLE"] = str(authority)
        result = probe(environment, "s3://weft/a")
        assert "INTERNAL" in result.stderr and "HTTP 501" in result.stderr
