"""`pdcluster proxy`: flags -> ProxyConfig -> a running server. Heavy imports wait until there is something to run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from proxy.config import EndpointConfig, ProxyConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_MIB = 1 << 20
_EPILOG = """\b
Examples:
  pdcluster proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8100
  pdcluster proxy --prefill p0=http://10.0.0.1:8100 --decode d0=http://10.0.0.2:8100 --port 8080
The engines' key, where they have one, is read from PDCLUSTER_ENGINE_API_KEY."""


class UsageError(Exception):
    """What the user gave cannot be used; the message says what, where and what to do."""


@app.command(epilog=_EPILOG)
def proxy(  # noqa: PLR0913, PLR0917 - one parameter a flag
    prefill: Annotated[
        list[str] | None, typer.Option("--prefill", metavar="[NAME=]URL", help="A prefill engine.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option("--decode", metavar="[NAME=]URL", help="A decode engine.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    exclude_pair: Annotated[
        list[str] | None, typer.Option(metavar="PREFILL:DECODE", help="Names that must not serve together.")
    ] = None,
    connector: Annotated[str, typer.Option(help="How KV moves: nixl.")] = "nixl",
    fallback: Annotated[
        str, typer.Option(help="Without a usable prefill: decode serves alone, or none (503).")
    ] = "decode",
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body in MiB.")] = 64,
    connect_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to connect to an engine.")] = 5.0,
    prefill_timeout: Annotated[float, typer.Option(min=0, help="Seconds for a prefill; 0 is no limit.")] = 3600.0,
    header_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to decode's first event; 0 is no limit.")
    ] = 3600.0,
    idle_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds between a stream's pieces; 0 is no limit.")
    ] = 300.0,
    total_timeout: Annotated[float, typer.Option(min=0, help="Seconds for a whole request; 0 is no limit.")] = 0.0,
    lease_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long prefill engines keep the KV of a handoff (kv_lease_duration).")
    ] = 30.0,
    health_interval: Annotated[float, typer.Option(min=0.1, help="Seconds between health probes.")] = 2.0,
    shutdown_grace: Annotated[float, typer.Option(min=0, help="Seconds for streams to end at a stop.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Put one OpenAI-compatible endpoint in front of prefill and decode engines of vLLM."""
    from proxy.config import ClientLimits, ProxyConfig, Timeouts

    names = _endpoints(prefill or [], "prefill") + _endpoints(decode or [], "decode")
    _check(names, connector, fallback, log_level)
    config = ProxyConfig(
        endpoints=tuple(names),
        excluded_pairs=frozenset(_pair(text, names) for text in exclude_pair or []),
        connector=connector,
        fallback="none" if fallback == "none" else "decode",
        limits=ClientLimits(body_bytes=max_body_mb * _MIB),
        timeouts=Timeouts(
            connect=connect_timeout,
            prefill=prefill_timeout or None,
            headers=header_timeout or None,
            idle=idle_timeout or None,
            total=total_timeout or None,
        ),
        lease_seconds=lease_seconds,
        health_interval=health_interval,
        engine_api_key=os.environ.get("PDCLUSTER_ENGINE_API_KEY") or None,
    )
    _serve(config, _listen(host, port), shutdown_grace, log_level)


def main() -> NoReturn:
    """Run the command; a user's mistake is one line and exit code 2."""
    try:
        app(prog_name="pdcluster proxy")
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _endpoints(given: list[str], role: Literal["prefill", "decode"]) -> list[EndpointConfig]:
    from proxy.config import EndpointConfig

    found = []
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or "/" in name:
            name, url = "", text
        parts = urlsplit(url)
        try:
            known_port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            known_port = 0
        known = parts.scheme in ("http", "https") and parts.hostname and known_port
        if not known or parts.query or parts.fragment or parts.username:
            raise UsageError(
                f"--{role} {text}: not a URL; give one such as http://10.0.0.1:8100, with NAME= before it or not"
            )
        found.append(EndpointConfig(name or f"{parts.hostname}:{known_port}", url.rstrip("/"), role))
    return found


def _check(endpoints: list[EndpointConfig], connector: str, fallback: str, log_level: str) -> None:
    from proxy.connectors import CONNECTORS

    if not any(endpoint.role == "decode" for endpoint in endpoints):
        raise UsageError("--decode: at least one decode engine is needed, such as --decode http://10.0.0.2:8100")
    if fallback not in ("decode", "none"):
        raise UsageError(f"--fallback {fallback}: must be decode or none")
    if fallback == "none" and not any(endpoint.role == "prefill" for endpoint in endpoints):
        raise UsageError("--fallback none: without a prefill engine nothing could be served; give --prefill")
    if connector not in CONNECTORS:
        raise UsageError(f"--connector {connector}: unknown; there is: {', '.join(CONNECTORS)}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise UsageError(f"--log-level {log_level}: must be debug, info, warning or error")
    for key in ("name", "url"):
        values = [getattr(endpoint, key) for endpoint in endpoints]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"{twice}: two endpoints have this {key}; each needs its own")


def _pair(text: str, endpoints: list[EndpointConfig]) -> tuple[str, str]:
    """Parse PREFILL:DECODE; names may hold colons, so every cut is tried."""
    names = {role: {item.name for item in endpoints if item.role == role} for role in ("prefill", "decode")}
    for index, character in enumerate(text):
        if character == ":" and text[:index] in names["prefill"] and text[index + 1 :] in names["decode"]:
            return text[:index], text[index + 1 :]
    known = f"prefill {sorted(names['prefill'])}, decode {sorted(names['decode'])}"
    raise UsageError(f"--exclude-pair {text}: must be PREFILL:DECODE of these names: {known}")


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else starts, so that a taken port is one clear line."""
    import socket

    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there: {reason}; choose another --port"
        ) from error
    return listener


def _allow_many_files() -> None:
    """Use all the open files that this user may have: a streamed request takes up to three connections."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _spare_collector() -> None:
    """Keep what lives as long as the process out of collections, and make these rarer: they stop every stream."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _serve(config: ProxyConfig, listener: socket.socket, grace: float, log_level: str) -> None:
    import logging
    import signal

    import uvicorn

    from proxy.app import create_app
    from proxy.client_protocol import protocol_class

    class Server(uvicorn.Server):
        """Ends at once at the second signal, whichever it is."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.force_exit or self.should_exit
            super().handle_exit(sig, frame)

    _allow_many_files()
    # uvicorn raises the signal again once it has stopped in order; that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _spare_collector()
    server = Server(
        uvicorn.Config(
            create_app(config),
            http=protocol_class(config.limits),
            loop="uvloop",
            log_level=log_level,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=True,
            timeout_graceful_shutdown=max(1, round(grace)),
            backlog=4096,
        )
    )
    server.run(sockets=[listener])
