"""Who may ask, and how much: API keys and their limits, decided by a request's headers, before its body is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.api_keys import ApiKey, ApiKeys, presented_key
from proxy.errors import RateLimitedError, UnauthorizedError
from proxy.metrics import Metrics
from proxy.rate_limits import RateLimits
from proxy.trace import Trace

# Of English text and code: an estimate for what has not been tokenized.
_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')


class Pass:
    """Leave to go on, for one request; nothing is counted where there are no limits."""

    __slots__ = ("_admitted", "_estimate", "_key", "_limits")

    def __init__(self, limits: RateLimits | None = None, key: ApiKey | None = None, estimate: int = 0) -> None:
        self._limits = limits
        self._key = key
        self._estimate = estimate
        self._admitted = 0.0 if limits is None else limits.now()

    @property
    def key(self) -> ApiKey | None:
        """The client's key, where there are keys."""
        return self._key

    def settle(self, trace: Trace, body: bytes) -> None:
        """Count the tokens that the request really took; `body` is its answer, where that was no stream."""
        if self._limits is None or self._key is None or self._key.tokens_per_minute is None:
            return
        found = _OUTPUT_TOKENS.search(body)
        output = int(found[1]) if found else trace.events
        prompt = self._estimate if trace.prompt_tokens is None else trace.prompt_tokens
        self._limits.correct(self._key, prompt + output - self._estimate, self._admitted)


_FREE = Pass()


@dataclass(frozen=True, slots=True)
class Gate:
    """Lets requests in; without keys everyone."""

    keys: ApiKeys | None
    limits: RateLimits
    metrics: Metrics

    def admit(self, headers: Mapping[bytes, bytes], declared: int) -> Pass:
        """Return leave to go on; raises `UnauthorizedError`, `RateLimitedError`."""
        if self.keys is None:
            return _FREE
        key = self.identify(headers)
        estimate = declared // _BYTES_PER_TOKEN
        refusal = self.limits.admit(key, estimate)
        if refusal is None:
            return Pass(self.limits, key, estimate)
        self.metrics.refused.inc(refusal.limit)
        words = refusal.limit.replace("_", " ")
        if refusal.seconds is None:
            raise RateLimitedError(f"about {estimate} tokens are more than this key's {words} ever allow", None)
        raise RateLimitedError(f"this key's {words} are spent", refusal.seconds)

    def identify(self, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Return the key of a request; raises `UnauthorizedError`."""
        presented = presented_key(headers)
        if presented is None:
            self.metrics.refused.inc("no_key")
            raise UnauthorizedError("an API key is needed; send Authorization: Bearer KEY")
        key = None if self.keys is None else self.keys.find(presented)
        if key is None:
            self.metrics.refused.inc("unknown_key")
            raise UnauthorizedError("this API key is not known")
        return key

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `UnauthorizedError` where keys are needed and this is none."""
        if self.keys is not None:
            self.identify(headers)
