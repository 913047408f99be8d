"""Tests that comments and documents are sentences, or phrases that can be read
alone."""

from pathlib import Path

import pytest
from prose import prose_offences
from sources import ROOT

# The words are joined from two halves, because otherwise this file would break
# the rule.
OF, WHO, LIKEWISE = "O" + "f", "Wh" + "o", "Like" + "wise"


def test_no_sentence_opens_as_a_fragment() -> None:
    offences = prose_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.h", f"int a;  // {OF} the rank.\n", 1),
        ("a.cc", f"// A sum.\n// Ends here. {OF} all ranks.\n", 2),
        ("a.cu", f"// A sum\n// ends here.\n// {WHO} waits leaves.\n", 3),
        ("a.h", f"int a;  // A sum.\n        // {LIKEWISE}.\n", 2),
        ("a.h", f"// Errors: none.\n//\n// {WHO}se part it is.\n", 3),
        ("a.proto", f"// - one\n// - {OF} two\n", 2),
        ("a.py", f'def a():\n    """{OF} one side."""\n', 2),
        ("a.py", f'"""A sum.\n\n{OF} one side.\n"""\n', 3),
        ("a.py", f"A = 1  # {OF} one side.\n", 1),
        ("a.cmake", f"# {OF} one build.\n", 1),
        ("CMakeLists.txt", f"set(A 1)  # {OF} one build.\n", 1),
        ("a.sh", f"set -e\n# {OF} one script.\n", 2),
        ("a.md", f"# A\n\nA sum. {OF} all.\n", 3),
        ("a.md", f"| a | b |\n| --- | --- |\n| sum | {OF} all |\n", 3),
        ("a.md", f"- a sum\n- {WHO} has it\n", 2),
    ],
)
def test_finds_a_fragment(tmp_path: Path, name: str, text: str, line: int) -> None:
    [offence] = _offences(tmp_path, name, text)
    assert offence.startswith(f"src/{name}:{line}: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.h", f"// {WHO} may still queue?\n"),
        ("a.h", f"// The sum\n// {OF} words that go on from one line to the next.\n"),
        ("a.h", "// Tokens of the prompt.\n"),
        ("a.h", f'const char* a = "// {OF} a string.";\n'),
        ("a.h", "// Offsets, whoever asks.\n"),
        ("a.h", f"Size {OF}(int a);\n"),
        ("a.py", f'A = "# {OF} a string."\n'),
        ("a.sh", f'echo "a#{OF}"\n'),
        ("a.txt", f"{OF} data.\n"),
    ],
)
def test_leaves_the_rest_alone(tmp_path: Path, name: str, text: str) -> None:
    assert _offences(tmp_path, name, text) == []


def _offences(root: Path, name: str, text: str) -> list[str]:
    (root / "src").mkdir()
    (root / "src" / name).write_text(text, "utf-8")
    return prose_offences(root)
