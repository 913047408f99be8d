"""Tests the bar that progress.py shows during a run of ctest."""

from __future__ import annotations

import progress

ENTRIES = '{"tests": [{"name": "a"}, {"name": "b"}, {"name": "new"}]}'
COSTS = "a 3 30.0\nb 3 10.0\ngone 1 99.0\n---\na\n"


def test_an_entry_counts_by_its_last_seconds_and_a_new_one_as_the_mean() -> None:
    assert progress.weights(ENTRIES, COSTS) == {"a": 30.0, "b": 10.0, "new": 20.0}
    assert progress.weights(ENTRIES, "") == {"a": 1.0, "b": 1.0, "new": 1.0}


def test_the_bar_names_what_is_left_and_what_runs() -> None:
    bar = progress.bar(0.25, 60, ["a", "b"])
    assert bar == "[#####...............]  25%, about 180 s left; runs: a, b"
    assert progress.bar(1.0, 60, []) == "[####################] 100%"


def test_ctests_own_lines_are_kept_and_each_end_moves_the_bar() -> None:
    lines = [
        "    Start 1: a\n",
        "    Start 2: b\n",
        "1/3 Test #1: a ......   Passed   30.00 sec\n",
        "2/3 Test #2: b ......***Failed    9.00 sec\n",
    ]
    shown = list(progress.follow(lines, progress.weights(ENTRIES, COSTS)))
    assert [line for line in shown if line in lines] == lines
    bars = [line for line in shown if line.startswith("[")]
    assert [line[23:27].strip() for line in bars] == ["50%", "67%"]
    assert bars[0].endswith("runs: b\n")
