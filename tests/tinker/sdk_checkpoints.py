"""Programs that keep checkpoints, and ask about accounts and sessions."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from sdk_parts import GREEDY, TOKENS, datum, new_client, prompt
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType


def accounts(base: str) -> dict[str, Any]:
    """Asks who the caller is, samples by path, copies, and reads the accounts."""
    service, client = new_client(base)
    client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    path = client.save_weights_for_sampler("kept").result().path
    holder = service.holder

    async def sample_by(**source: str) -> Any:
        with holder.aclient(ClientConnectionPoolType.SAMPLE) as raw:
            return await raw.sampling.asample(
                request=types.SampleRequest(
                    prompt=prompt(TOKENS), sampling_params=GREEDY, **source
                )
            )

    def drawn(**source: str) -> Any:
        future = holder.run_coroutine_threadsafe(sample_by(**source)).result()
        result = _APIFuture(
            types.SampleResponse,
            holder,
            future,
            request_start_time=time.time(),
            request_type="Sample",
        ).result()
        return result.sequences[0].tokens

    api = tinker.RestClient()
    admin = tinker.AdminClient()
    copy = api.copy_weights(path, "any", ttl_seconds=7200).result()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    session = client.model_id.split(":")[0]
    found = api.search_sessions(types.SessionSearchRequest(session_id=session))
    summary = found.result().sessions[0]
    usage = admin.get_billing_usage(hour, hour + timedelta(hours=2)).result()
    stored = admin.get_current_checkpoint_storage_usage().result().data
    loaded = service.create_sampling_client(model_path=copy)
    return {
        "who": api.whoami().result().model_dump(),
        "base": drawn(base_model=base),
        "by_path": drawn(model_path=path),
        "by_copy": loaded.sample(prompt(TOKENS), 1, GREEDY)
        .result()
        .sequences[0]
        .tokens,
        "events": [
            [entry.event, entry.tinker_path]
            for entry in admin.get_audit_log().result().entries
            if client.model_id in (entry.tinker_path or "") or entry.tinker_path == copy
        ],
        "path": path,
        "copy": copy,
        "used": {
            event.event_info.type: event.event_info.token_count
            for event in usage.data
            if event.session_id == session and event.event_info.type == "training"
        },
        "stored": sum(item.checkpoint_count for item in stored),
        "summary": [summary.checkpoints_count, summary.status.type],
    }


def checkpoints(base: str) -> dict[str, Any]:
    """Saves, loads, lists, deletes and downloads."""
    service, client = new_client(base)
    rest = service.create_rest_client()
    data = [datum(weights=[1.0] * 7)]

    def step(which: Any) -> float:
        which.forward_backward(data, "cross_entropy").result()
        return float(
            which.optim_step(types.AdamParams(learning_rate=1e-3))
            .result()
            .metrics["grad_norm"]
        )

    step(client)
    path = client.save_state("one").result().path
    ahead = [step(client), step(client)]
    again = service.create_training_client_from_state_with_optimizer(path)
    repeated = [step(again), step(again)]
    copy = rest.copy_weights(path, "any").result()
    of_copy = service.create_training_client_from_state_with_optimizer(copy)
    copied = [step(of_copy), step(of_copy)]
    try:
        rest.copy_weights(path + "-not", "any").result()
        missing = ""
    except tinker.NotFoundError as error:
        missing = str(error)
    fresh = service.create_training_client_from_state(path)
    step(fresh)
    run = path.split("/")[2]
    listed = rest.list_checkpoints(run).result().checkpoints
    info = rest.get_weights_info_by_tinker_path(path).result()
    runs = rest.list_training_runs().result()
    found = rest.get_training_run(run).result()
    exported = client.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(exported).result().urls
    sizes = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=10) as reply:
            sizes[name] = len(reply.read())
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(run).result().checkpoints
    return {
        "path": path,
        "ahead": ahead,
        "repeated": repeated,
        "copied": copied,
        "missing": missing,
        "listed": [entry.tinker_path for entry in listed],
        "rank": info.lora_rank,
        "runs": [entry.training_run_id for entry in runs.training_runs],
        "run": found.training_run_id,
        "sizes": sizes,
        "left": [entry.tinker_path for entry in left],
    }


def rest(base: str) -> dict[str, Any]:
    """Returns the REST client's results, and the refusals of unsupported calls."""
    service, client = new_client(base)
    client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    path = client.save_state("kept", ttl_seconds=7200).result().path
    api = service.create_rest_client()
    session = client.model_id.split(":")[0]
    sampler = client.save_weights_and_get_sampling_client()
    api.set_checkpoint_ttl_from_tinker_path(path, None).result()
    refusals = []
    asks: list[Callable[[], Any]] = [
        lambda: api.publish_checkpoint_from_tinker_path(path).result(),
        lambda: api.unpublish_checkpoint_from_tinker_path(path).result(),
        lambda: api.assign_session_project(session, "p").result(),
        lambda: api.export_session_trace(session).result(),
        lambda: api.search_sessions(
            types.SessionSearchRequest(project_ids=["p"])
        ).result(),
    ]
    for ask in asks:
        try:
            ask()
        except tinker.BadRequestError as error:
            refusals.append(str(error))
    again = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    return {
        "session": session in api.list_sessions(limit=1000).result().sessions,
        "runs": api.get_session(session).result().training_run_ids,
        "run": api.get_training_run_by_tinker_path(path).result().training_run_id,
        "model_id": client.model_id,
        "mine": path
        in [c.tinker_path for c in api.list_user_checkpoints().result().checkpoints],
        "base": sampler.get_base_model(),
        "again": len(again.sample(prompt([3]), 1, GREEDY).result().sequences),
        "expires": [
            c.expires_at
            for c in api.list_checkpoints(client.model_id).result().checkpoints
        ],
        "refusals": refusals,
    }
