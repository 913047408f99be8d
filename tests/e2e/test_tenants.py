"""Tests tenants: only a flooding tenant is refused, served tokens are counted, and
slots are limited."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import daemon as daemon_module
import pytest
from models import tiny_model
from raw import Raw, datum
from texts import next_token, random_tokens
from token_file import Tokens

import weft

VOCAB = 320
LONG = [datum(random_tokens(VOCAB, 500, seed)) for seed in range(16)]
FLAGS = (*("--tenant-weights", "alice=4,bob=1"), *("--max-adapters-per-tenant", "2"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("weftd-tenants")
    with daemon_module.running(tiny_model("llama-tied"), folder, *FLAGS) as running:
        yield running


def by_tenant(page: str, name: str) -> dict[str, float]:
    rows = re.findall(rf'^{name}{{tenant="(\w+)"}} (\S+)$', page, re.MULTILINE)
    return {tenant: float(value) for tenant, value in rows}


def test_slots_are_limited_by_tenant(daemon: Any, unique: Any) -> None:
    with daemon.client(retry=weft.RetryPolicy(max_attempts=1)) as client:
        names = [unique("slot") for _ in range(3)]
        for name in names[:2]:
            client.create_adapter(name, rank=4, tenant="carol")
        with pytest.raises(weft.ResourceExhausted, match="slots of tenant 'carol'"):
            client.create_adapter(names[2], rank=4, tenant="carol")
        alone = client.create_adapter(names[2], rank=4)
        assert alone.info().tenant == names[2]
        # A repeated call must have the same tenant too.
        with pytest.raises(weft.AlreadyExists):
            client.create_adapter(names[0], rank=4)
        with pytest.raises(weft.InvalidArgument, match="tenant"):
            client.create_adapter(unique("slot"), tenant="a/b")


def test_a_load_gives_a_new_adapter_its_tenant(daemon: Any, unique: Any) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter(unique("kept"), rank=4, tenant="dave")
        adapter.save("one")
        client.delete_adapter(adapter.id)
        assert adapter.load("one").tenant == "dave"


def test_served_tokens_are_counted_by_tenant(daemon: Any, unique: Any) -> None:
    train, sample = "weft_tenant_train_tokens_total", "weft_tenant_sample_tokens_total"
    before = daemon.scrape()
    with daemon.client() as client:
        for tenant in ("alice", "eve"):
            adapter = client.create_adapter(unique("counted"), rank=4, tenant=tenant)
            adapter.forward_backward([next_token(random_tokens(VOCAB, 41, 1))])
            adapter.sample([5, 6, 7], num_samples=2, max_tokens=9, ignore_eos=True)
    after = daemon.scrape()
    for name, tokens in ((train, 40.0), (sample, 21.0)):
        old, new = by_tenant(before, name), by_tenant(after, name)
        moved = {tenant: new[tenant] - old[tenant] for tenant in new}
        assert moved == {"alice": tokens, "bob": 0.0, "other": tokens}, name
    assert set(by_tenant(after, "weft_tenant_queue_depth")) == {"alice", "bob", "other"}


def test_a_flood_is_refused_and_nobody_else(tmp_path: Path) -> None:
    """Three tenants send more than they may hold, and a fourth sometimes sends a
    request."""
    tokens = Tokens(tmp_path / "tokens")
    flags = ("--request-memory", "8MiB", "--auth-tokens-file", str(tokens.path))
    names = ("ann", "bert", "cleo", "polite")
    access = {name: tokens.add(name, name, "train") for name in names}
    with (
        daemon_module.running(tiny_model("llama-tied"), tmp_path, *flags) as daemon,
        ExitStack() as stack,
        ThreadPoolExecutor(96) as pool,
    ):
        raws = {
            name: stack.enter_context(Raw(daemon.address, token))
            for name, token in access.items()
        }
        for raw in raws.values():
            assert raw.create("a", rank=4).code == "OK"
        flood = [
            pool.submit(raws[name].forward, "a", LONG)
            for _ in range(32)
            for name in names[:3]
        ]
        for _ in range(6):
            outcome = raws["polite"].forward("a", LONG[:1])
            assert outcome.code == "OK", outcome
        assert not all(future.done() for future in flood), "LONG is too short"
        outcomes = [future.result(120) for future in flood]
    refused = [o for o in outcomes if o.code != "OK"]
    assert refused and {o.code for o in refused} == {"RESOURCE_EXHAUSTED"}
    for outcome in refused:
        assert int(outcome.trailers["grpc-retry-pushback-ms"]) > 0
