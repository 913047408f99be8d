"""Tests that modules in a step's path wait for the device only where this is
allowed."""

from pathlib import Path

import pytest
from sources import ROOT
from waits import ALLOWED, FOLDERS, wait_offences, waits


def test_a_step_waits_only_where_it_is_said_to() -> None:
    offences = wait_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


def test_what_is_named_exists() -> None:
    for name in (*FOLDERS, *(file for file, _ in ALLOWED)):
        assert (ROOT / "src" / name).exists(), name


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("x.item<double>();", "item"),
        ("x.max().item();", "item"),
        ("x.cpu();", "cpu"),
        ("x.to(at::kCPU);", "to"),
        ("x.to(\n    y.device());", "to"),
        ("x.to(F(y), options);", "to"),
        ("at::tensor(v, at::kLong).to(device);", "to"),
        ("at::tensor(values, like.options());", "tensor"),
        ("mask.nonzero();", "nonzero"),
        ("at::_unique2(x, true);", "unique"),
        ("at::repeat_interleave(F(a, b));", "repeat"),
        ("ops::BulkCopyTo(x, device);", "bulk"),
    ],
)
def test_finds_each_kind(code: str, kind: str) -> None:
    assert [w.kind for w in waits("\n" + code)] == [kind]
    assert next(iter(waits("\n" + code))).line == 2


@pytest.mark.parametrize(
    "code",
    [
        "x.to(at::kFloat);",
        "x.to(dtype);",
        "at::tensor(values, at::kLong);",
        "at::repeat_interleave(counts, size);",
        "// x.item<int>() waits.",
        "ops::ToDevice(values, device);",
        "items.items();",
    ],
)
def test_leaves_the_rest_alone(code: str) -> None:
    assert not list(waits(code))


def test_names_the_file_and_skips_what_is_outside_of_the_path(tmp_path: Path) -> None:
    for name in ("src/loss/a.cc", "src/engine/decode/sample_loop.cc", "src/log/a.cc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\nx.cpu();\n")
    assert [o.split(": ")[0] for o in wait_offences(tmp_path)] == [
        "src/loss/a.cc:2",
        "src/engine/decode/sample_loop.cc:2",
    ]


def test_an_allowance_without_a_wait_is_an_offence(tmp_path: Path) -> None:
    path = tmp_path / "src" / "ops" / "rotary.cc"
    path.parent.mkdir(parents=True)
    path.write_text("\n")
    assert wait_offences(tmp_path) == ["src/ops/rotary.cc:1: has no to any more"]
