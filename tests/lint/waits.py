"""Finds code in the path of a step that makes the host wait for the device.

Values go to the device and back through src/ops/host_copy.h, where ToHost is the
one wait of a pass. Any other wait leaves the device idle while the host prepares
the next kernel. The host waits if it reads a number from a tensor, copies between
ordinary memory and a device (as BulkCopy does), or needs a result whose
size only the device knows.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sources import CPP_SUFFIXES, files

FOLDERS = ("ops", "lora", "model", "loss", "sampling", "executor", "engine")

# Waits that are allowed, as (file below src, kind), with the reason.
ALLOWED = {
    ("ops/host_copy.cc", "to"): "from pinned memory",
    ("ops/rotary.cc", "to"): "when a model is loaded",
    ("ops/paged_attention.cc", "item"): "the reference of CPU tests",
    ("ops/cuda_dispatch.cc", "item"): "the norm, which an optimizer step returns",
    ("loss/adamw.cc", "item"): "the norm, which an optimizer step returns",
    ("lora/lora_embedding.cc", "unique"): "LoRA of the embedding alone",
    ("lora/adapter.cc", "bulk"): "an adapter comes to the device or leaves it",
    ("model/decoder.cc", "item"): "when a model is loaded",
    ("loss/head_products.cc", "nonzero"): "a gradient filter, off by default",
    ("loss/call_aten.cc", "item"): "a tensor of the host",
    ("loss/run_loss_graph.cc", "item"): "a tensor of the host",
    ("executor/message.cc", "item"): "a tensor of the host",
}

_COMMENT = re.compile(r"//[^\n]*")
_WAIT = re.compile(
    r"(?:\.|->)(?P<item>item)\s*[<(]"
    r"|(?:\.|->)(?P<cpu>cpu)\s*\("
    r"|\b(?P<nonzero>nonzero|masked_select)\b"
    r"|\b(?P<unique>_unique2?|unique_\w+)\s*\("
    r"|(?:\.|->)(?P<to>to)\s*\("
    r"|\bat::(?P<tensor>tensor)\s*\("
    r"|\bops::(?P<bulk>BulkCopy)"
    r"|\bat::(?P<repeat>repeat_interleave)\s*\("
)
_DEVICE = re.compile(r"device|kCPU|kCUDA|ptions")


class Wait(NamedTuple):
    line: int
    kind: str


def _arguments(text: str, start: int) -> str:
    """Returns the text of the arguments that begin at `start`."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text[start:]


def _has_two(arguments: str) -> bool:
    """Returns whether there is a comma outside of inner parentheses."""
    depth = 0
    for character in arguments:
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            return True
    return False


def waits(text: str) -> Iterator[Wait]:
    """Yields each wait in a C++ source."""
    code = _COMMENT.sub("", text)
    for match in _WAIT.finditer(code):
        kind = str(match.lastgroup)
        arguments = _arguments(code, match.end())
        if kind in ("to", "tensor") and not _DEVICE.search(arguments):
            continue
        if kind == "repeat" and _has_two(arguments):
            continue
        yield Wait(code.count("\n", 0, match.start()) + 1, kind)


def wait_offences(root: Path) -> list[str]:
    """Returns one `file:line: reason` for each forbidden wait, and for each
    allowance of an existing file that nothing needs."""
    found = []
    unused = {k for k in ALLOWED if (root / "src" / k[0]).exists()}
    for path in files(root / "src", FOLDERS, CPP_SUFFIXES):
        name = str(path.relative_to(root / "src"))
        for line, kind in waits(path.read_text()):
            unused.discard((name, kind))
            if (name, kind) not in ALLOWED:
                found.append(
                    f"src/{name}:{line}: {kind} waits for the device; use "
                    "src/ops/host_copy.h, or say in tests/lint/waits.py why not"
                )
    return found + [f"src/{name}:1: has no {kind} any more" for name, kind in unused]
