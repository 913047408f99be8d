"""Clients of HTTP behind the edge: the Tinker SDK, OpenAI's, curl and a browser."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import daemon as daemon_module
import httpx
import models
import openai
import pytest
import tinker_sdk
from deploy_files import ROOT
from edge_server import Edge, wait_until
from tinker_sdk import SDK

SCRIPT = ROOT / "tests" / "tinker" / "sdk_script.py"
CHROMIUM = shutil.which("chromium")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None


class Echo(BaseHTTPRequestHandler):
    """Stands for the OpenAI front: answers with the headers it got, then in pieces."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in (json.dumps(dict(self.headers.items())), "later"):
            piece = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            time.sleep(1)
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        while left > 0:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """An edge whose OpenAI front says what reaches it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    folder = tmp_path_factory.mktemp("echo")
    with Edge(folder, "--model-name", "toy", openai=address).running() as edge:
        yield edge
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def web(echo: Edge) -> Iterator[httpx.Client]:
    """A client of HTTP that knows the authority."""
    with httpx.Client(base_url=echo.url, verify=echo.context(), timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/models", "/oai/api/v1/models"])
def test_a_front_gets_the_edges_headers_and_not_the_strangers(
    web: httpx.Client, echo: Edge, path: str
) -> None:
    forged = {
        "X-Real-IP": "6.6.6.6",
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": "evil.example",
        "Forwarded": "for=6.6.6.6",
        "X_Real_IP": "6.6.6.6",
        "Authorization": "Bearer me",
    }
    with web.stream("GET", path, headers=forged) as reply:
        start = time.monotonic()
        lines = reply.iter_lines()
        got = {
            k.lower(): v
            for k, v in json.loads(next(lines).removeprefix("data: ")).items()
        }
        # The second piece comes a second later: nothing is held back.
        assert time.monotonic() - start < 0.7
    assert got["host"] == "localhost" and got["authorization"] == "Bearer me"
    assert got["x-real-ip"] == got["x-forwarded-for"] == "127.0.0.1"
    assert got["x-forwarded-proto"] == "https"
    assert got["x-forwarded-host"] == f"localhost:{echo.port}"
    assert not {"forwarded", "x_real_ip"} & set(got)


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_one_header_may_be_as_large_as_all(echo: Edge, version: str) -> None:
    def status(size: int) -> str:
        command = ["curl", "-s", version, "--cacert", str(echo.ca), f"{echo.url}/none"]
        command += ["-H", f"cookie: {'x' * size}", "-o", "/dev/null"]
        command += ["-w", "%{http_code}"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    assert status(5800) == "404"
    assert status(7300) in ("400", "000")


def test_bodies_have_limits(web: httpx.Client) -> None:
    assert web.post("/v1/completions", content=bytes(9 << 20)).status_code == 413
    assert web.post("/v1/completions", content=bytes(1 << 20)).status_code == 200
    assert web.post("/api/v1/telemetry", content=bytes(73 << 20)).status_code == 413


def test_nginx_says_neither_version_nor_secrets(web: httpx.Client, echo: Edge) -> None:
    reply = web.get("/console/none?sig=secret", headers={"Authorization": "Bearer me"})
    assert reply.headers["server"] == "nginx" and "1.22" not in reply.text
    wait_until(lambda: "/console/none" in echo.log(), echo.log, 10)
    assert "secret" not in echo.log() and "Bearer" not in echo.log()
    for line in echo.log().splitlines():
        assert line.startswith("{") and json.loads(line), line


def test_curl_speaks_both_versions_of_http(echo: Edge) -> None:
    for version in ("--http1.1", "--http2"):
        words = ["curl", "-sS", version, "--cacert", str(echo.ca), "-w", "%{http_code}"]
        for path, status in (("/healthz", "200"), ("/", "200"), ("/none", "404")):
            command = [*words, "-o", "/dev/null", echo.url + path]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            assert done.stdout == status, (version, path, done)


@pytest.mark.skipif(
    not SDK.exists(), reason="no Tinker SDK: deploy/setup.sh --tests installs it"
)
def test_the_tinker_sdk_trains_over_https(echo: Edge) -> None:
    done = subprocess.run(
        [str(SDK), str(SCRIPT), "toy"],
        input="train\n",
        env=tinker_sdk.environment(
            echo.url, f"tml-{echo.alice}", base=echo.environment(echo.alice)
        ),
        capture_output=True,
        text=True,
        timeout=100,
    )
    results = [x for x in done.stdout.splitlines() if x.startswith("result ")]
    assert results, done.stdout + done.stderr
    assert json.loads(results[0].removeprefix("result "))["models"] == ["toy"]


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)):
        return True


def test_openais_client_chats_over_https(tmp_path: Path) -> None:
    model = models.short_demo_model()
    port = daemon_module.free_port()
    front_address = f"127.0.0.1:{port}"
    with Edge(
        tmp_path, "--model-name", "demo", model=model, openai=front_address
    ).running() as edge:
        command = [sys.executable, "-m", "weft", "openai"]
        command += ["--server", edge.daemon.address, "--model-dir", str(model)]
        command += ["--listen", front_address]
        front = subprocess.Popen(command)
        try:
            wait_until(lambda: _listens(port), edge.log)
            with openai.OpenAI(
                base_url=f"{edge.url}/v1",
                api_key=edge.alice,
                http_client=openai.DefaultHttpxClient(verify=edge.context()),
                max_retries=0,
            ) as client:
                pieces = client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": "Name a colour."}],
                    max_tokens=8,
                    stream=True,
                )
                assert len(list(pieces)) > 1
        finally:
            front.terminate()
            front.wait()


@pytest.mark.skipif(
    CHROMIUM is None or not HAS_PLAYWRIGHT,
    reason="no Chromium or Playwright: deploy/setup.sh --tests installs them",
)
def test_the_console_works_in_a_browser(echo: Edge) -> None:
    from playwright.sync_api import sync_playwright

    with echo.client(echo.alice) as client:
        client.create_adapter("poet", rank=2)
    errors: list[str] = []

    def note(message: Any) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load"):
            errors.append(message.text)

    with sync_playwright() as library:
        browser = library.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(10_000)
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(echo.url)
        page.fill("input[type=password]", echo.alice)
        page.keyboard.press("Enter")
        page.wait_for_selector("table.adapters tbody tr")
        assert "poet" in page.inner_text("table.adapters")
        browser.close()
    assert not errors
