"""Keeps what a run did: run.json in the run's folder, and no run over another's."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.errors import FailedPrecondition, InvalidArgument
from weft.recipes.watch import FORMATS, read_log, replaced
from weft.types import ServerInfo

FILE = "run.json"
PLAIN = (bool, int, float, dict, list)  # Options that JSON holds as they are.
# Options that do not change what a run computes.
INCIDENTAL = {"resume", "server", "timeout"}
# Options that name files.
FILES = ("data", "eval_data", "reward", "chat_template")
# The packages that decide what a run computes on this machine.
PACKAGES = ("weftd", "numpy", "tokenizers", "jinja2")


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the entry in run.json of the run that --resume continues, or {}. Sets
    --output, by default run/ADAPTER, and the --init of a resumed run.

    Raises FailedPrecondition if the folder holds steps of another run, or, without
    --resume, of any run, and if --resume changes what the run's steps mean.
    """
    options.output = options.output or Path("run", options.adapter)
    before = _read(options.output / FILE)
    if _has_steps(options.output):
        _check_same(options, before)
    if not options.resume or not before:
        return {}
    old = before["options"]
    updates = getattr(options, "updates", None)
    if updates != old.get("updates"):
        raise FailedPrecondition(
            f"--updates {updates}: the run began with {old.get('updates')}, and its "
            f"steps are counted by it; give --updates {old.get('updates')}"
        )
    start = old.get("init")
    # The file names the checkpoint, and the option may name its adapter alone.
    if options.init not in (None, start, str(start).partition("/")[0]):
        raise FailedPrecondition(
            f"--init {options.init}: the run began with {start or 'the base model'}; "
            "leave out --init, or begin another run"
        )
    options.init = start
    return before


def keep(options: argparse.Namespace, info: ServerInfo, before: dict[str, Any]) -> None:
    """Writes run.json: the options, the versions, the model, and size and SHA-256 of
    the files that the options name. before: the result of `check`, which moves to the
    list "earlier"."""
    path = options.output / FILE
    entry = {
        "command": options.command,
        "adapter": options.adapter,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": settings(options),
        "versions": {"server": info.version, **_versions()},
        "model": dataclasses.asdict(info.model),
        "data": _files(options),
    }
    if before:
        _show_changes(before, entry)
        entry["earlier"] = [*before.pop("earlier", ()), before]
    options.output.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(json.dumps(entry, indent=2) + "\n")


def _show_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Prints what differs from the run's beginning, because a run that goes on with
    other settings or data is not the run that was begun."""
    old, new = before["options"], now["options"]
    for name in sorted({*old, *new} - INCIDENTAL):
        if old.get(name) != new.get(name):
            print(f"--{name.replace('_', '-')}: {new.get(name)}, was {old.get(name)}")
    for name in sorted({*before["data"], *now["data"]}):
        if _content(before, name) != _content(now, name):
            print(f"the file of --{name.replace('_', '-')} has changed")


def _content(entry: dict[str, Any], name: str) -> object:
    """Returns a file's hash, or its name if it has none."""
    file = entry["data"].get(name, {})
    return file.get("sha256", file.get("path"))


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Returns the options that are set, as JSON holds them."""
    return {
        name: value if isinstance(value, PLAIN) else str(value)
        for name, value in sorted(vars(options).items())
        if value is not None and not callable(value)
    }


def _check_same(options: argparse.Namespace, before: dict[str, Any]) -> None:
    """Raises FailedPrecondition unless the command goes on with the folder's run."""
    owner = (before.get("command"), before.get("adapter"))
    same = not before or owner == (options.command, options.adapter)
    if same and options.resume:
        return
    what = f"{owner[0]} of adapter {owner[1]!r}" if before else "another run"
    wayout = "--resume to go on with it, or " if same else ""
    raise FailedPrecondition(
        f"--output {options.output} holds the files of {what}: give {wayout}another "
        "--output"
    )


def _has_steps(folder: Path) -> bool:
    paths = [folder / f"log.{form}" for form in FORMATS]
    return any(row["step"] > 0 for path in paths for row in read_log(path))


def _read(path: Path) -> dict[str, Any]:
    """Returns the file's entry, or {} if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
        if {"command", "adapter", "options", "data"} <= value.keys():
            return {**value}
        reason = "fields are missing"
    except (ValueError, AttributeError) as error:
        reason = str(error)
    raise InvalidArgument(f"{path} is not a file of a run: {reason}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        for distribution in metadata.distributions(name=name):
            found[name] = distribution.version
    return found


def _files(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Describes the files that the options name, by the option's name."""
    named = {name: getattr(options, name, None) for name in FILES}
    if named["reward"]:
        named["reward"] = named["reward"].partition(":")[0]
    return {name: _described(file) for name, file in named.items() if file}


def _described(file: str) -> dict[str, object]:
    """Returns path, size and hash of a file; the path alone for a pipe and for
    "hf:NAME"."""
    path = Path(file)
    if not path.is_file():
        return {"path": file}
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"path": file, "bytes": path.stat().st_size, "sha256": digest}
