"""Tests that README shows the newest measured figures, and that a bench that fails
does not stop the other measurements."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import run  # Sets sys.path for the imports below.

# isort: split
import machine
import table
from table_rows import RUNS, Run

TESTDATA = Path(__file__).resolve().parent / "testdata"
FIGURES = TESTDATA / "table_epyc-2core_2026-11-25.json"
RENDERED = TESTDATA / "table.md"

# A bench that records its calls. With --fail it exits with 3, and with --mute it
# prints nothing.
BENCH = """import json, sys
from pathlib import Path
if sys.argv[2] == "--fail": sys.exit(3)
if sys.argv[2] == "--mute": sys.exit(0)
with Path(__file__).with_name("calls").open("a") as calls:
    print(sys.argv[1], file=calls)
print("a line for people")
print(json.dumps({"bench": sys.argv[1]}))
"""


def entries() -> list[table.Entry]:
    read: list[table.Entry] = json.loads(FIGURES.read_text("utf-8"))
    return read


def figures(tmp_path: Path, changed: list[table.Entry]) -> Path:
    path = tmp_path / FIGURES.name
    path.write_text(json.dumps(changed), "utf-8")
    return path


def result(of: list[table.Entry], bench: str) -> Any:
    return next(e["result"] for e in of if e["result"]["bench"] == bench)


def test_readme_shows_the_newest_figures() -> None:
    shown, newest = table.block(table.README), table.newest()
    if newest is not None:
        assert shown == table.render(newest), f"run.py table --write {newest}"


def test_every_row_is_rendered() -> None:
    assert table.render(FIGURES) == RENDERED.read_text("utf-8")


@pytest.mark.parametrize("measured", RUNS, ids=lambda of: of.rows[0].name)
def test_a_bench_takes_the_arguments_of_its_rows(
    measured: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: Any) -> None:
        parse(*arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    name, *options = measured.arguments
    with pytest.raises(Parsed):
        run.BENCHES[name](options)


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for measured in RUNS for row in measured.rows]
    assert len(set(names)) == len(names)


def test_a_cpu_without_the_instructions_has_no_figure(tmp_path: Path) -> None:
    of = entries()
    for entry in of:
        entry["result"]["machine"]["isa"] = ["avx2", "fma"]
    step = result(of, "train_step")
    for side in ("weft bf16", "naive bf16"):
        del (step["ours"] if side in step["ours"] else step["peer"])[side]
    rendered = table.render(figures(tmp_path, of))
    row = "| the same with `--dtype bf16`, on a CPU with AVX512_BF16 |"
    assert f"{row} not on this CPU | | |\n" in rendered
    assert "(AVX2, FMA)" in rendered
    assert "--cpu-bf16" not in table.command(RUNS[0], ["avx2", "fma"], None)
    assert "--cpu-bf16" in table.command(RUNS[0], ["avx2", "avx512_bf16"], None)


def test_llama_cpp_is_measured_where_it_is(tmp_path: Path) -> None:
    sample = next(of for of in RUNS if of.arguments[0] == "sample")
    asked = table.command(sample, [], "build/llama/bin/python")
    assert asked[-2:] == ["--llama-python", "build/llama/bin/python"]
    assert "--llama-python" not in table.command(RUNS[0], [], "build/llama/bin/python")
    of = entries()
    peers = result(of, "sample")["peer"]
    for name in [name for name in peers if name.startswith("llama.cpp")]:
        del peers[name]
    rendered = table.render(figures(tmp_path, of))
    assert "| llama.cpp: not measured | |\n" in rendered
    assert "| here in bf16: 105 tok/s | 1.75 |\n" in rendered


def test_a_table_is_of_one_machine_and_lacks_no_row(tmp_path: Path) -> None:
    of = entries()
    of[2]["result"]["machine"]["cores"] = 4
    with pytest.raises(SystemExit, match=r"not one machine: 2 cores .*; 4 cores"):
        table.render(figures(tmp_path, of))
    with pytest.raises(SystemExit, match="no figures of: step, recomputed; see"):
        table.render(figures(tmp_path, [of[0], *of[2:]]))


def test_days_are_named(tmp_path: Path) -> None:
    of = entries()
    of[-1]["date"] = "2026-11-26"
    assert "from 2026-11-25 to 2026-11-26" in table.render(figures(tmp_path, of))


def test_only_the_marked_part_of_readme_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    text = "a\n{}old\n{}b\n".format(f"{table.BEGIN}\n", f"{table.END}\n")
    readme.write_text(text, "utf-8")
    table.write(FIGURES, readme)
    new = readme.read_text("utf-8")
    assert new == text.replace("old\n", RENDERED.read_text("utf-8"))
    table.write(FIGURES, readme)
    assert readme.read_text("utf-8") == new
    for wrong in ("a\n", text + text, text.replace("begin", "end")):
        readme.write_text(wrong, "utf-8")
        with pytest.raises(SystemExit, match="not one <!-- measured: begin -->"):
            table.write(FIGURES, readme)


def test_a_run_that_fails_is_reported_and_stops_no_other(
    tmp_path: Path, capsys: Any
) -> None:
    bench, path = tmp_path / "bench.py", tmp_path / "figures.json"
    bench.write_text(BENCH, "utf-8")
    first, wrong, mute, last = RUNS[:4]

    def commands(*options: str) -> dict[Run, list[str]]:
        names = ("first", "wrong", "mute", "last")
        return {
            of: [str(bench), name, option]
            for of, name, option in zip(RUNS, names, options, strict=False)
        }

    tries = commands("--ok", "--fail", "--mute", "--ok")
    assert table.measure(tries, path, []) == 1
    said = capsys.readouterr().err
    assert "table 2/4  wrong FAILED (exit status 3) after 0:00:00" in said
    assert "table 3/4  mute FAILED (its last line is not JSON)" in said
    planned = sum(of.seconds for of in RUNS[:4])
    first_eta, eta = re.findall(r"ETA (\S+)", said)[:2]
    # The time that is left follows the pace of the first run, which is a moment.
    assert first_eta == table._clock(planned) and eta.startswith("0:00:")
    lacking = "; ".join(row.name for of in (wrong, mute) for row in of.rows)
    assert f"table has no figures of: {lacking}; --resume" in said
    saved = json.loads(path.read_text("utf-8"))
    assert [e["rows"] for e in saved] == [
        [r.name for r in o.rows] for o in (first, last)
    ]
    assert [e["result"]["bench"] for e in saved] == ["first", "last"]
    # Runs that have figures are not measured again, and the rows keep their order.
    assert table.measure(commands("--ok", "--ok", "--ok", "--ok"), path, saved) == 0
    assert (tmp_path / "calls").read_text().split() == [
        "first",
        "last",
        "wrong",
        "mute",
    ]
    saved = json.loads(path.read_text("utf-8"))
    assert [e["result"]["bench"] for e in saved] == ["first", "wrong", "mute", "last"]
    with pytest.raises(SystemExit, match="give the same options"):
        table.measure(commands("--ok", "--ok", "--ok", "--other"), path, saved)


def test_resume_takes_the_newest_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    here = {
        "cpu": "AMD EPYC",
        "cores": 2,
        "isa": entries()[0]["result"]["machine"]["isa"],
    }
    monkeypatch.setattr(machine, "describe", lambda: here)
    started = []

    def measure(*arguments: Any) -> int:
        started.append(arguments[1:])
        return 0

    monkeypatch.setattr(table, "measure", measure)
    with pytest.raises(SystemExit, match="no table_epyc-2core_"):
        table.main(["--resume"])
    for name in (
        "epyc-2core_2025-11-20",
        "epyc-2core_2025-11-25",
        "xeon-2core_2025-12-01",
    ):
        shutil.copy(FIGURES, tmp_path / f"table_{name}.json")
    assert table.newest() == tmp_path / "table_xeon-2core_2025-12-01.json"
    table.main(["--resume"])
    assert started == [(tmp_path / "table_epyc-2core_2025-11-25.json", entries())]
    table.main([])
    path, none = started[-1]
    assert path.parent == tmp_path and none == []
    shutil.copy(FIGURES, path)
    with pytest.raises(SystemExit, match="exists: go on with --resume"):
        table.main([])
    here["isa"] = []
    with pytest.raises(SystemExit, match="not one machine"):
        table.main(["--resume"])
