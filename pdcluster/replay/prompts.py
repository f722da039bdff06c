"""Prompt text for a trace's blocks: an id is the same text every time, so that prefixes are shared as in the trace.

A block is so many words of three letters and a space, common ones, each of which most tokenizers know as one token:
four characters a token. How many an engine really counts is in its answers' usage, and the report has both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

from pdcluster.replay.trace import BLOCK_TOKENS, Arrival

CHARACTERS_PER_TOKEN = 4
_KEPT_BLOCKS = 4096  # 8 MB of text
_WORDS = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "way who boy did its let put say she too use air big box car cup dog ear eat egg end eye far few fly got hot ice "
    "job key law leg"
)


class Prompts:
    """Text of prompts; another seed gives other words, with the same sharing."""

    def __init__(self, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> None:
        self._seed = seed
        words = _WORDS.split()
        self._words = [f"{words[byte % len(words)]} " for byte in range(256)]
        self._length = block_tokens * CHARACTERS_PER_TOKEN
        self._block: Callable[[int], str] = lru_cache(maxsize=_KEPT_BLOCKS)(self._written)

    def text(self, arrival: Arrival) -> str:
        """Return the prompt of a request, four characters for each of its input tokens."""
        return "".join(map(self._block, arrival.blocks))[: arrival.input_tokens * CHARACTERS_PER_TOKEN]

    def _written(self, block: int) -> str:
        """Write a block: 64 words that its id and the seed choose, again and again."""
        digest = hashlib.blake2b(f"{self._seed}:{block}".encode()).digest()
        words = "".join([self._words[byte] for byte in digest])
        return (words * (self._length // len(words) + 1))[: self._length]
