"""Requests of OpenAI's API, as far as the server can answer them.

Some fields that would change the answer are not supported. A request that uses one of
them is refused, and the error names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")

# A list that reports only its first bad entry. One error per entry would cost far more
# than the request itself.
Several = Annotated[list[T], Field(fail_fast=True)]
Prompt = str | Several[str] | Several[int] | Several[Several[int]]


def _text(value: str) -> str:
    """Raises ValueError for a string that is no valid text."""
    value.encode()
    return value


def _refusal(param: str, why: str, code: str = "invalid_value") -> PydanticCustomError:
    """Returns the error of a field. param: the field, also if it is in a message."""
    context = {"param": param.partition("[")[0], "text": f"{param} {why}"}
    return PydanticCustomError(code, "{text}", context)


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # Accepted but ignored.


class SamplingRequest(BaseModel):
    """The fields that completions and chats share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, AfterValidator(_text)]
    n: int = Field(default=1, ge=1, le=128)
    temperature: float | None = None
    top_p: float | None = None
    # Not in OpenAI's API. 0 and -1: draws from all tokens.
    top_k: int = Field(default=0, ge=-1, lt=2**32)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: str | Several[str] | None = None
    stop_token_ids: Several[int] = []  # Not in OpenAI's API.
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    # The keys are token ids. Any, because token_biases reports only the first bad one.
    logit_bias: dict[str, Any] | None = None
    # The next four are not in OpenAI's API. They have the names of vLLM.
    min_p: float = 0
    repetition_penalty: float = 1
    min_tokens: int = Field(default=0, ge=0, lt=2**32)
    allowed_token_ids: Several[int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Accepted but ignored, because these fields do not change the answer.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # Refused unless they have the values that change nothing. Most are not in OpenAI's
    # API: clients of vLLM and SGLang always send some of them.
    best_of: int | None = None
    length_penalty: float = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def unoffered(self) -> dict[str, object]:
        """Returns true values for the fields that would change the answer."""
        return {
            "best_of": self.best_of not in (None, 1, self.n),
            "length_penalty": self.length_penalty != 1,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": not self.skip_special_tokens,
        }

    @model_validator(mode="before")
    @classmethod
    def known_fields(cls, data: object) -> object:
        """Leaves out null fields, because a client sends null for a field that it does
        not set. Refuses the first unknown field."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                why = "is not known, and so not offered"
                raise _refusal(str(name)[:60], why, "unknown_parameter")
        return {name: value for name, value in data.items() if value is not None}

    @model_validator(mode="after")
    def refuse_unoffered(self) -> SamplingRequest:
        for name, value in self.unoffered().items():
            if value:
                why = "is not offered: leave it out"
                raise _refusal(name, why, "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "is only for stream=true")
        return self

    @model_validator(mode="after")
    def check_biases(self) -> SamplingRequest:
        self.token_biases()
        return self

    def token_biases(self) -> dict[int, float]:
        """Returns the bias of each token id."""
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            name = f"logit_bias[{key[:20]!r}]"
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise _refusal(name, "is not the id of a token")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)):
                raise _refusal(name, f"is {str(bias)[:20]!r}, must be a number")
            biases[int(key)] = bias
        return biases

    def stops(self) -> list[str]:
        """Returns the texts that end an answer."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(SamplingRequest):
    """A request to /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool = False
    suffix: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def unoffered(self) -> dict[str, object]:
        return {
            **super().unoffered(),
            "suffix": self.suffix,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @model_validator(mode="after")
    def check_echo(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise _refusal("echo", "is not offered with stream=true")
        if self.max_tokens == 0 and not self.echo:
            raise _refusal("max_tokens", "is 0, must be at least 1 without echo")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Returns each prompt, as a text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if all(isinstance(entry, int) for entry in prompt) and prompt:
            return [[entry for entry in prompt if isinstance(entry, int)]]
        return [entry for entry in prompt if not isinstance(entry, int)]


class ResponseFormat(BaseModel):
    """The format of an answer, which can only be text."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """A request to /v1/chat/completions."""

    messages: Several[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    # The template's own switches, such as {"enable_thinking": false}.
    chat_template_kwargs: dict[str, bool | int | float | str] = {}

    def unoffered(self) -> dict[str, object]:
        choice = None if self.tool_choice == "none" else self.tool_choice
        return {**super().unoffered(), "tools": self.tools, "tool_choice": choice}

    @model_validator(mode="after")
    def join_texts(self) -> ChatRequest:
        """Joins each content that is a list of texts into one text, because chat
        templates expect a text. A template would take a message without a content for
        an empty one, so only a message that calls tools may be without. A template that
        shows no calls refuses them, so the result of a tool must follow its call."""
        called = False
        for index, message in enumerate(self.messages):
            name = f"messages[{index}]"
            if not isinstance(message.get("role"), str):
                raise _refusal(f"{name}.role", "is missing or not a text")
            if message["role"] == "tool" and not called:
                why = "is 'tool', must follow a message with tool_calls"
                raise _refusal(f"{name}.role", why)
            content = message.get("content")
            calls = message["role"] == "assistant" and message.get("tool_calls")
            called = called or bool(calls)
            if content is None and calls:
                message["content"] = ""
                continue
            if isinstance(content, list):
                texts = [p.get("text") for p in content if isinstance(p, dict)]
                if len(texts) == len(content) and all(
                    isinstance(text, str) for text in texts
                ):
                    content = message["content"] = "\n".join(map(str, texts))
            if content is None:
                raise _refusal(f"{name}.content", "is missing, must be a text")
            if not isinstance(content, str):
                raise _refusal(f"{name}.content", "is not a text")
        return self

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _refusal("top_logprobs", "is only for logprobs=true")
        return self
