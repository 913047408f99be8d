"""Samples from checkpoints, of which no adapter need be on the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
from daemon import Daemon
from models import tiny_model
from token_file import Tokens

import weft

PROMPT = list(range(5, 40))
OPTIONS: dict[str, Any] = {
    "num_samples": 3,
    "max_tokens": 12,
    "seed": 7,
    "ignore_eos": True,
    "prompt_logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    server = Daemon(tiny_model("llama-tied"), tmp_path / "run")
    server.start()
    yield server
    server.kill()


def train(adapter: Any, steps: int, first: int = 1) -> None:
    for step in range(steps):
        tokens = [first + step + position for position in range(9)]
        adapter.forward_backward([weft.Datum.next_token(tokens)])
        adapter.optim_step(learning_rate=1e-2)


def drawn(sampler: Any, **options: Any) -> list[Any]:
    """Returns all bits of what a sampler draws."""
    result = sampler.sample(PROMPT, **OPTIONS, **options)
    bits: list[Any] = [np.asarray(result.prompt_logprobs).tobytes()]
    for sample in result.samples:
        bits += [list(sample.tokens), np.asarray(sample.logprobs).tobytes()]
        bits.append(repr(sample.top_logprobs))
    return bits


def streamed(sampler: Any) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for delta in sampler.sample_stream(PROMPT, **OPTIONS):
        tokens.setdefault(delta.sample_index, []).extend(delta.tokens)
    return tokens


def test_a_checkpoint_draws_the_bits_of_its_adapter(daemon: Daemon) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        train(adapter, 3)
        adapter.snapshot("then")
        adapter.save("small", kind="sampler")
        adapter.save("whole")
        train(adapter, 2, first=20)
        loaded = client.create_adapter("loaded", rank=4)
        loaded.load("small", source="a", weights_only=True)
        expected = drawn(adapter, snapshot="then")
        assert expected != drawn(adapter)
        assert drawn(loaded) == expected
        for name in ("small", "whole"):
            checkpoint = client.checkpoint("a", name)
            assert drawn(checkpoint) == expected
            assert checkpoint.sample(PROMPT, **OPTIONS).version == 4
            tokens = [
                list(s.tokens) for s in checkpoint.sample(PROMPT, **OPTIONS).samples
            ]
            assert streamed(checkpoint) == dict(enumerate(tokens))
        assert adapter.info().snapshots == ["then"]
        client.delete_adapter("a")
        client.delete_adapter("loaded")
        assert drawn(client.checkpoint("a", "small")) == expected
        assert client.adapters() == []
        assert "weft_sampler_cache_loads_total 2\n" in daemon.scrape()
    daemon.terminate()
    assert daemon.wait() == 0
    daemon.start()
    with daemon.client() as client:
        assert drawn(client.checkpoint("a", "small")) == expected
        assert "weft_sampler_cache_checkpoints 1\n" in daemon.scrape()


def test_a_checkpoint_that_cannot_be_sampled_is_named(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        adapter.save("kept", kind="sampler")
        with pytest.raises(weft.NotFound, match=r'checkpoint: "none".*kept'):
            client.checkpoint("a", "none").sample(PROMPT)
        with pytest.raises(weft.NotFound, match="checkpoint: "):
            client.checkpoint("nobody", "kept").sample(PROMPT)
        for name, options, message in (
            ("kept", {"snapshot": "s"}, "snapshot must not be set with checkpoint"),
            ("kept", {"in_flight": True}, "in_flight must not be set with checkpoint"),
            ("a/b", {}, "checkpoint"),
        ):
            with pytest.raises(weft.InvalidArgument, match=message):
                client.checkpoint("a", name).sample(PROMPT, **options)
        with pytest.raises(weft.InvalidArgument, match="adapter_id is required"):
            client.checkpoint("", "kept").sample(PROMPT)
        client.delete_checkpoint("a", "kept")
        with pytest.raises(weft.NotFound, match="checkpoint"):
            client.checkpoint("a", "kept").sample(PROMPT)
        adapter.save("kept", kind="sampler")
    daemon.terminate()
    assert daemon.wait() == 0
    folder = tmp_path / "run" / "checkpoints"
    assert folder.is_dir()
    for model, flags in (("llama-tied", ("--max-rank", "2")), ("qwen3", ())):
        place = tmp_path / model
        shutil.copytree(folder, place / "checkpoints")
        with (
            daemon_module.running(tiny_model(model), place, *flags) as other,
            other.client() as client,
            pytest.raises(weft.FailedPrecondition, match="checkpoint"),
        ):
            client.checkpoint("a", "kept").sample(PROMPT)


def test_a_tenant_samples_only_its_own_checkpoints(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    flags = ("--auth-tokens-file", str(tokens.path))
    access = {
        name: tokens.add(name, name, "train", "sample") for name in ("alice", "bob")
    }
    reader = tokens.add("reader", "alice", "read")
    sampler = tokens.add("sampler", "alice", "sample")
    admin = tokens.add("admin", "ops", "admin")
    with daemon_module.running(tiny_model("llama-tied"), tmp_path, *flags) as daemon:

        def client(token: str) -> weft.Client:
            return weft.Client(
                daemon.address, security=weft.Security(token=token), retry=weft.NO_RETRY
            )

        expected = {}
        for seed, name in enumerate(access):
            with client(access[name]) as own:
                adapter = own.create_adapter("a", rank=4, seed=seed)
                train(adapter, 1 + seed)
                adapter.save("same", kind="sampler")
                adapter.save(f"of-{name}", kind="sampler")
                expected[name] = drawn(adapter)
                own.delete_adapter("a")
        assert expected["alice"] != expected["bob"]
        for name, token in access.items():
            with client(token) as own:
                assert drawn(own.checkpoint("a", "same")) == expected[name]
        with client(access["bob"]) as bob:
            with pytest.raises(weft.NotFound, match="of-bob") as refused:
                bob.checkpoint("a", "of-alice").sample(PROMPT)
            assert "alice'" not in str(refused.value).replace("of-alice", "")
            with pytest.raises(weft.InvalidArgument):
                bob.checkpoint("alice~a", "same").sample(PROMPT)
        with client(sampler) as own:
            assert drawn(own.checkpoint("a", "same")) == expected["alice"]
        with client(admin) as own:
            assert drawn(own.checkpoint("bob~a", "same")) == expected["bob"]
        with client(reader) as own, pytest.raises(weft.PermissionDenied):
            own.checkpoint("a", "same").sample(PROMPT)
