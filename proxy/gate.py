"""Who may ask, and how much: API keys and their limits, decided by a request's headers, before its body is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.trace import Trace


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave to go on."""

    def settle(self, trace: Trace) -> None:
        """Count what the request really took."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Lets requests in."""

    def admit(self, headers: Mapping[bytes, bytes]) -> Pass:  # noqa: ARG002
        """Return leave to go on."""
        return Pass()
