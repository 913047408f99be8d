"""Describes the machine of a measurement, and reads what the kernel counts for a
process."""

from __future__ import annotations

import ctypes.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# The instruction sets that decide how fast a matrix product can be.
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


# Replaces a memory figure of 0, because figures are divided by each other.
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def describe(device: str = "cpu") -> dict[str, Any]:
    """Returns CPU model, instruction sets, cores and memory of this machine. For
    "cuda" also returns the device's name, driver and memory."""
    info = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in info.splitlines())
        if key.strip()
    }
    present = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "isa": [flag for flag in FLAGS if flag in present],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "load_average": os.getloadavg()[0],
        **(gpu() if device == "cuda" else {}),
    }


def gpu() -> dict[str, Any]:
    """Returns name, driver and memory of the first CUDA device."""
    name, driver, memory = nvidia_smi("name,driver_version,memory.total")
    return {
        "device": name,
        "driver": driver,
        "device_memory_bytes": int(memory) * 2**20,
    }


def nvidia_smi(fields: str) -> list[str]:
    """Returns the fields' values for the first device; memory is in MiB."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [value.strip() for value in done.stdout.splitlines()[0].split(",")]


def tcmalloc() -> str | None:
    """Returns the path of Debian's tcmalloc, for LD_PRELOAD, or None if it is
    missing."""
    name = ctypes.util.find_library("tcmalloc_minimal")
    if name is None:
        return None
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"):
        if Path(folder, name).exists():
            return str(Path(folder, name))
    return None


class PeakMemory:
    """Measures how far the resident memory of a process rises from now on. On "cuda" it
    also measures the device's memory, so nothing else may run there.

    Some machines do not permit a reset of the kernel's high-water mark. On "cuda" the
    resident memory is then left out, because the device's memory is what counts.

    The high-water mark (VmHWM) is reset to the memory that is resident now (VmRSS). So
    the result excludes the loaded weights, and memory that only loading used. A process
    keeps the device memory that it once had, so its use at the end is the highest.
    """

    def __init__(self, pid: int | str = "self", device: str = "cpu"):
        self._device = device
        self._process = Path("/proc", str(pid))
        self._before = self._start()
        self._device_before = self._device_bytes()

    def read(self) -> dict[str, int]:
        """Returns `peak_rss_bytes`, and `extra_rss_bytes`: the peak minus the resident
        memory at the start. On "cuda" also returns `extra_device_bytes`."""
        result: dict[str, int] = {}
        if self._before is not None:
            peak = self._bytes("VmHWM")
            extra = max(peak - self._before, PAGE_BYTES)
            result |= {"peak_rss_bytes": peak, "extra_rss_bytes": extra}
        if self._device == "cuda":
            result["extra_device_bytes"] = self._device_bytes() - self._device_before
        return result

    def _start(self) -> int | None:
        """Resets the high-water mark and returns the resident memory. Returns None on
        "cuda" if the reset is not permitted."""
        try:
            (self._process / "clear_refs").write_text("5", "ascii")
        except OSError:
            if self._device != "cuda":
                raise
            return None
        return self._bytes("VmRSS")

    def _device_bytes(self) -> int:
        if self._device != "cuda":
            return 0
        return int(nvidia_smi("memory.used")[0]) * 2**20

    def _bytes(self, name: str) -> int:
        status = self._process / "status"
        for line in status.read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {name} in {status}")


def cpu_seconds(pid: int, besides: str = "") -> float:
    """Returns the processor seconds of a process' present threads, without those
    named `besides`."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text("ascii").strip() != besides:
            nanoseconds += int((task / "schedstat").read_text("ascii").split()[0])
    return nanoseconds / 1e9
