"""Runs a benchmark program. Writes one JSON line with the program's output, its
command and the machine: record.py NAME OUTPUT cpu|cuda COMMAND..."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import machine


def main() -> int:
    name, output, device, *command = sys.argv[1:]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode != 0:
        return done.returncode
    line = {
        "bench": name,
        "printed": [_value(text) for text in done.stdout.splitlines()],
        "command": command,
        "machine": machine.describe(device),
    }
    Path(output).write_text(json.dumps(line) + "\n", "utf-8")
    return 0


def _value(text: str) -> Any:
    """Returns the parsed JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
