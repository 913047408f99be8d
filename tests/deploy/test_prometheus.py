"""Tests the alert rules: each is valid, has its own test, and has a section of the
runbook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from deploy_files import DEPLOY, ROOT, run, tool

FOLDER = DEPLOY / "prometheus"
RUNBOOK = DEPLOY / "RUNBOOK.md"
Json = dict[str, Any]
METRIC = re.compile(r"\b((?:weft|grpc_server|process)_[a-z_]+)")


def alert_rules() -> list[Json]:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    return [
        rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    ]


def alerts() -> set[str]:
    return {rule["alert"] for rule in alert_rules()}


def test_configuration_and_rules_are_valid() -> None:
    run(tool("promtool"), "check", "config", "prometheus.yml", cwd=FOLDER)
    run(tool("promtool"), "check", "rules", "rules.yml", cwd=FOLDER)


def unit_test(alert: str, case: dict[str, str], fired: Json | None) -> Json:
    """Returns promtool's form of a case. `fired` is what the alert then says."""
    series = {name: values for name, values in case.items() if name != "at"}
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values} for name, values in series.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": case["at"],
                "alertname": alert,
                "exp_alerts": [] if fired is None else [fired],
            }
        ],
    }


def test_every_alert_fires_and_stays_quiet_as_its_cases_say(tmp_path: Path) -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alert_cases.yml").read_text())
    assert set(cases) == alerts()
    tests = []
    for alert, case in cases.items():
        fired = {
            "exp_labels": case["labels"],
            "exp_annotations": {
                "summary": case["summary"],
                "runbook_url": f"deploy/RUNBOOK.md#{alert.lower()}",
            },
        }
        assert case["fires"] and case["quiet"], alert
        tests += [unit_test(alert, series, fired) for series in case["fires"]]
        tests += [unit_test(alert, series, None) for series in case["quiet"]]
    path = tmp_path / "rules_test.yml"
    rules = {"rule_files": [str(FOLDER / "rules.yml")], "evaluation_interval": "1m"}
    path.write_text(yaml.safe_dump({**rules, "tests": tests}))
    run(tool("promtool"), "test", "rules", str(path))


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


def test_a_page_that_refuses_prometheus_is_a_cause_of_weft_down() -> None:
    (row,) = (line for line in sections()["weftdown"].splitlines() if "421" in line)
    assert "`--allowed-hosts`" in row


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
