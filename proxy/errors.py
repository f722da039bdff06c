"""Every error that a client can get from the proxy itself, and its JSON in the shape of the API that was called.

    ProxyError
    ├── BadRequestError          400   the body or a field is wrong; nothing was sent to an engine
    ├── NotFoundError            404   no such route
    ├── MethodNotAllowedError    405   the route exists, the method doesn't
    ├── BodyTooLargeError        413   over --max-body-mb
    ├── NotSupportedError        501   a known route that cannot be served here, with the reason
    ├── EngineFailedError        502   an engine broke off or answered nonsense
    ├── NoEndpointError          503   no engine can take the request now
    └── EngineTimeoutError       504   an engine was silent for too long; names the leg

An engine's own error answer is no ProxyError: it goes to the client as the engine wrote it.
"""

from __future__ import annotations

from typing import Any


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


class NotFoundError(ProxyError):
    """There is no such route."""

    status = 404
    kind = "invalid_request_error"


class MethodNotAllowedError(ProxyError):
    """The route has other methods."""

    status = 405
    kind = "invalid_request_error"


class BodyTooLargeError(ProxyError):
    """The body is over the limit."""

    status = 413
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
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ProxyError, *, anthropic: bool) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's or Anthropic's shape."""
    if anthropic:
        kind = _ANTHROPIC_KIND.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.code or error.status}}
