"""Tests that no C++ class has so many methods that it must have several jobs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import CODE_FOLDERS, CPP_SUFFIXES, ROOT, files

# Overloads count once. Constructors, accessors, operators and overrides do not count.
MAX_METHODS = 25
EXEMPT = {"PickleMachine": "has a method of a few lines for each kind of opcode"}
# Literals come first, because a comment cannot begin inside a literal.
_LITERAL_OR_NO_CODE = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|\B'(?:\\.|[^'\\\n])+')|//[^\n]*|/\*.*?\*/|^\s*#[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
_CLASS = re.compile(
    r"(?<!enum )\b(?:class|struct)\s+(?:[A-Z_]{3,}\s+)?(\w+)(?:\s+final)?\s*"
    r"(?::[^;{}()]*)?\{"
)
_ACCESS = re.compile(r"\b(?:public|private|protected)\s*:")
_NO_METHOD = re.compile(r"(?:using|typedef|friend|static_assert|enum)\b")
_MACRO = re.compile(r"\b(?:ABSL_\w+|alignas|decltype)(?:\([^()]*\))?")
_METHOD = re.compile(r"[^=(]*\b([A-Z]\w*)\s*\((?!\*)")


def _members(text: str, begin: int) -> Iterator[str]:
    """Yields the declarations of the class whose body begins at `begin`, without the
    bodies of functions."""
    member, depth = "", 0
    for place in range(begin, len(text)):
        char = text[place]
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return
        ends_body = char == "}" and depth == 0
        # An initializer list continues after the braces of one initializer.
        if ends_body and text[place + 1 :].lstrip()[:1] in (*",;{)",):
            continue
        if ends_body or (char == ";" and depth == 0):
            yield member
            member = ""
        elif depth == 0:
            member += char


def _method(member: str) -> str | None:
    """Returns the name of the method that `member` declares, or None."""
    text, count = member, 1
    while count:
        text, count = re.subn(r"<[^<>]*>", "", text)
    text = _MACRO.sub("", _ACCESS.sub("", text)).strip()
    method = _METHOD.match(text)
    if method is None or _NO_METHOD.match(text) or re.search(r"\boverride\b", text):
        return None
    return method[1]


def method_counts(text: str) -> Iterator[tuple[str, int]]:
    """Yields the name and the number of methods of each class. A nested class is
    counted separately."""
    code = _LITERAL_OR_NO_CODE.sub(lambda match: '""' if match[1] else "", text)
    for match in _CLASS.finditer(code):
        methods = set(map(_method, _members(code, match.end())))
        yield match[1], len(methods - {None, match[1]})


def offences(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {name} has {count} methods, more than {MAX_METHODS}"
        for path in files(root, CODE_FOLDERS, CPP_SUFFIXES)
        for name, count in method_counts(path.read_text())
        if count > MAX_METHODS and name not in EXEMPT
    ]


def test_no_class_has_too_many_methods() -> None:
    assert not offences(ROOT), "\n" + "\n".join(offences(ROOT))


@pytest.mark.parametrize(("count", "found"), [(25, 0), (26, 1)])
def test_finds_a_class_with_too_many_methods(
    tmp_path: Path, count: int, found: int
) -> None:
    path = tmp_path / "src/a.h"
    path.parent.mkdir()
    methods = (f"  void F{i}(int a = 0);\n" for i in range(count))
    path.write_text("class A {\n" + "".join(methods) + "};\n")
    assert len(offences(tmp_path)) == found


def test_counts_methods_only() -> None:
    text = """
    #define M(x) class X { int F(); };
    enum class E { kA };  // class C { void F(); };
    template <class T> class ABSL_LOCKABLE A final : public B<T> {
     public:
      explicit A(int x) : x_{x}, y_(x) { if (x) { F(); } }
      A(const A&) = delete;
      ~A() override;
      using Callback = std::function<void(int)>;
      struct Inner { void G(); Type (*H)(int); int i = F(); };
      void Counts(std::function<void(int)> f) const;
      void Counts(int a = 0) { if (a > 0) { F(); } }
      [[nodiscard]] static std::map<int, T> CountsToo();
      void Run(int x) override { F(); }
      int x() const { return x_; }
      bool operator==(const A&) const;
      friend void Swap(A& a, A& b);
     private:
      std::map<int, std::function<void(int)>> f_ ABSL_GUARDED_BY(mu_) = Make();
      char c_ = ';';
      std::string name_{"a;"};
    };"""
    assert list(method_counts(text)) == [("A", 2), ("Inner", 1)]
