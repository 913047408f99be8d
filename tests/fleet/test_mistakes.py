"""What an operator can do wrong with --state: weftd says what and the way out in one
line of its log, shows no secret, ends, and changes nothing in the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import stores
from durable import KIND, train
from members import Fleet, Member
from objects import Objects
from shifted_clock import ShiftedClock
from stores import Store

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

WRONG_SECRET = "a-wrong-secret-that-no-line-may-show"
SECRETS = (stores.SECRET, stores.READER_SECRET, WRONG_SECRET)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, seaweedfs: Store) -> str:
    """The prefix of a state with a snapshot, an image and records after it, whose
    owner was killed."""
    folder = tmp_path_factory.mktemp("template")
    with Fleet(folder, seaweedfs.url, seaweedfs.environment()) as fleet:
        member = fleet.add("a")
        member.wait_for("serving")
        with member.client() as client:
            client.create_adapter("x", rank=4, seed=1)
            train(client, "x", 0)
        assert member.stop() == 0, "a clean stop writes a snapshot"
        member.launch()
        member.wait_for("serving")
        with member.client() as client:
            for seed in range(1, 4):
                train(client, "x", seed)
    return fleet.url


@dataclass
class Case:
    """How weftd is started. A mistake changes it, or the objects."""

    store: Store
    objects: Objects
    url: str  # A copy of the template.
    folder: Path
    environment: dict[str, str]
    launcher: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    kind: str = KIND
    status: int = 1

    def keys(self, prefix: str) -> list[str]:
        keys = self.objects.listing(self.url)
        return sorted(key for key in keys if key.startswith(prefix))

    def remove(self, prefix: str, place: int = -1) -> str:
        """Deletes one of the objects below `prefix`, the last one by default. Returns
        its URL."""
        key = self.keys(prefix)[place]
        self.objects.delete(self.url, key)
        return f"{self.url}/{key}"


# Each function makes a mistake, and returns words that the line in the log must have.
Mistake = Callable[[Case], tuple[str, ...]]


def wrong_bucket(case: Case) -> tuple[str, ...]:
    case.url = "s3://no-such-bucket/p"
    return "--state=s3://no-such-bucket/p", "create the bucket, or correct its name"


def wrong_secret(case: Case) -> tuple[str, ...]:
    case.environment["AWS_SECRET_ACCESS_KEY"] = WRONG_SECRET
    return f"--state={case.url}", "the secret key is not that of the access key"


def wrong_key(case: Case) -> tuple[str, ...]:
    case.environment["AWS_ACCESS_KEY_ID"] = "nobody"
    return f"--state={case.url}", "the store does not know AWS_ACCESS_KEY_ID"


def only_reads(case: Case) -> tuple[str, ...]:
    case.environment["AWS_ACCESS_KEY_ID"] = stores.READER
    case.environment["AWS_SECRET_ACCESS_KEY"] = stores.READER_SECRET
    return f"--state={case.url}", "must be able to read, write, list and delete"


def another_model(case: Case) -> tuple[str, ...]:
    case.kind = "llama-untied"
    return "another base model than --model", "--accept-base-model-change"


def foreign_objects(case: Case) -> tuple[str, ...]:
    case.url = case.store.url
    case.objects.put(case.url, "photos/cat.jpg")
    return f"{case.url}/photos/cat.jpg is there", "name another prefix"


def missing_format(case: Case) -> tuple[str, ...]:
    return f"{case.remove('FORMAT')} is missing", RESTORE


def missing_manifest(case: Case) -> tuple[str, ...]:
    return f"{case.remove('owners/0')} is missing", RESTORE


def missing_record(case: Case) -> tuple[str, ...]:
    return f"lacks {case.remove('logs/0/records/', -3)}", RESTORE


def missing_snapshot(case: Case) -> tuple[str, ...]:
    return f"{case.remove('logs/0/snapshots/')} is missing", RESTORE


def missing_image(case: Case) -> tuple[str, ...]:
    return f"{case.remove('logs/0/images/')} is missing", RESTORE


def clock_behind(case: Case, seconds: int = -3600) -> tuple[str, ...]:
    clock = ShiftedClock(case.folder)
    clock.set(seconds)
    case.launcher = clock.launcher
    return f"--state={case.url}", "this machine's clock is wrong"


def clock_ahead(case: Case) -> tuple[str, ...]:
    return clock_behind(case, 3600)


def store_away(case: Case) -> tuple[str, ...]:
    (port,) = stores.free_ports(1)
    case.environment["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{port}"
    return f"--state={case.url}", f"Failed to connect to 127.0.0.1 port {port}"


def too_few_logs(case: Case) -> tuple[str, ...]:
    case.objects.put(case.url, "owners/2")
    case.flags = ("--logs", "2")
    return "--logs=2", f"{case.url}/owners/2", "give each process --logs=3"


def bad_url(case: Case) -> tuple[str, ...]:
    case.url = "https://bucket/prefix"
    return "--state=https://bucket/prefix", "give s3://BUCKET/PREFIX"


def folder_and_store(case: Case) -> tuple[str, ...]:
    case.flags = ("--state-dir", str(case.folder / "state"))
    case.status = 2
    return ("--state-dir and --state are both given",)


RESTORE = "`weftctl state restore BACKUP s3://BUCKET/NEW`"
MISTAKES: tuple[Mistake, ...] = (
    wrong_secret,
    wrong_key,
    only_reads,
    another_model,
    foreign_objects,
    missing_format,
    missing_manifest,
    missing_record,
    missing_snapshot,
    missing_image,
    clock_behind,
    clock_ahead,
    store_away,
    too_few_logs,
    bad_url,
    folder_and_store,
)


def error_of(member: Member, status: int) -> str:
    """Waits until weftd ends with `status`. Returns its only line about an error."""
    assert member.wait() == status, member.log_tail()
    text = member.log_text()
    for secret in SECRETS:
        assert secret not in text
    lines = [line for line in text.splitlines() if not line.startswith("{")]
    for line in text.splitlines():
        if line.startswith("{") and json.loads(line)["level"] == "error":
            lines.append(str(json.loads(line)["error"]))
    assert len(lines) == 1, text
    return lines[0]


def check(mistake: Mistake, case: Case) -> None:
    """Makes a mistake, and checks what weftd says and changes."""
    existing = case.url
    words = mistake(case)
    if case.url.startswith(f"s3://{stores.BUCKET}/"):
        existing = case.url
    before = case.objects.listing(existing)
    member = Member(
        case.folder / "a", case.url, case.environment, *case.flags, kind=case.kind
    )
    member.launch_with(*case.launcher)
    error = error_of(member, case.status)
    for word in words:
        assert word in error
    after = case.objects.listing(existing)
    assert after == before


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_named_and_changes_nothing(
    mistake: Mistake, template: str, seaweedfs: Store, objects: Objects, tmp_path: Path
) -> None:
    url = seaweedfs.url
    objects.copy(template, url)
    check(mistake, Case(seaweedfs, objects, url, tmp_path, seaweedfs.environment()))


def test_a_wrong_bucket_is_named(moto: Store, tmp_path: Path) -> None:
    """SeaweedFS makes a bucket for who may make one, so this asks another store."""
    with Objects(moto) as objects:
        url = f"s3://{stores.BUCKET}"
        case = Case(moto, objects, url, tmp_path, moto.environment())
        check(wrong_bucket, case)


def test_two_processes_with_one_name_are_told_so(
    template: str, seaweedfs: Store, objects: Objects, tmp_path: Path
) -> None:
    url = seaweedfs.url
    objects.copy(template, url)
    with Fleet(tmp_path / "1", url, seaweedfs.environment()) as fleet:
        first = fleet.add("a")
        first.wait_for("serving")
        fleet.folder = tmp_path / "2"
        second = fleet.add("a")
        second.wait_for("serving")
        error = error_of(first, 4)
        assert "another process with --instance=a has taken the log over" in error
        assert "give each process a name of its own" in error
        second.wait_until_restored()
        with second.client() as client:
            assert client.adapter("x").info().optim_steps == 4
