"""What a figure was measured on, and what the kernel counts of a process."""

from __future__ import annotations

import ctypes.util
import os
import platform
from pathlib import Path
from typing import Any

# Instructions that decide how fast a matrix product can be.
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


# The least memory there is: figures are divided by each other.
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def describe() -> dict[str, Any]:
    """CPU model, instruction sets, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in info.splitlines())
        if key.strip()
    )
    present = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "isa": [flag for flag in FLAGS if flag in present],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "load_average": os.getloadavg()[0],
    }


def tcmalloc() -> str | None:
    """Path of Debian's tcmalloc, for LD_PRELOAD; None when it is missing."""
    name = ctypes.util.find_library("tcmalloc_minimal")
    if name is None:
        return None
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"):
        if Path(folder, name).exists():
            return str(Path(folder, name))
    return None


class PeakMemory:
    """How far the resident memory of a process rises from here on.

    The kernel's high-water mark (VmHWM) is set back to what is resident now
    (VmRSS): what loading took for a moment does not count, what is loaded does
    not either.
    """

    def __init__(self, pid: int | str = "self"):
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")
        self._before = self._bytes("VmRSS")

    def read(self) -> dict[str, int]:
        """`peak_rss_bytes`, and `extra_rss_bytes` of it above the start."""
        peak = self._bytes("VmHWM")
        extra = max(peak - self._before, PAGE_BYTES)
        return {"peak_rss_bytes": peak, "extra_rss_bytes": extra}

    def _bytes(self, name: str) -> int:
        for line in self._status.read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {name} in {self._status}")
