"""Tests that modules in a step's path wait for the device only where this is
allowed."""

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
