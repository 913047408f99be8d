"""Alert rules: valid, tested one by one, and each with a line in the runbook."""

from __future__ import annotations

import yaml
from deploy_files import DEPLOY, run, tool

FOLDER = DEPLOY / "prometheus"


def alerts() -> set[str]:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    return {
        rule["alert"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


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


def test_every_alert_is_in_the_runbook() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert not [name for name in alerts() if f"`{name}`" not in text]
