"""Every error that a client can get from the proxy itself, and its JSON in the shape of the API that was called.

    ProxyError
    ├── BadRequestError          400   the body or a field is wrong; nothing was sent to an engine
    ├── UnauthorizedError        401   no API key, or one that isn't known
    ├── NotFoundError            404   no such route
    ├── MethodNotAllowedError    405   the route exists, the method doesn't
    ├── SlowClientError          408   headers or body came too slowly
    ├── BodyTooLargeError        413   over --max-body-mb
    ├── RateLimitedError         429   the API key's requests or tokens a minute are spent
    ├── HeadersTooLargeError     431   over the limit of headers
    ├── NotSupportedError        501   a known route that cannot be served here, with the reason
    ├── EngineFailedError        502   an engine broke off or answered nonsense
    ├── NoEndpointError          503   no engine can take the request now
    └── EngineTimeoutError       504   an engine was silent for too long; names the leg

An engine's own error answer is no ProxyError: it goes to the client as the engine wrote it.
"""

from __future__ import annotations

import math
from typing import Any

STOPPED = "the router was stopped before the answer was complete"


class ProxyError(Exception):
    """An answer that is an error; `status` is HTTP's, `kind` OpenAI's `error.type`."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.headers = headers or {}


class BadRequestError(ProxyError):
    """The body or a field of it is wrong."""

    status = 400
    kind = "invalid_request_error"


class UnauthorizedError(ProxyError):
    """No API key, or one that isn't known."""

    status = 401
    kind = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class NotFoundError(ProxyError):
    """There is no such route."""

    status = 404
    kind = "invalid_request_error"


class MethodNotAllowedError(ProxyError):
    """The route has other methods."""

    status = 405
    kind = "invalid_request_error"


class SlowClientError(ProxyError):
    """Headers or body came too slowly."""

    status = 408
    kind = "timeout_error"


class BodyTooLargeError(ProxyError):
    """The body is over the limit."""

    status = 413
    kind = "invalid_request_error"


class RateLimitedError(ProxyError):
    """The API key's requests or tokens a minute are spent; `seconds` until a retry can succeed."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, seconds: float | None) -> None:
        headers = {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}
        super().__init__(message, code="rate_limit_exceeded", headers=headers)


class OverloadedError(ProxyError):
    """More requests wait than can be served in time; `seconds` until those that wait now have been."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, code="overloaded", headers={"retry-after": str(max(1, math.ceil(seconds)))})


class QueueTimeoutError(ProxyError):
    """No engine was free within the time that a request may wait."""

    status = 408
    kind = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="queue_timeout")


class HeadersTooLargeError(ProxyError):
    """The headers are over the limit."""

    status = 431
    kind = "invalid_request_error"


class NotSupportedError(ProxyError):
    """A known route that cannot be served with prefill and decode apart."""

    status = 501
    kind = "not_supported_error"


class EngineFailedError(ProxyError):
    """An engine broke off, refused the connection, or answered what it must not."""

    status = 502
    kind = "upstream_error"

    def __init__(self, message: str, *, said: str = "", refused: bool = False, counts: bool = True) -> None:
        super().__init__(f"{message}: {said}" if said else message, code="engine_failed")
        self.summary = message  # for logs and /ready: what an engine said may repeat a prompt
        self.refused = refused  # nobody listens there: the endpoint is out at once
        self.counts = counts  # against the endpoint's health; overload and our own limits don't


class NoEndpointError(ProxyError):
    """No engine can take the request now."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="no_endpoint", headers={"retry-after": "2"})


class EngineTimeoutError(EngineFailedError):
    """An engine was silent for too long."""

    status = 504
    kind = "timeout_error"


_ANTHROPIC_KIND = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ProxyError, *, anthropic: bool) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's or Anthropic's shape."""
    if anthropic:
        kind = _ANTHROPIC_KIND.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.code or error.status}}
