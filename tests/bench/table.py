"""Measures README's table of figures on a CPU anew. Runs the bench of every row, one
after another, and saves the JSON line of each bench in one file. With --write puts the
rows of such a file into README.md.

A run that fails does not stop the others. --resume measures the rows that the newest
file of this machine lacks, for example after an interruption.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from table_rows import HEAD, OPTION_NEEDS, RUNS, Run

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RESULTS = HERE / "results"
README = REPOSITORY / "README.md"
PROGRAM = "tests/bench/run.py"  # Relative to its working directory.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WIDTH = 99  # Columns of README's running text.

# One run: the names of its rows, its command, its date and the bench's JSON line.
Entry = dict[str, Any]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.write is not None:
        write(options.write, README)
        return 0
    here = machine.describe()
    path, entries = _start(machine.short_name(here), options.resume)
    _machine([*entries, {"result": {"machine": here}}])
    commands = {run: command(run, here["isa"], options.llama_python) for run in RUNS}
    return measure(commands, path, entries)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--resume",
        action="store_true",
        help="measure what the newest file lacks; give the other options again",
    )
    what.add_argument(
        "--write", type=Path, metavar="FILE", help="only put FILE's rows into README.md"
    )
    parser.add_argument(
        "--llama-python",
        help="a Python with llama-cpp-python, by its path in the repository",
    )
    return parser.parse_args(arguments)


def command(run: Run, isa: Sequence[str], llama_python: str | None) -> list[str]:
    """Returns the command of a run on a CPU with these instruction sets."""
    lacking = {a for a, needed in OPTION_NEEDS.items() if needed not in isa}
    kept = [a for a in run.arguments if a not in lacking]
    llama = ["--llama-python", llama_python] if llama_python else []
    return [PROGRAM, *kept, *(llama if run.arguments[0] == "sample" else [])]


def newest(name: str = "*") -> Path | None:
    """Returns the newest file of a machine, by the date in the files' names."""
    files = RESULTS.glob(f"table_{name}_????-??-??.json")
    return max(files, key=lambda path: (path.stem[-10:], path.stem), default=None)


def _start(name: str, resume: bool) -> tuple[Path, list[Entry]]:
    """Returns the file to write and the entries that the file has so far."""
    if resume:
        path = newest(name)
        if path is None:
            raise SystemExit(f"--resume: no table_{name}_*.json in {RESULTS}")
        return path, json.loads(path.read_text("utf-8"))
    path = RESULTS / f"table_{name}_{datetime.date.today()}.json"
    if path.exists():
        raise SystemExit(f"{path} exists: go on with --resume, or remove it")
    return path, []


# --- Measuring ---------------------------------------------------------------


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _say(text: str) -> None:
    print(f"table {text}", file=sys.stderr, flush=True)


def measure(commands: dict[Run, list[str]], path: Path, entries: list[Entry]) -> int:
    """Runs each command that has no entry yet. Saves the entries after each run.
    Returns 1 if a run failed."""
    done = {entry["command"]: entry for entry in entries}
    others = set(done) - set(map(shlex.join, commands.values()))
    if others:
        raise SystemExit(
            f"--resume: {path} has other commands: {'; '.join(sorted(others))};"
            " give the same options"
        )
    todo = [run for run in commands if shlex.join(commands[run]) not in done]
    failed = []
    start = time.monotonic()
    planned = spent = 0.0  # Seconds of the runs that are done.
    for number, run in enumerate(todo, start=1):
        words, names = commands[run], [row.name for row in run.rows]
        what = f"{number}/{len(todo)}  {words[1]}"
        pace = spent / planned if planned else 1.0
        left = _clock(pace * sum(one.seconds for one in todo[number - 1 :]))
        begin = time.monotonic()
        _say(f"{what} running ...  elapsed {_clock(begin - start)}  ETA {left}")
        result, failure = _result(words)
        took = time.monotonic() - begin
        state = "done" if failure is None else f"FAILED ({failure})"
        _say(f"{what} {state} after {_clock(took)}")
        if result is None:
            failed += names
            continue
        planned, spent = planned + run.seconds, spent + took
        text = shlex.join(words)
        day = datetime.date.today().isoformat()
        done[text] = {"rows": names, "command": text, "date": day, "result": result}
        _save(path, [done[c] for c in map(shlex.join, commands.values()) if c in done])
    if failed:
        _say(f"has no figures of: {'; '.join(failed)}; --resume measures them again")
        return 1
    _say(f"{path} is whole; --write puts it into README")
    return 0


def _result(words: Sequence[str]) -> tuple[Any, str | None]:
    """Runs a bench in the repository. Returns its JSON line, or None and what went
    wrong. The bench's stderr goes to this program's stderr."""
    ran = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    if ran.returncode != 0:
        return None, f"exit status {ran.returncode}"
    try:
        return json.loads(ran.stdout.splitlines()[-1]), None
    except (IndexError, ValueError):
        return None, "its last line is not JSON"


def _save(path: Path, entries: Sequence[Entry]) -> None:
    """Replaces the file in one step, so that it is never half written."""
    draft = path.with_suffix(".draft")
    lines = ",\n".join(map(json.dumps, entries))
    draft.write_text(f"[\n{lines}\n]\n", "utf-8")
    os.replace(draft, path)


# --- Rendering ---------------------------------------------------------------


def write(path: Path, readme: Path) -> None:
    """Puts the rows of a file between README's markers."""
    text = readme.read_text("utf-8")
    before, _, after = _split(text)
    readme.write_text(before + render(path) + after, "utf-8")


def block(readme: Path) -> str:
    """Returns what README has between its markers."""
    return _split(readme.read_text("utf-8"))[1]


def _split(text: str) -> tuple[str, str, str]:
    parts = re.split(f"({BEGIN}\n|{END}\n)", text)
    if parts[1::2] != [f"{BEGIN}\n", f"{END}\n"]:
        raise SystemExit(f"README.md: not one {BEGIN} with one {END} after it")
    return parts[0] + parts[1], parts[2], parts[3] + parts[4]


def render(path: Path) -> str:
    """Returns the table and the sentence below it."""
    entries = json.loads(path.read_text("utf-8"))
    results = {name: entry["result"] for entry in entries for name in entry["rows"]}
    rows = [row for run in RUNS for row in run.rows]
    missing = [row.name for row in rows if row.name not in results]
    if missing:
        raise SystemExit(f"{path}: no figures of: {'; '.join(missing)}; see --resume")
    lines = [HEAD, "| --- | --- | --- | --- |"]
    lines += [row.line(results[row.name]) for row in rows]
    sentence = textwrap.fill(
        _sentence(path, entries), WIDTH, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([*lines, "", sentence, ""])


def _sentence(path: Path, entries: Sequence[Entry]) -> str:
    days = sorted({entry["date"] for entry in entries})
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    return (
        f"`tests/bench/run.py table` measured them {when} on {_machine(entries)}, one"
        " bench after another, all sides of a row in one run with the same threads. A"
        " time is the best of two or more, that of the smallest calls a median."
        " Whole lines and their commands are in"
        f" `tests/bench/results/{path.name}`."
    )


def _machine(entries: Sequence[Entry]) -> str:
    """Describes the machine. Ends the program if there is more than one."""
    described = {
        f"{of['cores']} cores of {of['cpu']} ({', '.join(of['isa']).upper()})"
        for of in (entry["result"]["machine"] for entry in entries)
    }
    if len(described) != 1:
        raise SystemExit(f"not one machine: {'; '.join(sorted(described))}")
    return described.pop()
