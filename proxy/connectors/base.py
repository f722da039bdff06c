"""The contract of a connector: the bodies of both legs. Pure; a client's body is never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from proxy.request import InferenceRequest


class Connector(Protocol):
    """Knows what prefill must be asked and how its reply is handed to decode."""

    overlaps: bool  # both legs may run at once
    may_decode_alone: bool  # decode can serve without a handoff

    def prefill_body(self, request: InferenceRequest) -> bytes:
        """Return the body of the prefill leg."""
        ...

    def handoff(self, reply: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the handoff in prefill's reply, None where there is no usable one."""
        ...

    def decode_body(self, request: InferenceRequest, handoff: Mapping[str, Any]) -> tuple[bytes | memoryview, bytes]:
        """Return the body of the decode leg in two parts: the client's own, without its last brace, and the handoff."""
        ...

    def release_body(self, request: InferenceRequest, handoff: Mapping[str, Any]) -> bytes:
        """Return the body of a completion that decode refuses, which makes it tell prefill to free the KV."""
        ...
