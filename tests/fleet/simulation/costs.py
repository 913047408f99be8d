"""What things cost in the simulated fleet, and where each figure comes from."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
RESULTS = REPOSITORY / "tests" / "bench" / "results"
PROBE = RESULTS / "store_probe_xeon-2core_2026-11-30.txt"
TAKE_OVER = RESULTS / "takeover_xeon-2core_2026-11-30.json"
IMAGES = RESULTS / "log_cost_8b_epyc-2core_2026-11-25.json"
LOAD = RESULTS / "load_epyc-2core_2026-11-21.json"
TRAIN_STEP = RESULTS / "h100_2026-11-22" / "train_step_llama-3.1-8b.json"
STANDBY = REPOSITORY / "src" / "log" / "bucket" / "standby.h"
OWNER = REPOSITORY / "src" / "log" / "bucket" / "log_owner.cc"
UNIT = REPOSITORY / "deploy" / "systemd" / "weftd.service"
POD = REPOSITORY / "deploy/k8s/components/standby/kustomization.yaml"


@dataclass(frozen=True)
class Costs:
    """All times are seconds. WHY says where each figure comes from."""

    logs: int
    adapters: int
    training_share: float
    beat: float
    look: float
    patience: float
    most_gap: float
    looks_at_once: int
    put: float
    get: float
    list: float
    commits_a_second: float
    store_requests_a_second: float
    restore: float
    most_replay: float
    end_work: float
    image_bytes: float
    image_rate: float
    called: int
    restart: float
    new_pod: float
    process_start: float
    model_bytes: float
    first_load_rate: float
    second_load_rate: float
    tokens_a_second: float

    @property
    def image(self) -> float:
        return self.image_bytes / self.image_rate

    @property
    def in_training(self) -> int:
        """Adapters of a log that have changed since the snapshot."""
        return round(self.training_share * self.adapters / self.logs)

    @property
    def last_snapshot(self) -> float:
        return self.end_work + self.in_training * self.image

    def request(self, mean: float, standbys: int) -> float:
        """Returns the mean time of a request while so many processes stand by."""
        rate = self.logs * (
            1 / self.beat + self.commits_a_second + standbys / self.look
        )
        return mean / (1 - min(0.95, rate / self.store_requests_a_second))

    def comes_after(self, in_place: bool) -> float:
        """Returns how long it takes from a death to the process that replaces it."""
        loads = self.second_load_rate if in_place else self.first_load_rate
        begins = self.restart if in_place else self.new_pod
        return begins + self.process_start + self.model_bytes / loads


WHY = {
    "logs": "Assumption: as many daemons serve.",
    "adapters": "Assumption: they are spread evenly over the logs.",
    "training_share": "Assumption: this share of them has changed since the snapshot.",
    "beat": "kBeatInterval of src/log/bucket/standby.h.",
    "look": "kLookInterval of src/log/bucket/standby.h.",
    "patience": "kOwnerPatience of src/log/bucket/standby.h.",
    "most_gap": "kLookInterval and kLookPatience of src/log/bucket/standby.h.",
    "looks_at_once": "kLooksAtOnce of src/log/bucket/log_owner.cc.",
    "put": f"Median of {PROBE.name}.",
    "get": f"Median of {PROBE.name}.",
    "list": f"Median of {PROBE.name}.",
    "commits_a_second": "Assumption: groups of records that a daemon writes.",
    "store_requests_a_second": "Assumption: a request takes 1 / (1 - load) as long; "
    "Amazon says that S3 takes 3,500 writes a second below one prefix.",
    "restore": f"Median stop of {TAKE_OVER.name} without the look before it: from the "
    "take of a log to an answer of an adapter that did not change.",
    "most_replay": "WEFT_SNAPSHOT_REPLAY_SECONDS of deploy/k8s/components/standby. "
    "Assumption: a death comes at any time between two snapshots.",
    "end_work": "Assumption: from SIGTERM to the last snapshot, which has all adapters "
    "in training.",
    "image_bytes": f"{IMAGES.name}: Llama-3.1-8B, rank 16, with moments.",
    "image_rate": "Assumption: bytes of images that a daemon reads or writes a second.",
    "called": "Assumption: so many adapters of a log that did not change are called "
    "at once; their images and those in training are read in turns.",
    "restart": "RestartSec of deploy/systemd/weftd.service, also for a container.",
    "new_pod": "Assumption: Kubernetes finds a machine that has the image, and starts "
    "a pod.",
    "process_start": "Assumption: from the start of the process to that of the load, "
    "and to the first look.",
    "model_bytes": "Assumption: eight billion weights in bf16.",
    "first_load_rate": f"First load of {LOAD.name}, from a disk.",
    "second_load_rate": f"Second load of {LOAD.name}, from the page cache.",
    "tokens_a_second": f"A training step of {TRAIN_STEP.parent.name}.",
}


def _number(path: Path, pattern: str) -> float:
    found = re.search(pattern, path.read_text("utf-8"))
    if found is None:
        raise ValueError(f"{path}: no {pattern}")
    return float(found.group(1))


def _constant(name: str) -> float:
    return _number(STANDBY, rf"{name} = absl::Seconds\((\d+)\)")


def _result(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))["ours"]
    return result


def measured_take_overs() -> dict[str, list[float]]:
    """Returns the seconds of kills and stops of two daemons with one log."""
    found = _result(TAKE_OVER)
    return {
        "kills": [row["unchanged"] for row in found["kills"]],
        "stops": found["stops"],
    }


def measured() -> Costs:
    load = json.loads(LOAD.read_text("utf-8"))
    loads = load["ours"]["weft"]["first_seconds"]
    look = _constant("kLookInterval")
    return Costs(
        logs=64,
        adapters=10_000,
        training_share=0.1,
        beat=_constant("kBeatInterval"),
        look=look,
        patience=_constant("kOwnerPatience"),
        most_gap=look + _constant("kLookPatience"),
        looks_at_once=int(_number(OWNER, r"kLooksAtOnce = (\d+)")),
        put=_number(PROBE, r"PUT of 1 kB +ok +([\d.]+) ms") / 1000,
        get=_number(PROBE, r"GET of 1 kB +ok +([\d.]+) ms") / 1000,
        list=_number(PROBE, r"LIST +ok +([\d.]+) ms") / 1000,
        commits_a_second=10,
        store_requests_a_second=3500,
        restore=statistics.median(measured_take_overs()["stops"]) - look,
        most_replay=_number(POD, r"WEFT_SNAPSHOT_REPLAY_SECONDS=(\d+)"),
        end_work=0.1,
        image_bytes=_result(IMAGES)["snapshot"]["image_bytes"],
        image_rate=1e9,
        called=8,
        restart=_number(UNIT, r"RestartSec=(\d+)s"),
        new_pod=20,
        process_start=10,
        model_bytes=16e9,
        first_load_rate=load["config"]["bytes"] / loads[0],
        second_load_rate=load["config"]["bytes"] / loads[1],
        tokens_a_second=_result(TRAIN_STEP)["weft"]["tokens_per_second"],
    )


def described(costs: Costs) -> dict[str, dict[str, Any]]:
    """Returns each figure with its sentence."""
    return {
        name: {"value": value, "why": WHY[name]}
        for name, value in dataclasses.asdict(costs).items()
    }
