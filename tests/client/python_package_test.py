"""Tests the wheel: builds it by one command, installs it into an empty environment,
and uses it there."""

from __future__ import annotations

import re
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import CLIENT, Patch
from fake_weftd import FakeWeftd
from grpc_tools import protoc
from wheels import build_wheel, install, requirements, run

import generate

VERSION = "0.1.0"
PROGRAM = """
import sys, weft
assert weft.__file__.startswith(sys.prefix), weft.__file__
with weft.Client(sys.argv[1]) as client:
    adapter = client.get_or_create("a", rank=4)
    data = [weft.Datum.next_token([1, 2, 3])]
    print(adapter.forward_backward(data).metrics["loss:sum"])
try:
    weft.data.ModelTokenizer.from_folder(sys.argv[2])
except weft.InvalidArgument as error:
    print(error)
"""


def test_stubs_need_no_headers_of_the_system(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    folders: list[Path] = []

    def main(command: list[str]) -> int:
        pairs = pairwise(command)
        folders.extend(Path(value) for name, value in pairs if name == "-I")
        return 1

    monkeypatch.setattr(protoc, "main", main)
    monkeypatch.setattr(generate, "OUTPUT", tmp_path / "_proto")
    with pytest.raises(RuntimeError, match="protoc failed"):
        generate.generate()
    # Some of Weft's protos import files that come with protobuf.
    assert any((one / "google/protobuf/any.proto").is_file() for one in folders)


def test_the_synchronous_client_follows_its_source(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(generate, "PACKAGE", tmp_path)
    head = "\nfrom __future__ import annotations\n"
    (tmp_path / "aio_adapter.py").write_text(head)
    for value in (1, 2):
        (tmp_path / "aio.py").write_text(
            f"{head}from weft.tasks import TaskDriver\n"
            "async def f(a: AsyncAdapter) -> Task[int]:\n"
            f"    async with AsyncClient() as c: return await c.f({value})\n"
        )
        generate.ensure()
        made = (tmp_path / "client.py").read_text()
        assert made.partition(head)[2] == (
            "from weft.threads import ThreadDriver\n"
            "def f(a: Adapter) -> Future[int]:\n"
            f"    with Client() as c: return c.f({value})\n"
        )


@pytest.mark.parametrize("name", generate.SYNCHRONOUS)
def test_the_synchronous_client_has_nothing_of_asyncio(name: str) -> None:
    code = (CLIENT / "weft" / name).read_text().partition("from __future__")[2]
    left = re.findall(r"\w*(?:async|await|Async|Task|__a)\w*\.?", code)
    assert [word for word in left if word != "asyncio"] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("venv"))


def test_the_wheel_has_stubs_and_types(wheel: Path) -> None:
    assert wheel.name == f"weftd-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for stub in ("adapters", "errors", "sampling", "server", "training"):
        assert {f"weft/_proto/{stub}_pb2.py", f"weft/_proto/{stub}_pb2.pyi"} <= names
    sources = {str(p.relative_to(CLIENT)) for p in CLIENT.glob("weft/**/*.py")}
    assert {*sources, "weft/py.typed"} <= names
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0] for name in names} == {
        "weft",
        f"weftd-{VERSION}.dist-info",
    }


def test_the_wheel_works_with_nothing_but_what_it_asks_for(
    python: Path, server: FakeWeftd, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").touch()
    printed = run(python, "-c", PROGRAM, server.target, tmp_path, cwd=tmp_path)
    loss, advice = printed.splitlines()
    assert float(loss) > 0
    assert advice.endswith("pip install tokenizers")
    assert "sft" in run(python, "-m", "weft", "--help", cwd=tmp_path)
    assert "grpo" in run(python.parent / "weft", "--help", cwd=tmp_path)


@pytest.mark.parametrize("extra", ["cli", "train"])
def test_extras_bring_what_data_needs(wheel: Path, extra: str) -> None:
    assert {"jinja2", "tokenizers"} <= set(requirements(wheel, extra))
