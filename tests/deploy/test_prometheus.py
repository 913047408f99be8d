"""Tests the alert rules: each is valid, has its own test, and has a section of the
runbook."""

from __future__ import annotations

import re
from typing import Any

import yaml
from deploy_files import DEPLOY, ROOT, run, tool

FOLDER = DEPLOY / "prometheus"
RUNBOOK = DEPLOY / "RUNBOOK.md"
METRIC = re.compile(r"\b((?:weft|grpc_server|process)_[a-z_]+)")


def alert_rules() -> list[dict[str, Any]]:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    return [
        rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    ]


def alerts() -> set[str]:
    return {rule["alert"] for rule in alert_rules()}


def test_configuration_and_rules_are_valid() -> None:
    run(tool("promtool"), "check", "config", "prometheus.yml", cwd=FOLDER)
    run(tool("promtool"), "check", "rules", "rules.yml", cwd=FOLDER)


def test_rules_fire_and_stay_quiet_as_their_tests_say() -> None:
    run(tool("promtool"), "test", "rules", "rules_test.yml", cwd=FOLDER)


def test_every_alert_has_a_firing_and_a_quiet_test() -> None:
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    firing = {check["alertname"] for check in checks if check["exp_alerts"]}
    quiet = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert firing == alerts()
    assert quiet == alerts()


def anchor(title: str) -> str:
    """Returns the link of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def sections() -> dict[str, str]:
    """Returns the runbook's sections by their links."""
    _, *parts = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)
    return {
        anchor(title): text
        for title, _, text in (part.partition("\n") for part in parts)
    }


def test_every_alert_links_its_section_of_the_runbook() -> None:
    found = sections()
    for rule in alert_rules():
        link = f"{RUNBOOK.relative_to(ROOT)}#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == link
        text = found[rule["alert"].lower()]
        # The runbook must name the metrics that the alert uses.
        metrics = set(METRIC.findall(rule["expr"])) - {"grpc_code"}
        bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics}
        for name in bases - {"weft_startup_phase"}:
            assert name in text, (rule["alert"], name)
    for link in re.findall(r"\]\(#([\w-]+)\)", RUNBOOK.read_text()):
        assert link in found, link


def exported() -> set[str]:
    """Returns all quoted words in the sources. They include the metrics' names."""
    sources = [
        path
        for folder in ("src", "server")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".cc", ".h")
    ]
    texts = (path.read_text() for path in sources)
    return {name for text in texts for name in re.findall(r'"(\w+)"', text)}


def test_every_metric_of_the_runbook_is_exported() -> None:
    known = exported()
    named = set(METRIC.findall(RUNBOOK.read_text()))
    assert len(named) > 20
    assert named <= known, sorted(named - known)
