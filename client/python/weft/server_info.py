"""Converts a server's protobuf description of itself."""

from __future__ import annotations

from weft._proto import server_pb2
from weft.types import ModelInfo, ServerInfo


def to_server_info(info: server_pb2.ServerInfo) -> ServerInfo:
    model = info.model
    return ServerInfo(
        version=info.version,
        device=info.device,
        model=ModelInfo(
            name=model.name,
            architecture=model.architecture,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=list(model.eos_token_ids),
            num_parameters=model.num_parameters,
            dtype=model.dtype,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            expert_layers=model.expert_layers,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
        ),
        max_adapters=info.max_adapters,
        num_adapters=info.num_adapters,
        max_rank=info.max_rank,
        max_data_per_request=info.max_data_per_request,
        max_tokens_per_request=info.max_tokens_per_request,
        max_samples=info.max_samples,
        max_message_bytes=info.max_message_bytes,
        draining=info.draining,
        losses=list(info.losses),
        string_stops=info.string_stops,
        max_adapters_per_tenant=info.max_adapters_per_tenant,
        max_adapter_bytes_per_tenant=info.max_adapter_bytes_per_tenant,
        max_queue_requests=info.max_queue_requests,
        max_queue_tokens=info.max_queue_tokens,
        max_queue_requests_per_tenant=info.max_queue_requests_per_tenant,
        max_queue_tokens_per_tenant=info.max_queue_tokens_per_tenant,
        reorder_window=info.reorder_window,
        replay_window=info.replay_window,
        max_targets_per_token=info.max_targets_per_token,
        max_stop_entries=info.max_stop_entries,
        max_top_logprobs=info.max_top_logprobs,
    )
