"""House rules a compiler does not check: length, leftovers, include guards."""

import re
from pathlib import Path

import pytest
from sources import CODE_FOLDERS, ROOT, SUFFIXES, files

MAX_LINES = 500
# In two halves, or this file would be an offence by itself.
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def guard_name(path: Path) -> str:
    """Include guard of a header, given relative to the root."""
    return "WEFT_" + re.sub(r"[^A-Za-z0-9]", "_", str(path)).upper() + "_"


def style_offences(root: Path) -> list[str]:
    found = []
    for path in files(root, CODE_FOLDERS, SUFFIXES):
        name = path.relative_to(root)
        text = path.read_text()
        lines = text.splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{name}:{MAX_LINES + 1}: longer than {MAX_LINES} lines")
        for number, line in enumerate(lines, start=1):
            if LEFTOVER.search(line):
                found.append(f"{name}:{number}: unfinished work: {line.strip()}")
        if path.suffix in (".h", ".cuh"):
            guard = guard_name(name)
            code = [line for line in lines if not line.startswith("//") and line]
            if code[:2] != [f"#ifndef {guard}", f"#define {guard}"] or code[-1] != (
                f"#endif  // {guard}"
            ):
                found.append(f"{name}:1: the include guard must be {guard}")
    return found


def test_the_sources_keep_the_house_rules() -> None:
    offences = style_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


GOOD_HEADER = (
    "// What it is.\n#ifndef WEFT_SRC_KV_A_H_\n#define WEFT_SRC_KV_A_H_\n"
    "\nint F();\n\n#endif  // WEFT_SRC_KV_A_H_\n"
)


@pytest.mark.parametrize(
    ("text", "offence"),
    [
        (GOOD_HEADER, None),
        (GOOD_HEADER.replace("KV_A", "A"), "src/kv/a.h:1: the include guard"),
        (GOOD_HEADER.replace("#endif  //", "#endif //"), "src/kv/a.h:1: the include"),
        (GOOD_HEADER.replace("int F", "// TO" + "DO\nint F"), "src/kv/a.h:5: unfin"),
        (GOOD_HEADER.replace("int F", "\n" * 500 + "int F"), "src/kv/a.h:501: longer"),
    ],
)
def test_finds_each_offence(tmp_path: Path, text: str, offence: str | None) -> None:
    path = tmp_path / "src" / "kv" / "a.h"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = style_offences(tmp_path)
    assert len(found) == (0 if offence is None else 1)
    if offence is not None:
        assert found[0].startswith(offence)
