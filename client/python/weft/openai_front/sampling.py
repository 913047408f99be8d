"""Sampling for one request, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from weft.data import ModelTokenizer
from weft.openai_front.answers import Envelope, Json, Scored, dumps, in_blocks, usage
from weft.openai_front.names import Weights
from weft.openai_front.text import Answer
from weft.types import Sample, SampleDelta, SampleOptions, SampleResult


@dataclass(frozen=True)
class Job:
    """One request: prompts of token ids, and how to sample and to answer.

    scored: the answer has logprobs.
    """

    tokenizer: ModelTokenizer
    weights: Weights
    envelope: Envelope
    prompts: list[list[int]]
    options: SampleOptions
    stops: list[str]
    chat: bool
    num_samples: int = 1
    scored: bool = False
    echo: bool = False
    keep_answer: bool = True  # False: only the prompt is wanted.
    usage_in_stream: bool = False

    def text(self) -> Answer:
        """Returns the text of one sample, still empty."""
        return Answer(self.tokenizer, self.stops, self.options.get("min_tokens", 0))

    def seeded(self, index: int) -> SampleOptions:
        """Returns the options of one prompt, with its own seed. Prompts with the same
        seed would share their random numbers."""
        seed = self.options.get("seed")
        return self.options if seed is None else {**self.options, "seed": seed + index}


async def answer(job: Job) -> list[bytes]:
    """Returns the whole answer as JSON, in blocks."""
    results = await job.weights.sample_many(job.prompts, job.options)
    # Other requests go on while a thread makes a long answer.
    return await asyncio.to_thread(_whole, job, results)


def _whole(job: Job, results: Sequence[SampleResult]) -> list[bytes]:
    choices = [
        _choice(job, prompt, result, sample)
        for prompt, result in zip(job.prompts, results, strict=True)
        for sample in result.samples
    ]
    for index, choice in enumerate(choices):
        choice["index"] = index
    drawn = sum(len(s.tokens) for r in results for s in r.samples if job.keep_answer)
    counts = usage(sum(map(len, job.prompts)), drawn)
    return list(in_blocks(dumps(job.envelope.whole(choices, counts))))


def _choice(job: Job, prompt: list[int], result: SampleResult, sample: Sample) -> Json:
    text = job.text()
    answered = text.add(sample.tokens) + text.finish() if job.keep_answer else ""
    if job.chat:
        scored = _scored(job, sample) if job.scored else None
        return {
            "index": 0,
            "message": {"role": "assistant", "content": answered, "refusal": None},
            "logprobs": scored.as_chat() if scored else None,
            "finish_reason": sample.finish_reason,
        }
    shown = job.tokenizer.decode(prompt) if job.echo else ""
    return {
        "index": 0,
        "text": shown + answered,
        "logprobs": _completion_logprobs(job, prompt, result, sample),
        "finish_reason": sample.finish_reason if job.keep_answer else "length",
    }


def _scored(job: Job, drawn: Sample | SampleDelta) -> Scored:
    top = drawn.top_logprobs or [[] for _ in drawn.tokens]
    return Scored(job.tokenizer, drawn.tokens, drawn.logprobs, top)


def _completion_logprobs(
    job: Job, prompt: list[int], result: SampleResult, sample: Sample
) -> Json | None:
    """Returns the scores of a choice; with echo, the prompt's scores come first."""
    if not job.scored:
        return None
    tokens: list[int] = []
    logprobs: list[float | None] = []
    likely: list[Sequence[tuple[int, float]]] = []
    if job.echo and result.prompt_logprobs is not None:
        tokens += prompt
        logprobs += [None, *map(float, result.prompt_logprobs[1:])]
        likely += result.prompt_top_logprobs or [[] for _ in prompt]
    if job.keep_answer:
        tokens += sample.tokens
        logprobs += map(float, sample.logprobs)
        likely += sample.top_logprobs or [[] for _ in sample.tokens]
    return Scored(job.tokenizer, tokens, logprobs, likely).as_completion()


async def stream(job: Job) -> AsyncIterator[str]:
    """Yields the events of the answers, one prompt after another. The caller waits for
    the first sampled event before it sends any event. So a refusal still sets the HTTP
    status."""
    drawn = 0
    for index, prompt in enumerate(job.prompts):
        texts = [job.text() for _ in range(job.num_samples)]
        offsets = [0] * job.num_samples
        first = index * job.num_samples
        if job.chat:
            for i in range(job.num_samples):
                yield _event(job, first + i, "", role="assistant")
        async for delta in job.weights.sample_stream(prompt, job.seeded(index)):
            drawn += len(delta.tokens)
            text = texts[delta.sample_index]
            new = text.add(delta.tokens)
            if delta.finish_reason is not None:
                new += text.finish()
            logprobs = None
            if job.scored and delta.tokens:
                scored = _scored(job, delta)
                at = delta.sample_index
                logprobs = (
                    scored.as_chat() if job.chat else scored.as_completion(offsets[at])
                )
                offsets[at] += sum(map(len, logprobs.get("tokens", ())))
            if new or logprobs is not None:
                yield _event(job, first + delta.sample_index, new, logprobs=logprobs)
            if delta.finish_reason is not None:
                at = first + delta.sample_index
                yield _event(job, at, "", finish_reason=delta.finish_reason)
    if job.usage_in_stream:
        counts = usage(sum(map(len, job.prompts)), drawn)
        yield line(job.envelope.chunk([], counts))
    yield "data: [DONE]\n\n"


def line(value: Json) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(value, allow_nan=False, default=list)}\n\n"


def _event(
    job: Job,
    index: int,
    text: str,
    *,
    role: str | None = None,
    logprobs: Json | None = None,
    finish_reason: str | None = None,
) -> str:
    choice: Json = {
        "index": index,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    if job.chat:
        choice["delta"] = {} if finish_reason else {"content": text}
        if role:
            choice["delta"]["role"] = role
    else:
        choice["text"] = text
    return line(job.envelope.chunk([choice]))
