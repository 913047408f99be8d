"""Tests the client's TLS, tokens and proxies, tokens and tenants of a server in its own
process, and what the server does when connections or descriptors run out."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Pair, make_authority, make_identity
from conftest import Patch, wait_until
from fake_weftd import FakeWeftd
from small_server import SmallServer
from token_file import Tokens

import weft
from weft import channel, methods
from weft._proto import adapters_pb2, sampling_pb2, server_pb2, training_pb2

DATA = [weft.Datum.next_token([1, 2, 3])]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture
def identity(tmp_path: Path, authority: Pair) -> Pair:
    return make_identity(tmp_path, "server", authority)


def connect(
    server: FakeWeftd | SmallServer, token: str | None = None, **security: Any
) -> weft.Client:
    return weft.Client(
        server.target,
        timeout=10.0,
        retry=weft.NO_RETRY,
        security=weft.Security(token=token, **security),
    )


def trust(authority: Pair) -> dict[str, Any]:
    return {"root_certificates": authority.certificate.read_bytes()}


def test_mutual_tls_with_given_and_with_system_authorities(
    authority: Pair, identity: Pair, tmp_path: Path, monkeypatch: Patch
) -> None:
    own = make_identity(tmp_path, "alice", authority)
    mine: dict[str, Any] = {
        "certificate": own.certificate.read_bytes(),
        "private_key": own.key.read_bytes(),
    }
    served = [(identity.key.read_bytes(), identity.certificate.read_bytes())]
    roots = authority.certificate.read_bytes()
    with SmallServer(
        credentials=grpc.ssl_server_credentials(served, roots, require_client_auth=True)
    ) as server:
        with connect(server, **trust(authority)) as client:
            assert not client.healthy()  # This client has no certificate.
        with connect(server, tls=True, **mine) as client:
            # The system does not trust the certificate yet.
            assert not client.healthy()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        with connect(server, tls=True, **mine) as client:
            assert client.healthy() and client.info().model.name == "toy"
        with connect(server, **mine, **trust(authority), server_name="other") as client:
            assert not client.healthy()


def test_security_comes_from_the_environment(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "token").write_text("from-file\n")
    (tmp_path / "ca").write_text("PEM")
    monkeypatch.setenv("WEFT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("WEFT_CA", str(tmp_path / "ca"))
    security = weft.Security.from_environment()
    assert (security.token, security.root_certificates) == ("from-file", b"PEM")
    monkeypatch.setenv("WEFT_TOKEN", "itself")
    security = weft.Security.from_environment()
    assert security.token == "itself"
    assert "itself" not in repr(security) + str(security)


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\u00a0", "\t\n"])
def test_space_around_a_token_is_left_out(
    space: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Kubernetes secrets end with a newline, and .env files may have CRLF."""
    assert weft.Security(token=f"{space}weft_a{space}").token == "weft_a"
    monkeypatch.setenv("WEFT_TOKEN", f"weft_b{space}")
    with SmallServer(token="weft_b") as server, weft.Client(server.target) as client:
        assert client.info().model.name == "toy"
    monkeypatch.setenv("WEFT_TOKEN", space)
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbfweft_c" + space.encode())
    monkeypatch.setenv("WEFT_TOKEN_FILE", str(tmp_path / "token"))
    assert weft.Security.from_environment().token == "weft_c"


@pytest.mark.parametrize(
    "bad", ["weft_se\ncret", "weft_se cret", "weft_sé", "weft_\x7f"]
)
def test_a_broken_token_is_named_and_never_shown(
    bad: str, tmp_path: Path, monkeypatch: Patch, caplog: Any
) -> None:
    file = tmp_path / "token"
    file.write_bytes(bad.encode("latin-1"))

    def shown(make: Callable[[], object]) -> str:
        with pytest.raises(weft.InvalidArgument) as caught:
            make()
        lines = traceback.format_exception(caught.value)
        return f"{caught.value!r} {lines} {caplog.text}"

    monkeypatch.setenv("WEFT_TOKEN_FILE", str(file))
    texts = {str(file): shown(weft.Client)}
    monkeypatch.setenv("WEFT_TOKEN", bad)
    texts["WEFT_TOKEN has"] = shown(weft.AsyncClient)
    texts["argument token"] = shown(lambda: weft.Security(token=bad))
    for source, text in texts.items():
        assert source in text and "visible ASCII" in text
        assert "weft_" not in text and "cret" not in text


def test_a_file_without_a_token_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "token").write_text("\n")
    monkeypatch.setenv("WEFT_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(weft.InvalidArgument, match=r"token has no token"):
        weft.Security.from_environment()


def test_no_proxy_sees_calls_to_this_machine(
    authority: Pair, identity: Pair, monkeypatch: Patch
) -> None:
    """Docker puts http_proxy into each container."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def use(target: str) -> None:
        async with weft.AsyncClient(target, retry=weft.NO_RETRY) as client:
            assert await client.healthy()

    pair = (identity.key.read_bytes(), identity.certificate.read_bytes())
    with SmallServer() as server:
        asyncio.run(use(server.target))
        for target in (server.target, server.target.replace("127.0.0.1", "localhost")):
            with weft.Client(target, retry=weft.NO_RETRY) as client:
                assert client.healthy()
    with (
        SmallServer(credentials=grpc.ssl_server_credentials([pair])) as secure,
        connect(secure, **trust(authority)) as client,
    ):
        assert client.healthy()


@pytest.mark.parametrize("target", ["10.0.0.1:1", "example.org:443", "dns:///a:1"])
def test_no_token_leaves_the_machine_in_plaintext(target: str) -> None:
    with pytest.raises(weft.FailedPrecondition, match="plaintext"):
        weft.Client(target, security=weft.Security(token="secret"))
    weft.Client(target, security=weft.Security(token="secret", tls=True)).close()


def test_knows_what_is_local() -> None:
    for target in (
        *("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a"),
        *("unix-abstract:a", "dns:///localhost:1", "ipv4:127.0.0.1:1"),
    ):
        assert channel.is_local(target), target
    for target in ("127.0.0.1.nip.io:1", "localhost.com:1", "[::2]:1", "0.0.0.0:1", ""):
        assert not channel.is_local(target), target


def test_nothing_fails_while_tokens_are_replaced(tokens: Tokens) -> None:
    """Two threads make calls. One of them opens a new connection for each call."""
    current = [tokens.add("t0", "acme", "train", "sample")]
    failures: list[str] = []
    calls = [0, 0]
    used = ["", ""]
    stop = threading.Event()

    def load(server: FakeWeftd, index: int) -> None:
        with ExitStack() as stack:
            bears = current[0]
            client = connect(server, bears)
            stack.callback(client.close)
            while not stop.is_set():
                try:
                    if index == 1 or bears != current[0]:
                        client.close()
                        bears = current[0]
                        client = connect(server, bears)
                        stack.callback(client.close)
                    adapter = client.adapter("a")
                    adapter.forward_backward(DATA) if index == 0 else adapter.info()
                    calls[index] += 1
                    used[index] = bears
                except weft.WeftError as error:
                    failures.append(str(error))
                time.sleep(0.005)  # Dozens of calls meet each check of the file.

    with FakeWeftd(f"--auth-tokens-file={tokens.path}") as server:
        with connect(server, current[0]) as client:
            client.create_adapter("a", rank=2)
        threads = [threading.Thread(target=load, args=(server, i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for turn in range(1, 4):
            token = tokens.add(f"t{turn}", "acme", "train", "sample")
            time.sleep(1.2)  # The server checks the file every half second.
            current[0] = token
            wait_until(lambda: set(used) == {current[0]})
            tokens.revoke(f"t{turn - 1}")
            time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(calls) > 20


def requests_on(adapter: str) -> list[tuple[methods.Method[Any, Any], Any]]:
    """Returns a valid request for each method that names an adapter."""
    datum = training_pb2.Datum(tokens=[1, 2], targets=[2, 3])
    loss = training_pb2.LossConfig(function=training_pb2.LOSS_FUNCTION_CROSS_ENTROPY)
    sample = sampling_pb2.SampleRequest(adapter_id=adapter, prompt=[1, 2])
    train: dict[str, Any] = {"adapter_id": adapter, "data": [datum], "loss": loss}
    named: dict[str, Any] = {"adapter_id": adapter, "name": "secret"}
    return [
        (methods.FORWARD_BACKWARD, training_pb2.ForwardBackwardRequest(**train)),
        (methods.FORWARD, training_pb2.ForwardRequest(**train)),
        (methods.OPTIM_STEP, training_pb2.OptimStepRequest(adapter_id=adapter)),
        (
            methods.REPORT_METRICS,
            training_pb2.ReportMetricsRequest(adapter_id=adapter, metrics={"loss": 1}),
        ),
        (methods.SAMPLE, sample),
        (methods.SAMPLE_STREAM, sampling_pb2.SampleStreamRequest(request=sample)),
        (methods.GET_ADAPTER, adapters_pb2.GetAdapterRequest(adapter_id=adapter)),
        (methods.DELETE_ADAPTER, adapters_pb2.DeleteAdapterRequest(adapter_id=adapter)),
        (methods.SAVE_CHECKPOINT, adapters_pb2.SaveCheckpointRequest(**named)),
        (methods.LOAD_CHECKPOINT, adapters_pb2.LoadCheckpointRequest(**named)),
        (
            methods.LOAD_CHECKPOINT,
            adapters_pb2.LoadCheckpointRequest(
                adapter_id="mine", source_adapter_id=adapter, name="secret"
            ),
        ),
        (methods.DELETE_CHECKPOINT, adapters_pb2.DeleteCheckpointRequest(**named)),
        (methods.SET_CHECKPOINT_TTL, adapters_pb2.SetCheckpointTtlRequest(**named)),
        (methods.DOWNLOAD_CHECKPOINT, adapters_pb2.DownloadCheckpointRequest(**named)),
        (methods.PUBLISH_SNAPSHOT, adapters_pb2.PublishSnapshotRequest(**named)),
        (methods.RELEASE_SNAPSHOT, adapters_pb2.ReleaseSnapshotRequest(**named)),
        (methods.EXPORT_ADAPTER, adapters_pb2.ExportAdapterRequest(adapter_id=adapter)),
    ]


# Methods that cannot name another tenant's adapter. They list or create adapters or
# checkpoints, or concern the whole server.
WITHOUT_AN_ADAPTER = {
    methods.CREATE_ADAPTER.path,
    methods.LIST_ADAPTERS.path,
    methods.LIST_CHECKPOINTS.path,
    methods.IMPORT_ADAPTER.path,
    methods.UPLOAD_CHECKPOINT.path,
    methods.GET_INFO.path,
    methods.GET_TOKENIZER.path,
    methods.DRAIN.path,
    # Needs an admin.
    methods.MOVE_ADAPTER.path,
    # Only weftctl has these.
    "/weft.v1.ServerService/Undrain",
    "/weft.v1.ServerService/DrainLog",
    "/weft.v1.ServerService/WriteSnapshot",
    methods.PROFILE.path,
}


def outcome(target: str, token: str, method: Any, request: Any) -> grpc.StatusCode:
    with grpc.insecure_channel(target) as raw:
        bound = method.bind(raw)
        metadata = [("authorization", f"Bearer {token}")]
        try:
            reply = bound(request, metadata=metadata, timeout=10)
            if method.arity is methods.Arity.DOWNLOAD:
                list(reply)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


def all_methods() -> set[str]:
    files = (adapters_pb2, sampling_pb2, server_pb2, training_pb2)
    return {
        f"/{service.full_name}/{name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for name in service.methods_by_name
    }


def test_a_stolen_token_sees_nothing_of_another_tenant(tokens: Tokens) -> None:
    owner = tokens.add("owner", "acme", "train", "sample")
    thief = tokens.add("thief", "birch", "train", "sample")
    admin = tokens.add("ops", "ops", "admin")
    tried = requests_on("victim")
    assert {m.path for m, _ in tried} | WITHOUT_AN_ADAPTER == all_methods()
    with (
        FakeWeftd(f"--auth-tokens-file={tokens.path}") as server,
        connect(server, owner) as client,
        connect(server, thief) as theirs,
        connect(server, admin) as ops,
    ):
        adapter = client.create_adapter("victim", rank=2)
        adapter.forward_backward(DATA)
        adapter.save("secret")
        adapter.snapshot("secret")
        steps = adapter.info().last_step
        for method, request in tried:
            for name in ("victim", "nobody"):
                text = type(request).FromString(
                    request.SerializeToString().replace(b"victim", name.encode())
                )
                code = outcome(server.target, thief, method, text)
                assert code is grpc.StatusCode.NOT_FOUND, (method.path, name, code)
        assert theirs.adapters() == []
        assert theirs.checkpoints() == theirs.checkpoints("victim") == []
        assert theirs.info().num_adapters == 0
        with pytest.raises(weft.PermissionDenied):
            theirs.create_adapter("other", tenant="acme")
        # The same name is free for the other tenant, whose adapter is
        # separate.
        theirs.create_adapter("victim", rank=4)
        assert client.adapter("victim").info().config.rank == 2
        assert adapter.info().last_step == steps
        assert [c.adapter_id for c in client.checkpoints()] == ["victim"]
        # An upload goes to the tenant's own adapter, even if another tenant has an
        # adapter of the same name.
        client.download_checkpoint("victim", "secret", tokens.path.parent / "files")
        theirs.upload_checkpoint("victim", "mine", tokens.path.parent / "files")
        assert [c.name for c in client.checkpoints()] == ["secret"]
        assert [c.name for c in theirs.checkpoints()] == ["mine"]
        names = [a.adapter_id for a in ops.adapters()]
        assert names == ["acme~victim", "birch~victim"]
        ops.adapter("acme~victim").forward_backward(DATA)
        saved = {c.adapter_id for c in ops.checkpoints()}
        assert saved == {"acme~victim", "birch~victim"}


def test_logs_hold_no_secret_no_path_and_no_text(tokens: Tokens) -> None:
    owner = tokens.add("owner", "acme", "train", "sample")
    admin = tokens.add("ops", "ops", "admin")
    flags = ("--log-level=debug", f"--auth-tokens-file={tokens.path}")
    with FakeWeftd(*flags) as server:
        with connect(server, owner) as client:
            adapter = client.create_adapter("a", rank=2)
            adapter.forward_backward([weft.Datum.next_token([41, 42, 43, 44])])
            adapter.save("one")
            client.set_checkpoint_ttl("a", "one", 60)
            client.delete_checkpoint("a", "one")
            with pytest.raises(weft.PermissionDenied):
                client.drain()
        with (
            connect(server, "weft_guess") as guess,
            pytest.raises(weft.Unauthenticated),
        ):
            guess.adapters()
        with connect(server, admin) as client:
            client.delete_adapter("acme~a")
        # A thread of its own writes the log.
        limit = time.monotonic() + 10
        while "AdapterService/DeleteAdapter" not in (log := server.log()):
            assert time.monotonic() < limit, log
            time.sleep(0.01)
    lines = [json.loads(line) for line in log.splitlines() if '"audit"' in line]
    seen = {(x["method"].lstrip("/"), x["outcome"], x["token"]) for x in lines}
    service = "weft.v1.AdapterService"
    assert (f"{service}/DeleteCheckpoint", "OK", "owner") in seen
    assert (f"{service}/SetCheckpointTtl", "OK", "owner") in seen
    assert (f"{service}/DeleteAdapter", "OK", "ops") in seen
    drain = ("weft.v1.ServerService/Drain", "PERMISSION_DENIED", "owner")
    assert drain in seen
    assert (f"{service}/ListAdapters", "UNAUTHENTICATED", "") in seen
    deleted = [x for x in lines if x["method"].endswith("DeleteAdapter")]
    assert deleted[0]["object"] == "acme~a"
    assert deleted[0]["peer"].startswith("ipv4:127.0.0.1:")
    assert all(len(x["trace_id"]) == 32 for x in lines)
    secrets = [owner, admin, "weft_guess", str(tokens.path.parent), "41, 42", "41,42"]
    secrets += [json.loads(line)["sha256"] for line in tokens.lines.values()]
    for secret in secrets:
        assert secret not in log, secret


def test_calls_that_concern_all_are_audited_without_tokens() -> None:
    names = ["Drain", "Undrain", "WriteSnapshot"]
    with (
        FakeWeftd("--log-level=info") as server,
        grpc.insecure_channel(server.target) as raw,
    ):
        for name in names:
            call: Any = raw.unary_unary(f"/weft.v1.ServerService/{name}")
            call(b"", timeout=10)
        # A thread of its own writes the log.
        wait_until(lambda: server.log().count('"audit"') == len(names))


def open_sockets(address: str, count: int) -> list[socket.socket]:
    host, port = address.rsplit(":", 1)
    made = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((host, int(port)))
        made.append(one)
    return made


@pytest.mark.parametrize("limit", ["--max-connections=0", "--max-connections=1000"])
def test_serves_again_after_all_descriptors_were_taken(limit: str) -> None:
    """0 is the default: half of the files that the server may open. 1000 is more than
    the 64 files that it may open."""
    with FakeWeftd(limit, files=64) as server:
        taken = open_sockets(server.target, 100)
        time.sleep(1.0)
        for one in taken:
            one.close()
        start = time.monotonic()
        with weft.Client(server.target, timeout=15.0) as client:
            assert client.create_adapter("a", rank=2).info().adapter_id == "a"
        # 5 s: gRPC's default pause before it looks at a new connection again.
        assert time.monotonic() - start < 5.0


def test_connections_beyond_the_limit_are_turned_away() -> None:
    with FakeWeftd("--max-connections=4", "--metrics-listen=127.0.0.1:0") as server:
        taken = open_sockets(server.target, 6)
        wait_until(lambda: sum(is_closed(one) for one in taken) >= 2)
        page = scrape(server)
        assert 'weft_connections_refused_total{reason="limit"}' in page
        for one in taken:
            one.close()
        with weft.Client(server.target, timeout=10.0) as client:
            assert client.info().draining is False


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def scrape(server: FakeWeftd) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20) as page:
        text: str = page.read().decode()
        return text


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: Patch) -> Iterator[None]:
    """Makes scrapes reach this machine even if the environment names a proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield
