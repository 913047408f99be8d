"""Tests Grafana dashboards: every query parses, and every metric is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_files import DEPLOY, run, tool

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))


def panels(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["panels"])


def expressions(path: Path) -> list[str]:
    """Returns all queries, with values for Grafana's variables."""
    found = []
    for panel in panels(path):
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "5m")
            found.append(text.replace("$instance", ".+"))
    return found


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_every_query_parses(path: Path, tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query{number}:x", "expr": text}
        for number, text in enumerate(expressions(path))
    ]
    assert rules
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "d", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", str(file))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_panel_ids_are_unique_and_the_datasource_is_a_variable(path: Path) -> None:
    ids = [panel["id"] for panel in panels(path)]
    assert len(ids) == len(set(ids))
    for panel in panels(path):
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"


def documented() -> set[str]:
    """Returns the metric names in deploy/metrics.md."""
    text = (DEPLOY / "metrics.md").read_text()
    return set(re.findall(r"`((?:weft|grpc|process)_\w+)", text))


def used_metrics() -> set[str]:
    """Returns the metric names in the dashboards and in the alert rules."""
    text = (DEPLOY / "prometheus" / "rules.yml").read_text()
    texts = [line for line in text.splitlines() if "record:" not in line]
    for path in DASHBOARDS:
        texts += expressions(path)
    found = re.findall(r"\b((?:weft|grpc|process)_[a-z_]+)\b(?!:)", "\n".join(texts))
    labels = {"grpc_code", "grpc_method", "grpc_service", "grpc_type"}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found} - labels


def test_every_metric_in_use_is_documented() -> None:
    used = used_metrics()
    assert len(used) > 15
    assert used <= documented(), sorted(used - documented())
