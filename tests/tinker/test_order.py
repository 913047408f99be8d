"""Tests the order of requests, the end of sessions, and limits in cases that the SDK
does not cause. The client sends requests in any order and leaves at any time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon import wait_until
from raw_client import RawClient
from tinker_daemon import TinkerDaemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerDaemon]:
    tinker = TinkerDaemon(tmp_path_factory.mktemp("order"))
    yield tinker
    tinker.stop()


def logged(daemon: TinkerDaemon, model: str) -> int:
    """Returns how often the log names the model's adapter."""
    name = model.replace(":", ".").encode()
    segments = (daemon.state / "log").iterdir()
    return sum(file.read_bytes().count(name) for file in segments)


def adapters(daemon: TinkerDaemon) -> list[str]:
    with daemon.server.client() as client:
        return [info.adapter_id for info in client.adapters()]


def trained(client: RawClient) -> tuple[str, str]:
    """Returns a model after one step, and its checkpoint. The next seq_id is 4."""
    model = client.model(client.session())
    client.train(model, 1)
    client.step(model, 2)
    path = client.result(client.save(model, 3, "early"))["path"]
    return model, path


def sampled_checkpoint(client: RawClient, name: str) -> str:
    """Returns the path of a model's weights for sampling."""
    model, _ = trained(client)
    saved = client.must("save_weights_for_sampler", model_id=model, seq_id=4, path=name)
    return str(client.result(saved)["path"])


def publish(client: RawClient, model: str, seq: int, number: int, **kind: str) -> Any:
    """Publishes the model's weights as session `number`. Returns the result."""
    made = client.must(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=seq,
        sampling_session_seq_id=number,
        **kind,
    )
    return client.result(made)


def send(client: RawClient, model: str, path: str, seq: int) -> Any:
    if seq in (6, 7):
        return client.load(model, seq, path)
    return client.step(model, seq) if seq in (5, 9) else client.train(model, seq)


def test_a_load_that_arrives_late_keeps_its_place(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    norms = []
    for order in ((5, 6, 7, 8, 9), (9, 8, 7, 6, 5)):
        model, path = trained(client)
        client.train(model, 4, weight=2)
        futures = {seq: send(client, model, path, seq) for seq in order}
        for seq in (6, 7):
            assert client.result(futures[seq])["path"] == path
        norms.append((client.norm(futures[5]), client.norm(futures[9])))
    assert norms[0] == norms[1]
    assert norms[0][0] != norms[0][1]


def test_two_loads_and_a_kill_run_nothing_twice(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    norms = []
    for kill in (False, True):
        model, path = trained(client)
        client.result(client.load(model, 4, path))
        for seq in (5, 7):
            client.train(model, seq, weight=3)
            client.result(client.step(model, seq + 1))
        client.result(client.load(model, 9, path))
        client.train(model, 10)
        norms.append(client.norm(client.step(model, 11)))
        if kill:
            daemon.server.kill()
            daemon.server.start()
        client.train(model, 12)
        norms.append(client.norm(client.step(model, 13)))
    assert norms[:2] == norms[2:]


def test_a_number_far_ahead_is_refused_and_not_kept(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    model = client.model(client.session())
    before = logged(daemon, model)
    far = 1 << 40
    body = {"model_id": model, "seq_id": far, "adam_params": {}}
    status, reply = client.ask("optim_step", body)
    assert status == 429 and "share" in reply["detail"], reply
    assert logged(daemon, model) == before
    # The record of a step that is kept names the adapter.
    client.step(model, 500)
    assert logged(daemon, model) == before + 1


def test_a_refused_step_is_passed_though_the_share_is_in_use(tmp_path: Path) -> None:
    """Steps come until one is refused. Then the first fails, and all others run."""
    with TinkerDaemon(tmp_path, "--request-memory", "2MiB") as small:
        client = RawClient(small)
        model = client.model(client.session())
        others = []
        body = {"model_id": model, "adam_params": {"learning_rate": 1e-4}}
        for seq in range(2, 1000):
            status, reply = client.ask("optim_step", {**body, "seq_id": seq})
            if status == 429:
                break
            others.append(reply)
        assert 3 < len(others) < 900, reply
        refused = client.result(client.train(model, 1, loss="none"))
        assert refused["category"] == "user", refused
        for future in others:
            assert "metrics" in client.result(future)


def test_a_session_that_ends_takes_its_adapters_along(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    session = client.session()
    client.model(session, 0)
    # The second model is still being made when the session ends.
    client.must(
        "create_model",
        session_id=session,
        model_seq_id=1,
        base_model="toy",
        lora_config={"rank": 4, "seed": 3},
    )
    client.must(f"sessions/{session}/finish")
    wait_until(lambda: not any(session in name for name in adapters(daemon)))


def test_a_checkpoint_is_sampled_from_while_its_last_session_ends(
    daemon: TinkerDaemon,
) -> None:
    client = RawClient(daemon)
    path = sampled_checkpoint(client, "kept")
    tokens = []
    for _ in range(4):
        session = client.session()
        status, reply = client.sampler(session, 0, path)
        assert status == 200, reply
        sampled = client.result(client.sample(reply["sampling_session_id"], 0))
        tokens.append(sampled["sequences"][0]["tokens"])
        client.must(f"sessions/{session}/finish")
    assert tokens == [tokens[0]] * 4


def test_a_sampling_session_that_is_asked_for_twice_is_one(
    daemon: TinkerDaemon,
) -> None:
    """Repeats the call while the first call looks for the checkpoint."""
    client = RawClient(daemon)
    path = sampled_checkpoint(client, "twice")
    session = client.session()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: client.sampler(session, 0, path), range(8)))
    assert {status for status, _ in replies} == {200}
    assert len({reply["sampling_session_id"] for _, reply in replies}) == 1


def test_a_publication_that_is_sent_again_is_one(daemon: TinkerDaemon) -> None:
    """The SDK counts sampling_session_seq_id up when it sends the call again."""
    client = RawClient(daemon)
    session = client.session()
    models = [client.model(session, number) for number in range(2)]

    def publish_all(number: int) -> list[Any]:
        return [
            publish(client, model, seq, number, kind=kind)["sampling_session_id"]
            for model in models
            for seq, kind in enumerate(("snapshot", "inflight"), 1)
        ]

    first = publish_all(0)
    assert len(set(first)) == 4
    daemon.server.kill()
    daemon.server.start()
    assert first == publish_all(7)
    for sampler in first:
        assert client.ask("samplers/" + sampler, method="GET")[0] == 200


def test_a_model_keeps_the_snapshots_that_were_used_last(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    model = client.model(client.session())
    samplers = []
    for number in range(40):
        published = publish(client, model, number + 1, number)
        samplers.append(published["sampling_session_id"])
        client.result(client.sample(samplers[0], number))
    with daemon.server.client() as weft:
        info = weft.adapter(model.replace(":", ".")).info()
    assert len(info.snapshots) == 32
    assert client.ask("samplers/" + samplers[1], method="GET")[0] == 404
    for sampler in (samplers[0], samplers[-1]):
        assert client.ask("samplers/" + sampler, method="GET")[0] == 200


def test_samplers_in_flight_hold_no_weights(daemon: TinkerDaemon) -> None:
    client = RawClient(daemon)
    model = client.model(client.session())
    samplers: list[str] = []
    answers: list[Any] = []

    def drawn(number: int) -> Any:
        return client.result(client.sample(samplers[0], number))["sequences"]

    for number in range(40):
        published = publish(client, model, number + 1, number, kind="inflight")
        samplers.append(published["sampling_session_id"])
        answers.append(drawn(number))
    client.train(model, 41)
    client.result(client.step(model, 42))
    follows = drawn(40)
    assert follows != answers[0]
    with daemon.server.client() as weft:
        assert weft.adapter(model.replace(":", ".")).info().snapshots == []
    assert client.ask("samplers/" + samplers[1], method="GET")[0] == 404
    daemon.server.kill()
    daemon.server.start()
    assert drawn(41) == follows
    failure = publish(client, model, 43, 40, kind="moving")
    assert failure["category"] == "user"
    assert 'kind "moving" is not offered: use snapshot or inflight' in failure["error"]
