"""Reads the resources and instructions of each kernel of kernels/cuda from the built
library, with cuobjdump."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Triton's wheel, which torch installs, contains the tools.
_IN_VENV = ".venv/lib/python3*/site-packages/triton/backends/nvidia/bin"

# The limits of an SM of compute capability 9.0.
SM_REGISTERS = 65536
SM_SHARED_BYTES = 228 * 1024
SM_WARPS = 64
SM_BLOCKS = 32
_WARP = 32
_REGISTER_UNIT = 256  # A warp gets a multiple of this many registers.
_BLOCK_SHARED_BYTES = 1024  # CUDA's own part of a block's shared memory.

_ARCH = re.compile(r"^arch = (\w+)$", re.MULTILINE)
_USAGE = re.compile(
    r"^ Function (?P<name>\S+):\s*\n\s*REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"^\s*Function : (\S+)$")
_WIDTH = re.compile(r"[US]?(8|16|64|128)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass
class Kernel:
    """One kernel as compiled for one architecture."""

    arch: str
    name: str  # Demangled, without the parameters.
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int  # Bytes of static shared memory.
    instructions: set[str] = field(default_factory=set)

    def has(self, mnemonic: str) -> bool:
        """Returns whether an instruction has this opcode and all these dotted parts.
        LDG.128 is found in LDG.E.128.CONSTANT."""
        head, *parts = mnemonic.split(".")
        return any(
            found.split(".")[0] == head and set(parts) <= set(found.split("."))
            for found in self.instructions
        )

    def narrowest_store(self) -> int:
        """Returns the bits of the narrowest store to global memory, or 0 if there is
        none. STG.E stores 32 bits, STG.E.U16 stores 16."""
        bits = []
        for instruction in self.instructions:
            head, *parts = instruction.split(".")
            widths = [int(width[1]) for width in map(_WIDTH.fullmatch, parts) if width]
            if head == "STG":
                bits.append(widths[0] if widths else 32)
        return min(bits, default=0)

    def resident_warps(self, threads: int, dynamic_shared_bytes: int = 0) -> int:
        """Returns how many warps an SM holds at a time, in blocks of this many
        threads."""
        warps = threads // _WARP
        per_warp = -(-self.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = self.shared_bytes + dynamic_shared_bytes + _BLOCK_SHARED_BYTES
        blocks = min(
            SM_BLOCKS,
            SM_WARPS // warps,
            SM_REGISTERS // (per_warp * warps),
            SM_SHARED_BYTES // shared,
        )
        return blocks * warps


def tool() -> str | None:
    """Returns cuobjdump, if the machine has it."""
    folders = [str(path) for path in sorted(ROOT.glob(_IN_VENV))]
    return shutil.which("cuobjdump") or next(
        (
            found
            for folder in folders
            if (found := shutil.which("cuobjdump", path=folder))
        ),
        None,
    )


def _dump(option: str, library: Path) -> str:
    program = tool()
    assert program is not None
    environment = {"PATH": f"{Path(program).parent}:/usr/bin:/bin"}
    return subprocess.run(
        [program, option, library],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout


def _demangled(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True
    )
    return dict(zip(names, map(_plain, done.stdout.splitlines()), strict=True))


def _plain(name: str) -> str:
    """Removes return type, namespaces and parameters. The result looks like
    Kernel<float, 64>."""
    name = re.sub(r"\(anonymous namespace\)::|weft::kernels::cuda::|^void ", "", name)
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # Removes the type of an enumerator.
    return re.sub(r"\(.*$", "", name)


def _by_arch(text: str) -> list[tuple[str, str]]:
    """Returns the parts of a dump, each with its architecture."""
    starts = list(_ARCH.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [
        (match.group(1), text[match.end() : end])
        for match, end in zip(starts, ends, strict=True)
    ]


def kernels_of(usage: str, code: str) -> list[Kernel]:
    """Returns the kernels in the output of -res-usage and -sass."""
    found: dict[tuple[str, str], Kernel] = {}
    for arch, text in _by_arch(usage):
        for match in _USAGE.finditer(text):
            found[arch, match["name"]] = Kernel(
                arch=arch,
                name=match["name"],
                registers=int(match["registers"]),
                stack_bytes=int(match["stack"]),
                local_bytes=int(match["local"]),
                shared_bytes=int(match["shared"]),
            )
    for arch, text in _by_arch(code):
        kernel: Kernel | None = None
        for line in text.splitlines():
            if function := _FUNCTION.match(line):
                kernel = found.get((arch, function.group(1)))
            elif kernel is not None and (step := _INSTRUCTION.match(line)):
                kernel.instructions.add(step.group(1))
    names = _demangled([name for _, name in found])
    for kernel in found.values():
        kernel.name = names[kernel.name]
    return list(found.values())


def read(library: Path) -> list[Kernel]:
    return kernels_of(_dump("-res-usage", library), _dump("-sass", library))
