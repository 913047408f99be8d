"""What nvcc's output must keep to, by kernel: a regular expression for its name, and

- threads of a block, and bytes of dynamic shared memory;
- warps that an SM of compute capability 9.0 must hold at a time: 16 where a warp has
  several loads under way, more where it has one;
- instructions that must be there: 128-bit loads and stores where rows are moved,
  HMMA fed by LDSM and LDGSTS where tiles are multiplied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    threads: int
    warps: int
    instructions: tuple[str, ...] = ()
    dynamic_shared_bytes: int = 0


WIDE = ("LDG.128", "STG.128")
TILES = ("HMMA", "LDSM", "LDGSTS.128")

RULES: dict[str, Rule] = {
    "AdamWKernel": Rule(256, 32),
    "SumOfSquaresKernel": Rule(256, 32),
    "SumPartialsKernel": Rule(256, 32),
}
