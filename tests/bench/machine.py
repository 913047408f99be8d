"""What a figure was measured on."""

from __future__ import annotations

import ctypes.util
import os
import platform
from pathlib import Path
from typing import Any

# Instructions that decide how fast a matrix product can be.
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    """CPU model, instruction sets, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in info.splitlines())
        if key.strip()
    )
    present = set(fields.get("flags", fields.get("Features", "")).split())
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "isa": [flag for flag in FLAGS if flag in present],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * page_size,
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


def peak_resident_bytes(pid: int | str = "self") -> int:
    """The kernel's high-water mark of a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/PID/status")
