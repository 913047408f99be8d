"""Tests that the installed tree runs from any place, with only LibTorch and the
system's C and C++ runtimes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
for _folder in ("tests/oracle", "tests/client", "deploy"):
    sys.path.insert(0, str(REPOSITORY / _folder))

import daemon as daemon_module  # noqa: E402
import make_wheel  # noqa: E402
import models  # noqa: E402
import wheels  # noqa: E402

RUNTIME = re.compile(
    r"(ld-linux.*|lib(c|m|dl|rt|util|pthread|resolv|stdc\+\+|gcc_s)\.so.*"
    # Files that the C library itself opens to look up hosts and users.
    r"|libnss_.*|locale-archive|.*\.mo|gconv-modules\.cache)"
)


def torch_folder() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installs the tree and then moves it."""
    first = tmp_path_factory.mktemp("install") / "weft"
    subprocess.run(
        ["cmake", "--install", daemon_module.BUILD_DIR, "--prefix", first],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    moved = tmp_path_factory.mktemp("elsewhere") / "other-name"
    shutil.move(first, moved)
    yield moved


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("LD_")}


def serve(
    tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> set[Path]:
    """Samples with the tree's weftd. Returns the shared libraries that weftd has
    mapped, with links resolved."""
    monkeypatch.setattr(daemon_module, "WEFTD", tree / "bin" / "weftd")
    for name in [name for name in os.environ if name.startswith("LD_")]:
        monkeypatch.delenv(name)
    model = models.tiny_model("llama-tied")
    with daemon_module.running(model, folder, *flags) as process:
        with process.client() as client:
            drawn = client.sample([5, 6, 7], max_tokens=4, ignore_eos=True)
            assert len(drawn.samples[0].tokens) == 4
        maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8")
        status = subprocess.run(
            [tree / "bin" / "weftctl", "health", "--server", process.address],
            env=environment(),
        )
        assert status.returncode == 0
    found = re.findall(r"\s(/\S.*\.so\S*)$", maps, re.MULTILINE)
    return {Path(path).resolve() for path in found}


def strangers(libraries: set[Path], *known: Path) -> list[Path]:
    """Returns the libraries outside the known folders, except those of the system's
    runtime."""
    return sorted(
        library
        for library in libraries
        if not RUNTIME.fullmatch(library.name)
        and not any(library.is_relative_to(folder.resolve()) for folder in known)
    )


def test_it_serves_with_a_torch_that_a_flag_names(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_folder()
    mapped = serve(tree, tmp_path, monkeypatch, "--torch-dir", str(torch))
    assert any(library.name.startswith("libgrpc++") for library in mapped)
    assert not strangers(mapped, tree, torch, torch.parent / "nvidia")


def test_it_serves_with_a_torch_beside_it(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_folder()
    (tree / "lib" / "weft" / "torch").symlink_to(torch)
    try:
        mapped = serve(tree, tmp_path, monkeypatch)
    finally:
        (tree / "lib" / "weft" / "torch").unlink()
    assert not strangers(mapped, tree, torch, torch.parent / "nvidia")


def test_a_wheel_serves_in_an_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    wheel = make_wheel.make(daemon_module.BUILD_DIR, tmp_path / "dist")
    assert wheel.stat().st_size < 50e6
    venv = tmp_path / "venv"
    python = wheels.install(wheel, venv)
    torch = torch_folder()
    mapped = serve(venv, tmp_path, monkeypatch)
    assert not strangers(mapped, venv, torch, torch.parent / "nvidia")
    # The client is the wheel's own, too.
    imported = [python, "-c", "import weft; print(weft.__file__)"]
    assert str(venv) in wheels.run(*imported, cwd=tmp_path)


def test_a_python_that_makes_no_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("76.1.0", None):

        def found(name: str, version: str | None = version) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)
        with pytest.raises(SystemExit, match=r"use the .*\.venv/bin/python") as no:
            make_wheel.check_python()
        assert f"{sys.executable} lacks setuptools 77" in str(no.value)


def test_without_torch_it_says_what_is_missing(tree: Path, tmp_path: Path) -> None:
    weftd = tree / "bin" / "weftd"
    model = models.tiny_model("llama-tied")
    flags = [f"--model={model}", f"--checkpoint-dir={tmp_path / 'c'}"]
    for extra, words in (
        ((), "libtorch_cpu.so"),
        ((), "pip install torch=="),
        ((f"--torch-dir={tmp_path}",), f"--torch-dir={tmp_path}"),
    ):
        done = subprocess.run(
            [weftd, *flags, *extra],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert words in done.stderr


class Bundle:
    """The device's tests, packed with the tree and unpacked elsewhere."""

    def __init__(self, tree: Path, folder: Path):
        archive = folder / "bundle.tar.gz"
        script = REPOSITORY / "tests" / "device" / "bundle.sh"
        subprocess.run([script, "--preset", "cpu", "--tree", tree, archive], check=True)
        subprocess.run(["tar", "-C", folder, "-xzf", archive], check=True)
        self.folder = folder / "weft-device"

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of tests/device with this Python, on the CPU."""
        return subprocess.run(
            [self.folder / "tests" / "device" / script, "--device", "cpu", *words],
            env={**environment(), "PYTHON": sys.executable},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
        )

    @contextmanager
    def with_program(self, name: str, line: str) -> Iterator[None]:
        """Replaces a program by a line of shell."""
        program = self.folder / "libexec" / name
        original = program.read_bytes()
        program.write_text(f"#!/bin/sh\n{line}\n")
        yield
        program.write_bytes(original)


@pytest.fixture(scope="module")
def bundle(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle(tree, tmp_path_factory.mktemp("bundle"))


def test_a_bundle_runs_tests_and_benches_elsewhere(
    bundle: Bundle, tmp_path: Path
) -> None:
    steps = (
        *("optim", "executor", "device", "draw_rows", "memcheck", "muon"),
        *("train_step=qwen3.5-0.8b", "decode_moe", "decode_bench=qwen3.5-0.8b"),
    )
    done = bundle.run("run.sh", "--output", str(tmp_path), *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("8 passed, 0 failed, 1 skipped\n"), done.stdout
    assert "skipped  memcheck: for a CUDA device alone\n" in done.stdout
    for name in ("train_step", "decode_moe", "decode_bench"):
        line = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert line["bench"] == name
        if name != "decode_moe":
            assert "tiny-hybrid" in json.dumps(line["command"])
        assert line["machine"]["cores"] > 0 and line["command"]
        if name == "train_step":
            assert line["ratio"].keys() == {"speed weft/naive", "model FLOPs/GEMM rate"}
    # The step `recovery` makes files fail.
    support = bundle.folder / "build" / "tests" / "support"
    assert (support / "libweft_failpoints.so").exists()
    # The client's packages load from the bundle alone: -S hides the packages of
    # this Python.
    program = (
        "import grpc, google.protobuf.message as m; print(grpc.__file__, m.__file__)"
    )
    own = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(bundle.folder / "python")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert all(Path(p).is_relative_to(bundle.folder) for p in own.stdout.split())


def test_only_some_steps_run_in_part(bundle: Bundle, tmp_path: Path) -> None:
    for step, words in (("optim=x", "can run in part"), ("nothing=x", "no step")):
        done = bundle.run("run.sh", "--output", str(tmp_path), step)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_quarter_of_an_hour_ends_at_a_failure_or_in_time(
    bundle: Bundle, tmp_path: Path
) -> None:
    kernels = "cuda_kernels_on_host_test"
    with bundle.with_program(kernels, "true"), bundle.with_program("ops_test", "false"):
        failed = ("--output", str(tmp_path / "failed"), "--total", "30")
        done = bundle.run("quarter.sh", *failed)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("passed   kernels: ")
    assert lines[1].startswith("FAILED   ops: ")
    others = [line for line in lines[3:-1] if not line.startswith("  | ")]
    assert len(others) > 20
    assert all(line.endswith(": an earlier step failed") for line in others)
    assert "running  ops: 2 of " in done.stderr
    with bundle.with_program(kernels, "sleep 600"):
        late = ("--output", str(tmp_path / "late"), "--total", "3")
        done = bundle.run("quarter.sh", *late)
    first, second, *_ = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(
        r"skipped  kernels: cut off after [23] s, because no time is left", first
    )
    assert second == "skipped  ops: no time is left"
    assert len(done.stderr.splitlines()) == 1  # The shell does not report the kill.
    summary = (tmp_path / "late" / "summary.txt").read_text("utf-8")
    assert "preset cpu" in summary and summary.endswith(done.stdout)
    assert (tmp_path / "late" / "kernels.log").exists()
