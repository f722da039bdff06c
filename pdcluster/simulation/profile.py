"""What an engine costs: the constants of the model in `engine.py`, and a file for them.

The defaults are those of the stand-in that peers' schedulers were measured on: prefill 40,000 tokens a second, one
prompt at a time, 1,500 cached blocks of 512 tokens; a decode step of 8 ms + 0.25 ms a sequence, 48 sequences; a
transfer of 5 us a token. `pdcluster bench engine` fits a profile to a real engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from pdcluster.errors import UserError

_FORMAT = 1
_COUNTS = frozenset(
    {"chunk_tokens", "prefill_batch", "max_num_seqs", "max_model_len", "block_tokens", "kv_blocks", "cache_blocks"}
)
_OPTIONAL = frozenset({"chunk_tokens", "kv_blocks", "cache_blocks"})
_POSITIVE = frozenset({"prefill_tokens_per_s", "link_bytes_per_s", "lease_s"})


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a profile describes the engine it was fitted to, as mean |forecast / measured - 1| of each sweep.

    None where nothing was measured. `worst` is the largest single error of all.
    """

    engine: str
    prefill_error: float | None
    decode_error: float | None
    worst: float | None
    points: int


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Constants of an engine; times in seconds, sizes in tokens, blocks or bytes.

    A step computes one token of each running sequence and at most `chunk_tokens` tokens in all (None: whole prompts);
    at most `prefill_batch` prompts are in prefill at once. The step takes, where sequences decode,
    `decode_base_s + decode_seq_s * sequences + decode_token_s * context tokens of all`, and, where a prompt is
    computed, `prefill_base_s + tokens / prefill_tokens_per_s + prefill_pair_s * (tokens * context before them)` more.
    `kv_blocks` is what the KV memory holds (None: enough); of it at most `cache_blocks` keep prefixes (None: all).
    A transfer takes `transfer_latency_s + bytes / link_bytes_per_s`, of `kv_bytes_per_token` for each token, those
    that the fetching engine has itself only where `pulls_cached`.
    """

    prefill_tokens_per_s: float = 40_000.0
    prefill_base_s: float = 0.0
    prefill_pair_s: float = 0.0
    chunk_tokens: int | None = None
    prefill_batch: int = 1
    decode_base_s: float = 0.008
    decode_seq_s: float = 0.00025
    decode_token_s: float = 0.0
    max_num_seqs: int = 48
    max_model_len: int = 131_072
    block_tokens: int = 512
    kv_blocks: int | None = None
    cache_blocks: int | None = 1500
    kv_bytes_per_token: float = 131_072.0
    link_bytes_per_s: float = 131_072.0 / 5e-6
    transfer_latency_s: float = 0.0
    pulls_cached: bool = True
    lease_s: float = 30.0
    fit: Fit | None = None

    def prefill_s(self, tokens: int, before: int) -> float:
        """Return the seconds of computing so many tokens of a prompt after those `before`, without the step's base."""
        pairs = tokens * (before + 0.5 * tokens)
        return tokens / self.prefill_tokens_per_s + self.prefill_pair_s * pairs

    def decode_s(self, sequences: int, context: float, steps: int = 1) -> float:
        """Return the seconds of some steps; `context` is that of all sequences before, each grows by one a step."""
        if not sequences:
            return 0.0
        grown = 0.5 * sequences * steps * (steps - 1)
        each = self.decode_base_s + self.decode_seq_s * sequences
        return steps * each + self.decode_token_s * (steps * context + grown)

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds of moving the KV of so many tokens."""
        return self.transfer_latency_s + tokens * self.kv_bytes_per_token / self.link_bytes_per_s

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def slowed(self, factor: float) -> EngineProfile:
        """Return the profile of an engine that computes `factor` times as long; transfers are unchanged."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            prefill_base_s=self.prefill_base_s * factor,
            prefill_pair_s=self.prefill_pair_s * factor,
            decode_base_s=self.decode_base_s * factor,
            decode_seq_s=self.decode_seq_s * factor,
            decode_token_s=self.decode_token_s * factor,
        )

    def with_blocks_of(self, tokens: int) -> EngineProfile:
        """Return the profile with the same memory in blocks of another size: that of the trace which is replayed."""

        def scaled(blocks: int | None) -> int | None:
            return None if blocks is None else max(1, blocks * self.block_tokens // tokens)

        return replace(
            self, block_tokens=tokens, kv_blocks=scaled(self.kv_blocks), cache_blocks=scaled(self.cache_blocks)
        )


def save_profile(profile: EngineProfile, path: Path) -> None:
    """Write a profile. Raises `UserError` where the file cannot be written."""
    data = orjson.dumps({"format": _FORMAT, **asdict(profile)}, option=orjson.OPT_INDENT_2)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot write the profile: {error.strerror}") from None


def load_profile(path: Path) -> EngineProfile:
    """Read a profile; what is left out has its default. Raises `UserError` with the file and the key at fault."""
    try:
        given = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the profile: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(given, dict) or given.pop("format", _FORMAT) != _FORMAT:
        raise UserError(f"{path}: not an engine profile of format {_FORMAT}; make one with `pdcluster bench engine`")
    known = {field.name for field in fields(EngineProfile)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UserError(f"{path}: {unknown[0]}: there is no such key; there are {', '.join(sorted(known))}")
    fit = given.pop("fit", None)
    for key, value in given.items():
        problem = _problem(key, value)
        if problem:
            raise UserError(f"{path}: {key}: {problem}, is {value!r}")
    return EngineProfile(**given, fit=_loaded_fit(fit, path))


def _problem(key: str, value: Any) -> str | None:
    """Return what is wrong with a value, None where nothing is."""
    if value is None and key in _OPTIONAL:
        return None
    if key == "pulls_cached":
        return None if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    if key in _COUNTS:
        return None if isinstance(value, int) and value >= 1 else "must be a whole number, 1 or more"
    if key in _POSITIVE:
        return None if value > 0 else "must be more than 0"
    return None if value >= 0 else "must be 0 or more"


def _loaded_fit(given: Any, path: Path) -> Fit | None:
    if given is None:
        return None
    try:
        return Fit(**given)
    except TypeError:
        names = ", ".join(field.name for field in fields(Fit))
        raise UserError(f"{path}: fit: must be null or an object with {names}") from None
