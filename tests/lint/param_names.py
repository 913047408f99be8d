"""Finds parametrised C++ tests whose names do not describe their parameters.

Without a name generator, the name of a test is a number or the bytes of a struct.
"""

import re
from pathlib import Path

from sources import CPP_SUFFIXES, files

_SUITE = re.compile(r"\bINSTANTIATE_TEST_SUITE_P\(")
_OPEN, _CLOSE = "([{", ")]}"
# The arguments are prefix, test suite, parameters and name generator.
_NUM_ARGUMENTS = 4


def _num_arguments(text: str, start: int) -> int:
    """Counts the arguments of a call. They begin at `start`."""
    depth, count = 1, 1
    for character in text[start:]:
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            break
        count += character == "," and depth == 1
    return count


def param_name_offences(root: Path) -> list[str]:
    """Returns one `file:line: reason` for each suite without a name generator."""
    found = []
    for path in files(root, ("tests",), CPP_SUFFIXES):
        text = path.read_text()
        for match in _SUITE.finditer(text):
            if _num_arguments(text, match.end()) < _NUM_ARGUMENTS:
                line = text.count("\n", 0, match.start()) + 1
                found.append(
                    f"{path.relative_to(root)}:{line}: the names of these tests do "
                    "not say their parameters: give a name generator"
                )
    return found
