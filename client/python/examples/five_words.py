"""GRPO with a verifier: a chat model learns to say what a thing is in five words.

The loop is `python -m weft grpo`; this file is the program that scores replies:

    python -m weft grpo --reward examples/five_words.py \
      --data examples/data/topics.jsonl --eval-data examples/data/topics_test.jsonl \
      --adapter five-words --prompts 4 --samples 12 --max-tokens 16
"""

from __future__ import annotations

import string

from weft.recipes import Reply

WORDS = 5
QUESTION = {"in", "five", "words", "what"}


def reward(reply: Reply) -> float:
    """Returns 1 for five words, and 1/4 less for each word too few or too many.

    Returns 0 for a reply that is cut off, does not open with the topic, repeats a
    word, uses a word of the question, or has a word that is not all letters.
    Punctuation around a word does not count. The adapter soon exploits laxer rules. If
    words of the question were allowed, it would learn to answer "rain is in five
    words".
    """
    words = [word.strip(string.punctuation) for word in reply.text.lower().split()]
    plain = all(map(str.isalpha, words)) and len(set(words)) == len(words)
    echo = QUESTION.intersection(words)
    if not reply.finished or not plain or echo or words[:1] != [reply.record["topic"]]:
        return 0.0
    return max(0.0, 1.0 - abs(len(words) - WORDS) / 4)
