from pathlib import Path

import request_paths
from sources import ROOT


def test_the_paths_of_the_sources_hold() -> None:
    found = request_paths.paths((ROOT / "src/README.md").read_text())
    assert len(found) == 8
    assert all(len(rows) >= 3 for rows in found.values())
    assert request_paths.offences(ROOT) == []


def _tree(folder: Path, rows: list[str]) -> Path:
    (folder / "src/base").mkdir(parents=True)
    (folder / "src/engine").mkdir()
    (folder / "src/layers.txt").write_text("base:\nengine: base\n")
    for name in ("src/base/a.cc", "src/engine/b.cc"):
        (folder / name).write_text("")
    table = "\n".join(f"| `{row}` | what |" for row in rows)
    (folder / "src/README.md").write_text(
        f"### A request\n\n| file | what it does |\n| --- | --- |\n{table}\n"
    )
    return folder


def test_going_down_is_no_offence(tmp_path: Path) -> None:
    tree = _tree(tmp_path, ["src/engine/b.cc", "src/base/a.cc"])
    assert request_paths.offences(tree) == []


def test_going_up_is_an_offence(tmp_path: Path) -> None:
    tree = _tree(tmp_path, ["src/base/a.cc", "src/engine/b.cc"])
    assert request_paths.offences(tree) == ["A request: src/engine/b.cc goes back up"]


def test_a_file_that_is_gone_is_an_offence(tmp_path: Path) -> None:
    tree = _tree(tmp_path, ["src/engine/b.cc", "src/engine/gone.cc"])
    assert request_paths.offences(tree) == [
        "A request: src/engine/gone.cc does not exist"
    ]


def test_a_source_that_no_path_names_is_an_offence(tmp_path: Path) -> None:
    tree = _tree(tmp_path, ["src/base/a.cc"])
    assert request_paths.offences(tree) == ["src/engine/b.cc is not in src/README.md"]
