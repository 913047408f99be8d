"""Two logs and an edge in front of each daemon: any edge takes any call."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daemon as daemon_module
import httpx
import pytest
import raw
import stores
import tinker_sdk
from door import Door
from doors import Doors, Site
from durable import train
from members import Fleet
from sdk_process import SdkClient

import weft
from weft import methods
from weft._proto import adapters_pb2, training_pb2

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)
needs_sdk = pytest.mark.skipif(
    not tinker_sdk.SDK.exists(),
    reason="no Tinker SDK: deploy/setup.sh --tests installs it",
)

PROTOBUF = {"Content-Type": "application/x-protobuf"}
GET = "/weft.v1.AdapterService/GetAdapter"


@pytest.fixture
def doors(fleet: Fleet) -> Iterator[Doors]:
    with Doors(fleet) as made:
        yield made


@pytest.fixture
def two(doors: Doors) -> tuple[Site, Site]:
    """Returns the sites of logs 0 and 1."""
    return doors.add("a"), doors.add("b")


def get(doors: Doors, site: Site, token: str, adapter: str, **more: str) -> Any:
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter)
    headers = {"weft_adapter_id": adapter, **more}
    return doors.call(site, token, methods.GET_ADAPTER, request, **headers)


def learn(doors: Doors, site: Site, token: str, adapter: str) -> None:
    """The first call shows the daemon where the adapter is, and says so."""
    code, message = get(doors, site, token, adapter)
    assert code == "FAILED_PRECONDITION" and "has adapter" in message, message


def test_a_grpc_call_goes_to_the_owner(
    doors: Doors, two: tuple[Site, Site], tmp_path: Path
) -> None:
    a, b = two
    with doors.client(b, doors.alice) as client:
        client.create_adapter("x", rank=4, seed=1)
    learn(doors, a, doors.alice, "x")
    before = a.handled("GetAdapter"), b.handled("GetAdapter")
    code, reply = get(doors, a, doors.alice, "x")
    assert code == "OK" and reply.adapter.adapter_id == "x", reply
    after = a.handled("GetAdapter"), b.handled("GetAdapter")
    assert after == (before[0], before[1] + 1)
    # The name is alice's alone, and here or there the token must be good.
    assert get(doors, a, doors.bob, "x")[0] == "NOT_FOUND"
    assert get(doors, a, "weft_none", "x")[0] == "UNAUTHENTICATED"

    # Weft's client by one door, of which it knows no other.
    with doors.client(a, doors.alice) as client:
        for seed in range(3):
            train(client, "x", seed)
        drawn = client.adapter("x").sample([5, 6, 7], max_tokens=4, ignore_eos=True)
        assert len(drawn.samples[0].tokens) == 4
        assert list(client.adapter("x").sample_stream([5, 6], max_tokens=3))
        client.adapter("x").save("kept")
        client.adapter("x").export(tmp_path / "peft")
    assert get(doors, b, doors.alice, "x")[1].adapter.optim_steps == 3
    assert a.handled("OptimStep") == 0

    # Almost 64 MiB. The owner refuses what is in it.
    size = (64 << 20) - 4096
    large = training_pb2.ForwardBackwardRequest(
        adapter_id="x",
        data=[training_pb2.Datum(tokens_le=bytes(size))],
        loss=training_pb2.LossConfig(function=training_pb2.LOSS_FUNCTION_CROSS_ENTROPY),
    )
    start = time.monotonic()
    code, message = doors.call(
        a, doors.alice, methods.FORWARD_BACKWARD, large, weft_adapter_id="x"
    )
    print(f"64 MiB by gRPC: {time.monotonic() - start:.2f} s")
    assert code == "INVALID_ARGUMENT", message
    assert a.handled("ForwardBackward") == 0


def test_a_call_goes_one_hop_at_most(doors: Doors, two: tuple[Site, Site]) -> None:
    a, b = two
    with doors.client(b, doors.alice) as client:
        client.create_adapter("x", rank=4)
    learn(doors, a, doors.alice, "x")
    # What a client says about owners and hops leads nowhere.
    code, _ = get(doors, a, doors.alice, "x", weft_owner="127.0.0.1:1", weft_door="1")
    assert code == "OK"
    code, message = get(doors, a, doors.alice, "x", weft_hop="1")
    assert code == "FAILED_PRECONDITION" and b.address in message
    # Both daemons remember that the other has the adapter, which is gone.
    with doors.client(b, doors.alice) as client:
        client.delete_adapter("x")
        client.create_adapter("y", rank=4)
    with raw.Raw(a.member.address, doors.alice) as direct:
        config = adapters_pb2.LoraConfig(rank=4)
        make = adapters_pb2.CreateAdapterRequest(adapter_id="x", config=config)
        assert direct.call(methods.CREATE_ADAPTER, make).code == "OK"
        learn(doors, b, doors.alice, "x")
        # Of two that are not equal, the one that has the adapter is right.
        assert [get(doors, site, doors.alice, "x")[0] for site in two] == ["OK", "OK"]
        remove = adapters_pb2.DeleteAdapterRequest(adapter_id="x")
        assert direct.call(methods.DELETE_ADAPTER, remove).code == "OK"
    time.sleep(0.2)
    count = len(a.lines(GET)), len(b.lines(GET))
    # So the first one sends the call on. The second one does not, looks, and forgets.
    for site in two:
        assert get(doors, site, doors.alice, "x")[0] == "NOT_FOUND"
    daemon_module.wait_until(
        lambda: len(a.lines(GET)) + len(b.lines(GET)) >= sum(count) + 3
    )
    time.sleep(0.2)
    assert (len(a.lines(GET)), len(b.lines(GET))) == (count[0] + 1, count[1] + 2)


def post(doors: Doors, site: Site, path: str, body: Any, **more: str) -> httpx.Response:
    key = f"tml-{doors.alice}"
    headers = {"X-API-Key": key, "Content-Type": "application/json", **more}
    with httpx.Client(verify=doors.context(), timeout=60) as client:
        url = f"{site.url}/api/v1/{path}"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.post(url, content=content, headers=headers)


def test_an_http_request_goes_to_the_owner(
    doors: Doors, two: tuple[Site, Site]
) -> None:
    a, b = two
    session = post(doors, b, "create_session", {"tags": []}).json()["session_id"]
    assert session.startswith("log001") and len(session) == 32
    beat = {"session_id": session}
    assert post(doors, b, "session_heartbeat", beat).status_code == 200
    for more in ({}, {"weft-owner": "127.0.0.1:1", "weft-door": "2"}):
        assert post(doors, a, "session_heartbeat", beat, **more).status_code == 200
    lines = a.lines("/api/v1/session_heartbeat")
    assert '"upstream":"421 : 200"' in lines[-1], lines
    # Who says that an edge has sent the request gets it no further.
    reply = post(doors, a, "session_heartbeat", beat, **{"weft-hop": "1"})
    assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
    # A name that the certificate is not for.
    reply = post(doors, a, "session_heartbeat", beat, Host="evil.example")
    assert reply.status_code == 421
    # A token that one edge makes is good at the other.
    jwt = post(doors, a, "auth/token", {}).json()["jwt"]
    reply = post(doors, b, "session_heartbeat", beat, **{"X-API-Key": jwt})
    assert reply.status_code == 200

    made = post(
        doors,
        a,
        "create_model",
        {**beat, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}},
    ).json()
    assert made["model_id"] == f"{session}:train:0"
    # A ForwardBackwardRequest of wire.proto with model_id, seq_id, and a field that is
    # not known.
    size = (64 << 20) - 4096
    name = made["model_id"].encode()
    length = [
        (size >> (7 * part)) & 127 | (128 if part < 3 else 0) for part in range(4)
    ]
    step = b"\x0a%c%s\x10\x01\xa2\x06%s" % (len(name), name, bytes(length))
    step += bytes(size)
    start = time.monotonic()
    reply = post(doors, a, "forward_backward", step, **PROTOBUF)
    print(f"64 MiB by HTTP: {time.monotonic() - start:.2f} s")
    assert reply.status_code == 200, reply.text
    assert reply.json()["request_id"] == f"{session}:train:0:1"
    # A long poll, for a step that waits for one that does not come.
    update = {"model_id": made["model_id"], "seq_id": 3, "adam_params": {}}
    late = post(doors, a, "optim_step", update).json()["request_id"]
    start = time.monotonic()
    reply = post(doors, a, "retrieve_future", {"request_id": late})
    seconds = time.monotonic() - start
    assert reply.status_code == 408 and 29 < seconds < 45, (reply, seconds)

    # Nobody has log 1 any more.
    b.member.kill()
    start = time.monotonic()
    reply = post(doors, a, "session_heartbeat", beat)
    assert reply.status_code in (502, 503) and time.monotonic() - start < 8
    b.close()
    reply = post(doors, a, "session_heartbeat", beat)
    assert reply.status_code == 503 and reply.headers["retry-after"] == "1"


def test_an_edge_trusts_the_fleets_authority_only(
    doors: Doors, two: tuple[Site, Site]
) -> None:
    a, b = two
    with doors.client(b, doors.alice) as client:
        client.create_adapter("x", rank=4)
    session = post(doors, b, "create_session", {"tags": []}).json()["session_id"]
    learn(doors, a, doors.alice, "x")
    assert get(doors, a, doors.alice, "x")[0] == "OK"
    b.show_strangers_certificate()
    assert get(doors, a, doors.alice, "x")[0] == "UNAVAILABLE"
    reply = post(doors, a, "session_heartbeat", {"session_id": session})
    assert reply.status_code == 503


def test_edges_show_each_other_certificates(fleet: Fleet) -> None:
    with Doors(fleet, mtls=True) as doors:
        a, b = doors.add("a"), doors.add("b")
        session = post(doors, b, "create_session", {"tags": []}).json()["session_id"]
        beat = {"session_id": session}
        assert post(doors, a, "session_heartbeat", beat).status_code == 200
        config = adapters_pb2.LoraConfig(rank=4)
        make = adapters_pb2.CreateAdapterRequest(adapter_id="x", config=config)
        assert doors.call(b, doors.alice, methods.CREATE_ADAPTER, make)[0] == "OK"
        learn(doors, a, doors.alice, "x")
        assert get(doors, a, doors.alice, "x")[0] == "OK"
        doors.client_certificate = None  # nginx answers 400.
        assert get(doors, a, doors.alice, "x")[0] == "INTERNAL"


@needs_sdk
def test_the_sdk_goes_on_by_another_door(
    doors: Doors, two: tuple[Site, Site], tmp_path: Path
) -> None:
    a, b = two
    with Door() as door:
        door.point(b.address)
        url = door.url.replace("http://127.0.0.1", "https://localhost")
        sdk = SdkClient(url, tmp_path / "sdk", more=doors.environment())
        try:
            daemon_module.wait_until(lambda: sdk.rounds > 2)
            door.point(a.address)
            before = sdk.rounds
            # With a sampling session of its own in each tenth round.
            daemon_module.wait_until(lambda: sdk.rounds > before + 12)
            sdk.stop()
        finally:
            sdk.kill()
    for path in ("forward_backward", "retrieve_future", "asample"):
        lines = a.lines(f"/api/v1/{path}")
        assert any('"upstream":"421 : 200"' in line for line in lines), path
    # A run of log 0 begins with what the model of log 1 has saved.
    runs = httpx.get(
        f"{a.url}/api/v1/checkpoints",
        headers={"X-API-Key": f"tml-{doors.alice}"},
        verify=doors.context(),
    ).json()["checkpoints"]
    (path,) = [one["tinker_path"] for one in runs]
    assert path.startswith("tinker://log001")
    run, _, name = path.removeprefix("tinker://").split("/")
    sampler = f"tinker://{run}/sampler_weights/{name}"
    saved = post(doors, a, "weights_info", {"tinker_path": path})
    assert saved.status_code == 200, saved.text
    with doors.client(a, doors.alice) as client:
        adapter = client.adapter(run.replace(":", "."))
        adapter.save(f"sampler_weights.{name}")
    environment = {**tinker_sdk.environment(a.url), **doors.environment()}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "tinker")
    script = Path(__file__).with_name("sdk_other_log.py")
    done = subprocess.run(
        [str(tinker_sdk.SDK), str(script), path, sampler],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rank, tokens, model, session = done.stdout.splitlines()
    assert rank == "4" and len(json.loads(tokens)) == 6
    assert model.startswith("log000") and session.startswith("log000")


@needs_sdk
def test_clients_go_on_when_the_owner_dies(
    doors: Doors, two: tuple[Site, Site], tmp_path: Path
) -> None:
    a, b = two
    c = doors.add("c", "standby")
    with doors.client(b, doors.alice) as client:
        client.create_adapter("x", rank=4)
    with Door() as door:
        door.point(b.address)
        url = door.url.replace("http://127.0.0.1", "https://localhost")
        sdk = SdkClient(url, tmp_path / "sdk", more=doors.environment())
        try:
            daemon_module.wait_until(lambda: sdk.rounds > 2)
            door.point(a.address)
            with doors.client(a, doors.alice, timeout=60) as client:
                train(client, "x", 0)
                b.member.kill()
                start = time.monotonic()
                train(client, "x", 1)
                print(f"gRPC goes on after {time.monotonic() - start:.1f} s")
            before = sdk.rounds
            daemon_module.wait_until(lambda: sdk.rounds > before + 3)
            print(f"the SDK goes on after {time.monotonic() - start:.1f} s")
            sdk.stop()
        finally:
            sdk.kill()
    assert c.member.served_log() == 1
    # A client without knowledge of MOVED, by the first door.
    learned = get(doors, a, doors.alice, "x")
    if learned[0] != "OK":
        learned = get(doors, a, doors.alice, "x")
    assert learned[0] == "OK" and learned[1].adapter.optim_steps == 2, learned


def test_a_standbys_edge_leads_to_an_owner(
    doors: Doors, two: tuple[Site, Site]
) -> None:
    a, b = two
    for site, name in ((a, "x"), (b, "y")):
        with doors.client(site, doors.alice) as client:
            client.create_adapter(name, rank=4)
    standby = doors.add("c", "standby")
    codes = [get(doors, standby, doors.alice, name)[0] for name in ("x", "y")]
    # It knows one owner, which answers MOVED for what the other one has.
    assert sorted(codes) == ["FAILED_PRECONDITION", "OK"]
    with doors.client(standby, doors.alice) as client:
        assert {one.adapter_id for one in client.adapters()} == {"x", "y"}
        for name in ("x", "y"):
            train(client, name, 0)
        with pytest.raises(weft.NotFound):
            client.adapter("z").info()
