"""Compares samples that take newer weights while they run with Forward of each version,
and with transformers, whose cache keeps the keys of earlier versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
import tolerance
import torch
from conftest import model_folder
from parallel import SIZES, need_devices
from reference import mixed_shapes
from texts import random_tokens

MODELS = [("llama-tied", ""), ("gemma2", ""), ("qwen3-5", "")]
ON_RANKS = ("llama-tied", "tensor 2")
# More than one page.
PROMPT_TOKENS = 45
DRAWN_TOKENS = 300
# A tiny model's context has room for so many tokens beside the prompt.
MOST_TOKENS = 450
# The tokens of a version after which the next one comes.
SPAN_TOKENS = 12


class Drawn:
    """A streamed sample: its tokens, log-probabilities and versions."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def spans(self) -> list[tuple[int, int, int]]:
        """Returns (version, begin, end) of each version's tokens."""
        found, begin = [], 0
        for version, tokens in groupby(self.versions):
            end = begin + len(list(tokens))
            found.append((version, begin, end))
            begin = end
        return found


def draw(
    adapter: Any,
    prompt: Sequence[int],
    publish: Sequence[Callable[[], int]] = (),
    **options: Any,
) -> Drawn:
    """Draws a sample in flight. Each of `publish` makes a version and returns its
    number. It runs when the version before has drawn SPAN_TOKENS. The sample ends when
    the last version has."""
    drawn, latest, waiting = Drawn(), 0, list(publish)
    for delta in adapter.sample_stream(
        prompt,
        in_flight=True,
        ignore_eos=True,
        max_tokens=MOST_TOKENS if publish else DRAWN_TOKENS,
        **options,
    ):
        drawn.tokens += [int(token) for token in delta.tokens]
        drawn.logprobs += [float(value) for value in delta.logprobs]
        drawn.versions += delta.versions
        newest = drawn.versions[-1]
        if newest < latest or drawn.versions.count(newest) < SPAN_TOKENS:
            continue
        if waiting:
            latest = waiting.pop(0)()
        elif publish:
            break
    assert len(drawn.tokens) == len(drawn.logprobs) == len(drawn.versions)
    return drawn


@pytest.fixture
def versioned(
    request: Any, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> Any:
    """Yields the kind, an adapter, and functions that load other weights into it, with
    the PEFT folder of each version that they have made."""
    kind, ranks = request.param
    reference = reference_for(kind)
    shape = mixed_shapes(kind)[2]
    folders: dict[int, Path] = {}
    with ExitStack() as stack:
        daemon = daemon_for(kind)
        if ranks:
            need_devices(SIZES[ranks])
            daemon = stack.enter_context(
                daemon_module.running(
                    model_folder(kind), tmp_path / "ranks", *SIZES[ranks]
                )
            )
        client = stack.enter_context(daemon.client())
        own = unique("moving")
        made = [reference.make_adapter(tmp_path / str(i), shape, i) for i in range(3)]
        adapter = client.import_adapter(own, made[0])
        folders[adapter.info().version] = made[0]

        def publisher(folder: Path) -> Callable[[], int]:
            source = unique("source")
            other = client.import_adapter(source, folder)
            other.save("weights")

            def publish() -> int:
                version = int(adapter.load("weights", source=source).version)
                folders[version] = folder
                return version

            return publish

        yield kind, adapter, [publisher(folder) for folder in made[1:]], folders


def kept_logprobs(
    reference: Any, folders: dict[int, Path], prompt: list[int], drawn: Drawn
) -> list[float]:
    """Returns the log-probability of each drawn token. The version that drew a token
    read the token before it; the cache has what earlier versions made of the others."""
    cache, found = None, []
    for version, begin, end in drawn.spans():
        with reference.adapter(folders[version]) as adapted, torch.no_grad():
            for place in range(begin, end):
                read = [drawn.tokens[place - 1]] if place > 0 else prompt
                output = adapted.model(
                    torch.tensor([read]), past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                logprobs = torch.log_softmax(output.logits[0, -1].double(), dim=-1)
                found.append(float(logprobs[drawn.tokens[place]]))
    return found


@pytest.mark.parametrize("versioned", MODELS, indirect=True, ids="-".join)
def test_keys_of_earlier_versions_are_kept(versioned: Any, reference_for: Any) -> None:
    kind, adapter, publish, folders = versioned
    reference = reference_for(kind)
    prompt = random_tokens(reference.vocab, PROMPT_TOKENS, 1)
    drawn = draw(adapter, prompt, publish, seed=5)
    assert [version for version, _, _ in drawn.spans()] == sorted(folders)
    expected = kept_logprobs(reference, folders, prompt, drawn)
    tolerance.assert_near(drawn.logprobs, expected)
    # The numbers of a version that had computed all keys are others.
    version, begin, _ = drawn.spans()[-1]
    with reference.adapter(folders[version]) as adapted:
        anew = scores(adapted, prompt, drawn)[begin:]
    assert tolerance.max_difference(drawn.logprobs[begin:], anew) > 1e-2


def scores(model: Any, prompt: list[int], drawn: Drawn) -> np.ndarray:
    tokens = [*prompt, *drawn.tokens]
    found = model.logprobs(tokens[:-1], tokens[1:])[len(prompt) - 1 :]
    return np.asarray(found.detach().numpy())


@pytest.mark.parametrize("versioned", [*MODELS, ON_RANKS], indirect=True, ids="-".join)
def test_recomputed_keys_are_those_of_the_version(
    versioned: Any, reference_for: Any
) -> None:
    kind, adapter, publish, folders = versioned
    reference = reference_for(kind)
    prompt = random_tokens(reference.vocab, PROMPT_TOKENS, 2)
    drawn = draw(adapter, prompt, publish, seed=6, recompute_cache=True)
    assert [version for version, _, _ in drawn.spans()] == sorted(folders)
    for version, begin, end in drawn.spans():
        with reference.adapter(folders[version]) as adapted:
            expected = scores(adapted, prompt, drawn)[begin:end]
        tolerance.assert_near(drawn.logprobs[begin:end], expected)


def test_steps_run_while_streams_draw(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Each token has the score that Forward of its version gives, also if many draw."""
    import weft

    reference = reference_for("llama-tied")
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes("llama-tied")[1], 3)
    prompts = [random_tokens(reference.vocab, 20 + 3 * i, 30 + i) for i in range(8)]
    text = random_tokens(reference.vocab, 40, 50)
    with daemon_for("llama-tied").client() as client:
        adapter = client.import_adapter(unique("trained"), folder)
        names = {adapter.snapshot("first"): "first"}
        drawing = threading.Event()

        def sample(index: int) -> Drawn:
            drawing.set()
            temperature = 0.0 if index % 2 else 1.0
            return draw(
                adapter,
                prompts[index],
                seed=index,
                temperature=temperature,
                recompute_cache=True,
            )

        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(sample, i) for i in range(len(prompts))]
            drawing.wait(60)
            while not all(future.done() for future in futures):
                adapter.forward_backward([weft.Datum.next_token(text)])
                version = adapter.optim_step(learning_rate=1e-2).version
                if len(names) < 32:
                    names[adapter.snapshot(f"v{version}")] = f"v{version}"
            results = [future.result(60) for future in futures]
        covered = 0
        for prompt, drawn in zip(prompts, results, strict=True):
            assert drawn.versions == sorted(drawn.versions)
            datum = weft.Datum.next_token(
                [*prompt, *drawn.tokens], prompt_length=len(prompt)
            )
            for version, begin, end in drawn.spans():
                if version not in names:
                    continue
                reply = adapter.score([datum], snapshot=names[version])
                own = reply.results[0].logprobs[len(prompt) - 1 :][begin:end]
                tolerance.assert_near(
                    drawn.logprobs[begin:end], own, tolerance.SAMPLER_VERSUS_TRAINER
                )
                covered += 1
        assert covered > len(prompts)
