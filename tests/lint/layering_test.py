"""Tests that the rooms form layers, that namespaces and the tests' folders have their
names, and that the files and functions in the walks of src/README.md exist."""

from pathlib import Path

import pytest
from layering import (
    folder_offences,
    layering_offences,
    missing_paths,
    namespace_offences,
    read_layers,
    unused_permissions,
)
from sources import ROOT

LAYERS = """# comment
base:
base/files: base
config:
request:
weights(torch=reader.*): config
ops(torch): kernels config
engine/engine.h: config
engine/train(torch): request ops
  config
engine(torch): request ops config engine/engine.h engine/train
server/http:
server/wire: config engine/engine.h proto
client: proto
"""


def _tree(root: Path, contents: dict[str, str]) -> Path:
    for name, text in {"src/layers.txt": LAYERS, **contents}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_every_include_is_allowed() -> None:
    offences = layering_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


def test_no_module_may_include_what_it_does_not() -> None:
    unused = unused_permissions(ROOT)
    assert not unused, "\n" + "\n".join(unused)


def test_every_namespace_is_its_rooms() -> None:
    offences = namespace_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


def test_every_test_folder_mirrors_a_folder() -> None:
    offences = folder_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


def test_the_walks_name_files_and_functions_that_exist() -> None:
    missing = missing_paths(ROOT)
    assert not missing, "\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("src/request/a.h", '"src/ops/b.h"'),
        ("src/request/a.h", "<ATen/ATen.h>"),
        ("src/weights/header.cc", "<ATen/ATen.h>"),
        ("src/ops/a_config.h", "<c10/util/Optional.h>"),
        ("src/engine/engine.h", "<torch/torch.h>"),
        ("src/base/a.h", '"src/base/files/b.h"'),
        ("src/engine/train/a.cc", '"src/engine/a.h"'),
        ("src/engine/train/a.cc", '"src/engine/engine.h"'),
        ("src/engine/decode/a.cc", "<vector>"),
        ("server/wire/a.cc", '"src/engine/train/batch_packer.h"'),
        ("server/wire/a.cc", '"src/ops/b.h"'),
        ("server/wire/a.cc", '"server/http/b.h"'),
        ("server/http/a.cc", '"server/wire/b.h"'),
        ("server/a.cc", "<vector>"),
        ("client/a.cc", '"src/request/b.h"'),
        ("kernels/a.cu", '"absl/types/span.h"'),
        ("kernels/a.cu", "<ATen/ATen.h>"),
        ("kernels/a.cu", '"src/base/b.h"'),
        ("src/unknown/a.h", "<vector>"),
    ],
)
def test_names_file_and_line_of_each_offence(
    tmp_path: Path, name: str, include: str
) -> None:
    root = _tree(tmp_path, {name: f"#include {include}\n"})
    offences = layering_offences(root)
    assert len(offences) == 1 and offences[0].startswith(f"{name}:1: ")


USED = {
    "src/base/files/a.cc": '#include "src/base/a.h"\n',
    "src/ops/a.cc": '#include "kernels/a.h"\n#include "src/config/a.h"\n',
    "src/ops/b.cc": "#include <ATen/ATen.h>\n",
    "src/weights/reader.cc": '#include <ATen/ATen.h>\n#include "src/config/a.h"\n',
    "src/engine/engine.h": '#include "src/config/a.h"\n',
    "src/engine/train/a.cc": (
        '#include "src/ops/b.cc"\n#include "src/request/a.h"\n'
        '#include "src/config/a.h"\n'
    ),
    "src/engine/a.cc": (
        '#include "src/ops/b.cc"\n#include "src/request/a.h"\n'
        '#include "src/config/a.h"\n#include "src/engine/engine.h"\n'
        '#include "src/engine/train/a.h"\n'
    ),
    "server/wire/a.cc": (
        '#include "src/config/a.h"\n#include "src/engine/engine.h"\n'
        '#include "weft/v1/a.pb.h"\n'
    ),
    "client/a.cc": '#include "weft/v1/a.pb.h"\n',
}


def test_every_permission_is_used(tmp_path: Path) -> None:
    assert unused_permissions(_tree(tmp_path, USED)) == []


@pytest.mark.parametrize(
    ("name", "text", "unused"),
    [
        ("src/ops/a.cc", '#include "kernels/a.h"\n', "7: ops does not need config"),
        ("src/ops/a.cc", '#include "src/config/a.h"\n', "7: ops does not need kernels"),
        ("src/ops/b.cc", "\n", "7: ops does not need torch"),
        (
            "src/weights/reader.cc",
            "#include <ATen/a.h>\n",
            "6: weights does not need config",
        ),
        ("client/a.cc", "\n", "14: client does not need proto"),
    ],
)
def test_names_each_permission_that_is_not_used(
    tmp_path: Path, name: str, text: str, unused: str
) -> None:
    found = unused_permissions(_tree(tmp_path, {**USED, name: text}))
    assert found[-1] == f"src/layers.txt:{unused}"


def test_a_header_of_the_engine_is_a_permission(tmp_path: Path) -> None:
    server = '#include "src/config/a.h"\n#include "weft/v1/a.pb.h"\n'
    used = {**USED, "server/wire/a.cc": server}
    assert unused_permissions(_tree(tmp_path, used)) == [
        "src/layers.txt:13: server/wire does not need engine/engine.h"
    ]


def test_torch_is_needed_where_another_header_brings_it(tmp_path: Path) -> None:
    bare = {**USED, "src/engine/train/a.cc": '#include "src/request/a.h"\n'}
    assert unused_permissions(_tree(tmp_path, bare)) == [
        "src/layers.txt:9: engine/train does not need config",
        "src/layers.txt:9: engine/train does not need ops",
        "src/layers.txt:9: engine/train does not need torch",
    ]


def test_finds_torch_behind_another_header(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "src/engine/engine.h": '\n#include "src/ops/add.h"\n',
            "src/ops/add.h": "#include <ATen/ATen.h>\n",
        },
    )
    assert [o.split(": ")[0] for o in layering_offences(root)] == [
        "src/engine/engine.h:2"
    ]


def test_rows_name_only_modules_above_them(tmp_path: Path) -> None:
    path = tmp_path / "layers.txt"
    path.write_text("base:\nops: model\nmodel:\n")
    with pytest.raises(ValueError, match=r"layers\.txt:2: model is not above"):
        read_layers(path)


@pytest.mark.parametrize(
    ("name", "namespace", "accepted"),
    [
        ("src/base/files/a.h", "weft", True),
        ("src/base/files/a.h", "weft::a", True),
        ("src/base/files/a.h", "weft::sched", False),
        ("src/engine/train/a.h", "weft::engine", True),
        ("src/engine/train/a.h", "weft::engine::train", True),
        ("server/tinker/a.h", "weft::server::tinker", True),
        ("server/tinker/a.h", "weft::server", True),
        ("src/engine/a.h", "weft", False),
        ("src/engine/train/a.h", "weft::train", False),
        ("src/dispatch/a.h", "weft::sched", False),
        ("server/tinker/a.h", "weft::tinker", False),
    ],
)
def test_names_each_namespace_of_another_room(
    tmp_path: Path, name: str, namespace: str, accepted: bool
) -> None:
    text = f"namespace {namespace} {{\nint F();\n}}  // namespace {namespace}\n"
    offences = namespace_offences(_tree(tmp_path, {name: text}))
    assert len(offences) == (0 if accepted else 1)


def test_a_room_may_declare_what_another_defines(tmp_path: Path) -> None:
    text = "namespace weft::ops {\nclass A;\n}  // namespace weft::ops\n"
    assert namespace_offences(_tree(tmp_path, {"src/engine/a.h": text})) == []


def test_names_each_test_folder_without_a_module(tmp_path: Path) -> None:
    names = ("src/ops/a.h", "tests/ops/a_test.cc", "tests/sched/a_test.cc")
    assert folder_offences(_tree(tmp_path, dict.fromkeys(names, ""))) == [
        "tests/sched: neither src/sched nor sched exists"
    ]


def test_names_the_missing_file_and_the_missing_function_of_a_walk(
    tmp_path: Path,
) -> None:
    walk = "- `server/a.cc:Run` - runs\n- `src/b.h`, `src/gone.h:F`, `server/a.cc:Ru`\n"
    root = _tree(
        tmp_path, {"src/README.md": walk, "server/a.cc": "void Run();", "src/b.h": ""}
    )
    assert missing_paths(root) == [
        "src/README.md:2: src/gone.h does not exist",
        "src/README.md:2: server/a.cc has no Ru",
    ]
