"""Object stores on loopback: SeaweedFS and moto, each with free ports and a folder of
its own. They live in build/store-venv (deploy/setup.sh --tests).

    with stores.seaweedfs(folder) as store:
        subprocess.run([...], env=store.environment())  # For store.url.

As a program it starts one, prints its environment, and runs a command with it:

    stores.py seaweedfs|moto COMMAND...
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fault_proxy import FaultProxy

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "build" / "store-venv" / "bin"
START_SECONDS = 60.0
BUCKET = "weft"
KEY, SECRET = "testkey", "a-secret-that-no-line-may-show"
# A second identity of SeaweedFS, which may only read.
READER, READER_SECRET = "readerkey", "another-secret-that-no-line-may-show"


@dataclass
class Store:
    endpoint: str
    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """A bucket that exists, with a prefix that nothing else uses."""
        return f"s3://{BUCKET}/{random.randrange(1 << 48):012x}"

    def environment(self, endpoint: str = "", **more: str) -> dict[str, str]:
        """Returns this process's environment with what a client needs. `endpoint` is
        that of a proxy."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        return {
            **kept,
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **more,
        }

    @property
    def name(self) -> str:
        return Path(self.command[0]).name

    def start(self) -> None:
        """Starts the store, or starts it again on the same folder and ports."""
        log = self.folder / f"{self.name}.log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": "", "HOME": str(self.folder)},
                start_new_session=True,
            )
        limit = time.monotonic() + START_SECONDS
        while not _answers(self.endpoint):
            if self.process.poll() is not None or time.monotonic() > limit:
                text = log.read_text(errors="replace")
                raise AssertionError(f"{self.name} does not answer\n{text[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Ends the store at once. It may be stopped."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def make_bucket(self) -> None:
        """Makes the bucket, which also shows that the store works."""
        self._boto("s3.create_bucket(Bucket=bucket)")

    def sizes(self, url: str, prefix: str) -> dict[str, int]:
        """Returns the keys below a prefix of the state at `url`, and their bytes."""
        code = (
            "pages = s3.get_paginator('list_objects_v2').paginate("
            "Bucket=bucket, Prefix=sys.argv[3]);"
            "print(json.dumps({one['Key']: one['Size'] for page in pages"
            " for one in page.get('Contents', [])}))"
        )
        below = f"{url.removeprefix(f's3://{BUCKET}/')}/{prefix}"
        found: dict[str, int] = json.loads(self._boto(code, below))
        return {key.removeprefix(below): size for key, size in found.items()}

    def delete(self, url: str, keys: Iterable[str]) -> None:
        below = url.removeprefix(f"s3://{BUCKET}/")
        code = "[s3.delete_object(Bucket=bucket, Key=key) for key in sys.argv[3:]]"
        self._boto(code, *(f"{below}/{key}" for key in keys))

    def _boto(self, code: str, *arguments: str) -> str:
        """Runs code with a client of the store, and returns what it prints."""
        setup = (
            "import boto3, json, sys; from botocore.config import Config; "
            "bucket = sys.argv[2]; "
            "s3 = boto3.client('s3', endpoint_url=sys.argv[1], config=Config("
            "s3={'addressing_style': 'path'}, retries={'total_max_attempts': 20, "
            "'mode': 'standard'}));"
        )
        python = PROGRAMS / "python"
        return subprocess.run(
            [python, "-c", setup + code, self.endpoint, BUCKET, *arguments],
            check=True,
            env={**self.environment(), "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """Sends a signal to the store and its children (weed is behind a Python
        script)."""
        assert self.process is not None
        os.killpg(self.process.pid, number)


def free_ports(count: int) -> list[int]:
    """Returns ports that stay free until the stores take them (see free_port() of
    tests/oracle/daemon.py)."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20000, 32000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                found += [port] if port not in found else []
        except OSError:
            continue
    return found


def is_installed() -> bool:
    return (PROGRAMS / "weed").exists() and (PROGRAMS / "moto_server").exists()


def _answers(url: str) -> bool:
    """Returns whether the store answers, whatever it says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _running(command: list[str], endpoint: str, folder: Path) -> Iterator[Store]:
    store = Store(endpoint, command, folder)
    try:
        store.start()
        store.make_bucket()
        yield store
    finally:
        store.kill()


@contextmanager
def moto(folder: Path) -> Iterator[Store]:
    """Starts moto, which checks no credentials. It checks a condition apart from the
    write, so it must get one request at a time."""
    (port,) = free_ports(1)
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(PROGRAMS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with (
        _running(command, f"http://127.0.0.1:{port}", folder) as store,
        FaultProxy(store.endpoint, serial=True) as proxy,
    ):
        store.endpoint = proxy.url
        yield store


def _identities() -> dict[str, object]:
    def identity(key: str, secret: str, actions: list[str]) -> dict[str, object]:
        keys = [{"accessKey": key, "secretKey": secret}]
        return {"name": key, "credentials": keys, "actions": actions}

    return {
        "identities": [
            identity(KEY, SECRET, ["Admin", "Read", "List", "Tagging", "Write"]),
            identity(READER, READER_SECRET, ["Read", "List"]),
        ]
    }


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Store]:
    """Starts SeaweedFS: master, volume server, filer and S3 in one process."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "s3.json").write_text(json.dumps(_identities()))
    ports = free_ports(8)
    names = ("master", "volume", "filer", "s3")
    flags = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    flags += [
        f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)
    ]
    flags += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}"]
    flags += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}"]
    flags += [f"-filer.localSocket={folder / 'filer.sock'}"]
    flags += [f"-s3.localSocket={folder / 's3.sock'}"]
    flags += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    flags += ["-master.volumeSizeLimitMB=256", "-volume.max=64"]
    command = [str(PROGRAMS / "weed"), f"-logdir={folder}", "server", *flags]
    with _running(command, f"http://127.0.0.1:{ports[3]}", folder) as store:
        yield store


STORES = {"seaweedfs": seaweedfs, "moto": moto}


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="weft_store_") as folder,
        STORES[sys.argv[1]](Path(folder)) as store,
    ):
        environment = store.environment(WEFT_TEST_STORE=store.url)
        for name in sorted(set(environment) - set(os.environ)):
            print(f"{name}={environment[name]}", file=sys.stderr)
        return subprocess.run(sys.argv[2:], env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
