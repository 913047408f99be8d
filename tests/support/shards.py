"""A pytest plugin that runs one part of the tests: -p shards --shard=2/3.

Tests of the same model share a daemon and a reference, so they stay together. Each test
is in exactly one part.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", required=True, help="number/count, from 1/count on")


def model_of(item: pytest.Item) -> str:
    """Returns the model that a test names in its parameters, with its ranks. A test
    without a model stands for itself."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return str(params.get("group", params.get("kind", item.nodeid)))


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
