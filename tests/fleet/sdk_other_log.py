"""Uses the checkpoint of a model with the Tinker SDK, in a session of its own.

sdk_other_log.py TRAINING_PATH SAMPLER_PATH
"""

from __future__ import annotations

import sys

import tinker
from sdk_parts import GREEDY, datum, prompt
from tinker import types


def main(training_path: str, sampler_path: str) -> None:
    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    print(rest.get_weights_info_by_tinker_path(sampler_path).result().lora_rank)
    sampler = service.create_sampling_client(model_path=sampler_path)
    drawn = sampler.sample(prompt([3, 4]), 1, GREEDY).result()
    print(drawn.sequences[0].tokens)
    client = service.create_training_client_from_state_with_optimizer(training_path)
    client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(client.model_id)
    print(service.holder.get_session_id())


main(*sys.argv[1:])
