"""Generates modules before setuptools looks for packages.

From a checkout: `python -m build client/python`.
"""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

import generate

generate.ensure()
setup()
