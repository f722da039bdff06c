"""The flags of `pdcluster proxy`: one line each. Values only; `cli` makes a configuration of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer


class _Flag(NamedTuple):
    kind: Any
    default: Any
    help: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - read only


def _seconds(default: float, text: str) -> _Flag:
    return _Flag(float, default, text, {"min": 0.0})


def _many(text: str, metavar: str) -> _Flag:
    return _Flag(list[str] | None, None, text, {"metavar": metavar, "show_default": False})


def _path(text: str) -> _Flag:
    return _Flag(str | None, None, text, {"metavar": "FILE", "show_default": False})


_POSITIVE = {"min": 1}
_PORT = {"min": 1, "max": 65535}
_LATER = {"min": 0.1}

FLAGS: dict[str, _Flag] = {
    "prefill": _many("A prefill engine.", "[NAME=]URL"),
    "decode": _many("A decode engine.", "[NAME=]URL"),
    "host": _Flag(str, "127.0.0.1", "Address to listen on."),
    "port": _Flag(int, 8000, "Port to listen on.", _PORT),
    "workers": _Flag(int, 1, "Processes that share the port.", {"min": 1, "max": 256}),
    "admin_port": _Flag(int, 0, "Port for metrics and state without a key; 0 is none.", {"min": 0, "max": 65535}),
    "admin_host": _Flag(str, "127.0.0.1", "Address of the admin port."),
    "exclude_pair": _many("Names that must not serve together.", "PREFILL:DECODE"),
    "connector": _Flag(str, "nixl", "How KV moves: nixl."),
    "kv_events": _many(
        "Follow an engine's KV events: where it publishes and replays, once a rank; auto asks it (alone: all engines).",
        "auto|NAME=auto|NAME=ADDRESS[,REPLAY]",
    ),
    "fallback": _Flag(str, "decode", "Without a usable prefill: decode serves alone, or none (503)."),
    "ttft_ms": _Flag(float, 500.0, "When a first token is wanted; the most urgent goes first.", {"min": 1.0}),
    "ttft_per_token_ms": _Flag(float, 0.25, "And this more for each prompt token beyond 2,000.", {"min": 0.0}),
    "tpot_ms": _Flag(float, 30.0, "Wanted time between a stream's tokens.", {"min": 0.1}),
    "queue_size": _Flag(int, 4096, "Requests that may wait for an engine, in each worker.", _POSITIVE),
    "queue_timeout": _Flag(float, 600.0, "Seconds that a request may wait for an engine.", _LATER),
    "prefix_cache_tokens": _Flag(int, 500_000, "Tokens that a prefill engine's prefix cache holds.", _POSITIVE),
    "decode_seats": _Flag(
        int | None, None, "Sequences that a decode engine runs at once (max_num_seqs); more wait here.", _POSITIVE
    ),
    "api_key_file": _path("Clients' keys in YAML, one `name: key` a line; or set PDCLUSTER_API_KEYS."),
    "requests_per_minute": _Flag(int | None, None, "For each key without a limit of its own.", _POSITIVE),
    "tokens_per_minute": _Flag(int | None, None, "For each key without a limit of its own.", _POSITIVE),
    "tls_certificate": _path("Serve HTTPS with this certificate (PEM, chain included)."),
    "tls_key": _path("The certificate's private key (PEM)."),
    "tls_client_ca": _path("Let in only clients with a certificate of this CA."),
    "cors_origin": _many("Let browsers of this origin in.", "ORIGIN"),
    "max_body_mb": _Flag(int, 64, "Largest request body in MiB.", _POSITIVE),
    "max_header_kb": _Flag(int, 64, "Largest request head in KiB.", _POSITIVE),
    "client_head_timeout": _Flag(float, 10.0, "Seconds for a client to send its headers.", _LATER),
    "client_body_timeout": _Flag(float, 20.0, "Seconds over which a body must come at 1 KiB/s at least.", _LATER),
    "client_write_timeout": _Flag(float, 300.0, "Seconds that a client may leave its answer unread.", _LATER),
    "connect_timeout": _Flag(float, 5.0, "Seconds to connect to an engine.", _LATER),
    "prefill_timeout": _seconds(3600.0, "Seconds for a prefill; 0 is no limit."),
    "header_timeout": _seconds(3600.0, "Seconds to decode's first event; 0 is no limit."),
    "idle_timeout": _seconds(300.0, "Seconds between a stream's pieces; 0 is no limit."),
    "total_timeout": _seconds(0.0, "Seconds for a whole request; 0 is no limit."),
    "lease_seconds": _Flag(
        float, 30.0, "How long prefill engines keep the KV of a handoff (kv_lease_duration).", _LATER
    ),
    "health_interval": _Flag(float, 2.0, "Seconds between health probes.", _LATER),
    "shutdown_grace": _seconds(30.0, "Seconds for streams to end at a stop."),
    "check": _Flag(bool, False, "Check flags and files, and end."),
    "log_level": _Flag(str, "info", "debug, info, warning or error."),
}


def takes_flags(verb: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Give a command all flags; it gets their values by name."""

    def run(**values: Any) -> None:
        verb(values)

    run.__doc__ = verb.__doc__
    run.__name__ = verb.__name__
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            name,
            keyword,
            default=flag.default,
            annotation=Annotated[
                flag.kind, typer.Option("--" + name.replace("_", "-"), help=flag.help, **flag.settings)
            ],
        )
        for name, flag in FLAGS.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # read by typer
    return run
