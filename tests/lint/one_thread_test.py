"""Tests that no program marked ONE_THREAD has code that uses threads. The thread
sanitizer's build leaves out these programs."""

import re
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT

_PROGRAM = re.compile(
    r"weft_cc_test\(NAME (\w+)(?: ALONE)? ONE_THREAD\s+SRCS ([^)]*?)\s+DEPS"
)
_INCLUDE = re.compile(r'^#include (?:<(.+)>|"(.+)")$', re.MULTILINE)
# <atomic> is not in the list, because an atomic starts no thread and takes no lock.
THREADS = {"thread", "mutex", "future", "condition_variable", "pthread.h"}
THREADS |= {"shared_mutex", "semaphore", "latch", "barrier", "omp.h"}
THREADS |= {
    "src/base/threads/mutex.h",
    "src/base/threads/worker.h",
    "src/base/threads/periodic_task.h",
}
THREADS |= {"ATen/Parallel.h", "absl/synchronization/mutex.h"}


def programs() -> dict[str, list[Path]]:
    """Returns the sources of each program that is marked ONE_THREAD."""
    found = {}
    for path in sorted(ROOT.glob("tests/*/CMakeLists.txt")):
        text = path.read_text()
        marked = _PROGRAM.findall(text)
        assert len(marked) == text.count("ONE_THREAD"), f"{path}: NAME ONE_THREAD SRCS"
        for name, sources in marked:
            found[name] = [path.parent / source for source in sources.split()]
    return found


def thread_headers(root: Path, sources: list[Path]) -> Iterator[str]:
    """Yields each header of THREADS that the sources include, directly or through the
    project's headers and their .cc files."""
    queue, seen = list(sources), set(sources)
    while queue:
        path = queue.pop()
        for system, own in _INCLUDE.findall(path.read_text()):
            if (system or own) in THREADS:
                yield f"{path.relative_to(root)} includes {system or own}"
            header = root / own
            for file in (header, header.with_suffix(".cc")):
                if own and file.is_file() and file not in seen:
                    seen.add(file)
                    queue.append(file)


def test_programs_of_one_thread_use_none() -> None:
    assert "scheduler_test" in programs()
    problems = [
        p for sources in programs().values() for p in thread_headers(ROOT, sources)
    ]
    assert not problems, "\n".join(problems)


def test_finds_a_lock_behind_a_header(tmp_path: Path) -> None:
    (tmp_path / "a_test.cc").write_text('#include "a.h"\n')
    (tmp_path / "a.h").write_text("#include <vector>\n")
    (tmp_path / "a.cc").write_text(
        '#include "a.h"\n#include "src/base/threads/mutex.h"\n'
    )
    found = list(thread_headers(tmp_path, [tmp_path / "a_test.cc"]))
    assert found == ["a.cc includes src/base/threads/mutex.h"]
