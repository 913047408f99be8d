"""Tests the rules that a compiler does not check: sizes, leftovers, include guards."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import CODE_FOLDERS, CPP_SUFFIXES, ROOT, SUFFIXES, files

# The limits count lines that are not blank.
MAX_FILE_LINES = 600
MAX_HEADER_LINES = 250
HEADER_SUFFIXES = frozenset({".h", ".cuh"})
MAX_FUNCTION_LINES = 60
# clang-format leaves comments as they are, so nothing else wraps them.
MAX_COLUMNS = 80
# The start of a block that is not a function.
NO_FUNCTION = re.compile(
    r"\s*(namespace|class|struct|enum|union|extern|if|for|while|switch|else|do|try)\b"
)
# The words are joined from two halves, because otherwise this file would break
# the rule.
FRAGMENT = re.compile(r"\s*//+ (Of|Who|Whose|Likewise)\b")
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def guard_name(path: Path) -> str:
    """Returns the include guard of a header, whose path is relative to the root."""
    return "WEFT_" + re.sub(r"[^A-Za-z0-9]", "_", str(path)).upper() + "_"


def _size_offences(name: str, lines: list[str]) -> Iterator[str]:
    length = sum(1 for line in lines if line.strip())
    limit = MAX_FILE_LINES
    if Path(name).suffix in HEADER_SUFFIXES:
        limit = MAX_HEADER_LINES
    if length > limit:
        yield f"{name}:1: {length} lines that are not blank, more than {limit}"


def _function_offences(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: {node.name} has {length} lines, more than "
                f"{MAX_FUNCTION_LINES}"
            )


def _first_line(lines: list[str], brace: int) -> int:
    """Returns the first line of the statement whose block opens in line `brace`."""
    first = brace
    while (
        first > 0
        and lines[first - 1].strip()
        and not lines[first - 1].endswith((";", "{", "}", ":"))
        and not lines[first - 1].lstrip().startswith(("//", "#"))
    ):
        first -= 1
    return first


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _cpp_function_offences(name: str, lines: list[str]) -> Iterator[str]:
    """Yields the functions that are too long. clang-format has laid out the lines, so a
    function ends at the next line that is indented no deeper than its first line."""
    for brace, line in enumerate(lines):
        if not line.endswith("{") or line.lstrip().startswith(("}", "//", "#")):
            continue
        first = _first_line(lines, brace)
        head = " ".join(lines[first : brace + 1])
        if "(" not in head or NO_FUNCTION.match(head):
            continue
        depth = _indent(lines[first])
        for end in range(brace + 1, len(lines)):
            text = lines[end].lstrip()
            if text and not text.startswith("#") and _indent(lines[end]) <= depth:
                break
        else:
            continue
        if text.startswith("}") and end - brace > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{first + 1}: a function has {end - brace} lines, more than "
                f"{MAX_FUNCTION_LINES}"
            )


def _wide_comments(root: Path) -> Iterator[str]:
    for path in files(root, (*CODE_FOLDERS, "tests"), CPP_SUFFIXES):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if len(line) > MAX_COLUMNS and "//" in line.replace("://", ""):
                name = path.relative_to(root)
                yield f"{name}:{number}: a comment beyond column {MAX_COLUMNS}"


def style_offences(root: Path) -> list[str]:
    found = [*_wide_comments(root)]
    for path in files(root, CODE_FOLDERS, SUFFIXES):
        name = path.relative_to(root)
        text = path.read_text()
        lines = text.splitlines()
        found += _size_offences(str(name), lines)
        if path.suffix == ".py":
            found += _function_offences(str(name), text)
        else:
            found += _cpp_function_offences(str(name), lines)
        for number, line in enumerate(lines, start=1):
            if LEFTOVER.search(line):
                found.append(f"{name}:{number}: unfinished work: {line.strip()}")
            if FRAGMENT.match(line) and "//" not in lines[number - 2]:
                found.append(f"{name}:{number}: no sentence: {line.strip()}")
        if path.suffix in HEADER_SUFFIXES:
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


def _lines(count: int) -> str:
    return "// A line.\n" * count


def unnamed_tests(root: Path) -> list[str]:
    """Returns the pytest files that no entry of ctest names, so that nothing runs
    them. A folder's CMakeLists.txt leaves out `test_`, `python_` and `_test`."""
    lists = {p.parent: p.read_text() for p in root.glob("tests/*/CMakeLists.txt")}
    words = {folder: set(re.split(r"[^\w.]+", text)) for folder, text in lists.items()}
    everywhere = set().union(*words.values())
    return [
        str(path.relative_to(root))
        for pattern in ("test_*.py", "*_test.py")
        for path in sorted(root.glob(f"tests/*/{pattern}"))
        if path.name not in everywhere
        and re.sub("^(test|python)_|_test$", "", path.stem)
        not in words.get(path.parent, set())
    ]


def test_each_pytest_file_is_in_an_entry(tmp_path: Path) -> None:
    assert not unnamed_tests(ROOT)
    (tmp_path / "tests/e2e").mkdir(parents=True)
    for name in ("test_steps.py", "test_lost.py", "python_api_test.py"):
        (tmp_path / "tests/e2e" / name).touch()
    (tmp_path / "tests/e2e/CMakeLists.txt").write_text("foreach(file steps api)")
    assert unnamed_tests(tmp_path) == ["tests/e2e/test_lost.py"]


@pytest.mark.parametrize(
    ("text", "offence"),
    [
        (GOOD_HEADER, None),
        (GOOD_HEADER.replace("KV_A", "A"), "src/kv/a.h:1: the include guard"),
        (GOOD_HEADER.replace("#endif  //", "#endif //"), "src/kv/a.h:1: the include"),
        (GOOD_HEADER.replace("int F", "// TO" + "DO\nint F"), "src/kv/a.h:5: unfin"),
        (GOOD_HEADER.replace("int F", _lines(245) + "\n\nint F"), None),
        (GOOD_HEADER.replace("int F", _lines(246) + "int F"), "src/kv/a.h:1: 251 lin"),
        (GOOD_HEADER.replace("What it", "What " * 20 + "it"), "src/kv/a.h:1: a comm"),
    ],
)
def test_finds_each_offence(tmp_path: Path, text: str, offence: str | None) -> None:
    _expect(tmp_path, "src/kv/a.h", text, offence)


@pytest.mark.parametrize(
    ("name", "text", "offence"),
    [
        ("src/kv/a.cc", _lines(600) + "\n\n", None),
        ("src/kv/a.cc", _lines(601), "src/kv/a.cc:1: 601 lines"),
        ("tests/kv/a.cc", _lines(601), None),
        ("client/a.py", "def f():\n" + "    pass\n" * 59, None),
        ("client/a.py", "def f():\n" + "    pass\n" * 60, "client/a.py:1: f has 61"),
        ("src/kv/a.cc", "int F() {\n" + "  G();\n" * 59 + "}\n", None),
        ("src/kv/a.cc", "int F() {\n" + "  G();\n" * 60 + "}\n", "src/kv/a.cc:1: a f"),
        (
            "src/kv/a.cc",
            "class A {\n  int F(\n      int a) {\n" + "    G();\n" * 60 + "  }\n};\n",
            "src/kv/a.cc:2: a function has 61",
        ),
        ("tests/kv/a.cc", "int a;  // " + "a" * 70 + "\n", "tests/kv/a.cc:1: a comm"),
        ("tests/kv/a.cc", 'char a[] = "http://' + "a" * 70 + '";\n', None),
    ],
)
def test_finds_what_is_too_long(
    tmp_path: Path, name: str, text: str, offence: str | None
) -> None:
    _expect(tmp_path, name, text, offence)


def _expect(root: Path, name: str, text: str, offence: str | None) -> None:
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = style_offences(root)
    assert len(found) == (0 if offence is None else 1), found
    if offence is not None:
        assert found[0].startswith(offence)
