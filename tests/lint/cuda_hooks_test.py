"""Tests that sources call only hooks that LibTorch's class for CUDA overrides."""

from pathlib import Path

import pytest
from cuda_hooks import HEADER, answered, hook_offences
from sources import ROOT

CLASS = """
struct CUDAHooks : public at::CUDAHooksInterface {
  DeviceIndex deviceCount() const override;
  bool hasPrimaryContext(
      DeviceIndex device_index) const override;
  const Generator& generator(
      DeviceIndex device_index = -1) const override;
};
"""


def _libtorch_header() -> str:
    found = sorted(
        ROOT.glob(f".venv/lib/python3*/site-packages/torch/include/{HEADER}")
    )
    if not found:
        pytest.skip("no LibTorch in .venv")
    return found[0].read_text()


def test_every_hook_that_is_called_is_cudas() -> None:
    offences = hook_offences(ROOT, _libtorch_header())
    assert not offences, "\n" + "\n".join(offences)


def test_names_the_hook_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "src" / "engine" / "a.cc"
    path.parent.mkdir(parents=True)
    path.write_text(
        "\nat::detail::getCUDAHooks().deviceCount();\n"
        "at::detail::getCUDAHooks().setCurrentDevice(0);\n"
    )
    assert answered(CLASS) == {"deviceCount", "hasPrimaryContext", "generator"}
    assert hook_offences(tmp_path, CLASS) == [
        "src/engine/a.cc:3: CUDA has no setCurrentDevice: it throws"
    ]
