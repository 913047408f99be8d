"""A pytest plugin that runs one part of the tests: -p shards --shard=2/3.

Tests of the same model share a daemon and a reference, so they stay together. Each test
is in exactly one part.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", required=True, help="number/count, from 1/count on")


# Parameters that name a model or what a module makes once: a tuple begins with it.
SHARED = ("group", "versioned", "kind", "case", "folder")


def model_of(item: pytest.Item) -> str:
    """Returns the model that a test names in its parameters. A test without a model
    stands for itself."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    shared = next((params[name] for name in SHARED if name in params), item.nodeid)
    return str(shared[0] if isinstance(shared, tuple) else shared)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    number, count = map(int, config.getoption("shard").split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard={number}/{count} names no part")
    order: dict[str, int] = {}
    for item in items:
        order.setdefault(model_of(item), len(order))
    kept = [i for i in items if order[model_of(i)] % count == number - 1]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
    items[:] = kept
