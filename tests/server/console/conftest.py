"""Puts the folders of the console tests' helpers on the path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "client"), str(ROOT / "client" / "python")]
