"""The text of a client's prompts and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.datum import token_list
from weft.errors import FailedPrecondition, InvalidArgument
from weft.types import Prompt

if TYPE_CHECKING:
    from weft.data import ModelTokenizer


class Texts:
    """A client's tokenizer, once it has one. Threads: any."""

    def __init__(self) -> None:
        self.tokenizer: ModelTokenizer | None = None
        self.fingerprint = ""  # Of the server's tokenizer at that time.

    def needs_tokenizer(self, prompts: Sequence[Prompt]) -> bool:
        """Returns whether a prompt is a text and there is no tokenizer yet."""
        is_text = any(isinstance(prompt, str) for prompt in prompts)
        return is_text and self.tokenizer is None

    def require(self) -> ModelTokenizer:
        """Returns the tokenizer. Raises FailedPrecondition if there is none yet."""
        if self.tokenizer is None:
            raise FailedPrecondition(
                "a text needs the server's tokenizer: call client.tokenizer() first"
            )
        return self.tokenizer

    def tokens(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's token ids. Raises FailedPrecondition for a text if there
        is no tokenizer yet."""
        if isinstance(prompt, str):
            return self.require().encode(prompt)
        first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
        if isinstance(first, (str, Mapping)):
            raise InvalidArgument(
                "prompt is a list of texts, must be a text or token ids: sample_many "
                "takes a list"
                if isinstance(first, str)
                else "prompt is a list of messages, must be a text or token ids: "
                "client.tokenizer().chat_prompt(messages) makes them"
            )
        return token_list("prompt", prompt)

    def prompts(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Returns several prompts as a list. Raises InvalidArgument for one text."""
        if isinstance(prompts, (str, bytes)):
            raise InvalidArgument(
                "prompts is one text, must be a list of prompts: write [prompt]"
            )
        return list(prompts)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of drawn tokens; None if there is no tokenizer yet."""
        return None if self.tokenizer is None else self.tokenizer.decode(tokens)
