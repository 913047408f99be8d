"""What the programs of sdk_script.py share."""

from __future__ import annotations

from typing import Any

import tinker
from tinker import types

TOKENS = [3, 17, 5, 42, 8, 30, 11, 2]
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


def prompt(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    """Returns a datum whose targets are the next tokens."""
    return types.Datum(
        model_input=prompt(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def sampled_datum(
    shown: list[int], sequence: Any, logprobs: list[float], value: float, **inputs: Any
) -> types.Datum:
    """Returns a datum of a sample after the prompt `shown`, with its provenance.
    `logprobs` and `value`, the advantage, are those of the sampled tokens."""
    id, count, before = sequence.sequence_id, len(sequence.tokens), len(shown) - 1
    return datum(
        [*shown, *sequence.tokens],
        logprobs=[0.0] * before + logprobs,
        advantages=[0.0] * before + [value] * count,
        **inputs,
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=id, length=len(shown)),
            types.SampledProvenanceSpan(sequence_id=id, length=count - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=id, offset=1, length=before),
            types.SampledProvenanceSpan(sequence_id=id, length=count),
        ],
    )


def policy_datum() -> types.Datum:
    count = len(TOKENS) - 1
    return datum(
        logprobs=[-4.0 - 0.1 * i for i in range(count)],
        advantages=[(-1.0) ** i * 0.5 for i in range(count)],
    )


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(entry["logprobs"].data) for entry in output.loss_fn_outputs]


def new_client(base: str, **options: Any) -> tuple[Any, Any]:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(
        base_model=base, rank=8, seed=7, **options
    )
    return service, client.result() if hasattr(client, "result") else client
