"""How an answer of a stand-in goes wrong, and events and bodies to play with."""

import asyncio
import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Fault:
    """How one answer goes wrong; what isn't set is normal. Holds and gates are events that a test sets."""

    # Before the headers.
    hold: asyncio.Event | None = None  # wait for it before answering (or, with a pause, at the pause)
    delay: float = 0.0  # seconds
    close_before_headers: bool = False
    reset: bool = False  # where the connection breaks, break it with a RST
    interim: bytes = b""  # sent before the answer: 100 Continue, 103 Early Hints
    raw: bytes | None = None  # sent instead of any answer; then the connection closes

    # The answer.
    status: int = 200
    body: bytes | None = None  # instead of the normal answer
    headers: dict = field(default_factory=dict)
    handoff: object = "normal"  # what kv_transfer_params of a prefill's reply is; a callable is given the normal one
    gzip: bool = False  # compress whatever is sent, though nobody asked

    # How a whole answer is framed.
    cut_body: bool = False  # announce more than is sent, and close
    length_off: int = 0  # announce so many bytes more (and close), or fewer, than are sent
    until_close: bool = False  # no length at all: the connection's end ends it
    chunked: bool = False
    trailing: bytes = b""  # sent after a complete answer
    pause_in_body: int | None = None  # wait for `hold` after so many bytes of the body
    byte_by_byte: bool = False

    # How a stream runs.
    events: Iterable[bytes] | None = None  # instead of the normal events; may be a generator
    close_after: int | None = None  # break the connection after so many events
    end_after: int | None = None  # end in order after so many events
    pause_after: int | None = None  # wait for `hold` after so many events
    gates: list | None = None  # an event for each of the first chunks: it isn't sent before its gate is set
    chunk_delay: float = 0.0  # seconds before each chunk

    async def before(self):
        """Wait as told before anything is sent."""
        if self.hold and self.pause_after is None and self.pause_in_body is None:
            await self.hold.wait()
        if self.delay:
            await asyncio.sleep(self.delay)

    async def before_chunk(self, index):
        """Wait as told before one chunk of a stream."""
        if index == self.pause_after:
            await self.hold.wait()
        if self.gates and index < len(self.gates):
            await self.gates[index].wait()
        if self.chunk_delay:
            await asyncio.sleep(self.chunk_delay)

    def handed_off(self, normal):
        """Return the kv_transfer_params of a prefill's reply."""
        if self.handoff == "normal":
            return normal
        return self.handoff(normal) if isinstance(self.handoff, Callable) else self.handoff


NAN_REPLY = b'{"choices":[{"logprobs":{"token_logprobs":[NaN,-Infinity]}}],"kv_transfer_params": null}'


def normal_events(path, tokens):
    """Return the events of a complete stream, in the API's own form."""
    if path == "/v1/responses":
        steps = [
            "response.created",
            "response.in_progress",
            *["response.output_text.delta"] * tokens,
            "response.completed",
        ]
        return [f'event: {step}\ndata: {{"type":"{step}","kv_transfer_params":null}}\n\n'.encode() for step in steps]
    if path == "/v1/messages":
        steps = ["message_start", *["content_block_delta"] * tokens, "message_stop"]
        return [f'event: {step}\ndata: {{"type":"{step}"}}\n\n'.encode() for step in steps]
    first = [b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'] if "chat" in path else []
    return [*first, *[b'data: {"choices":[{"delta":{"content":"tok"}}]}\n\n'] * tokens, b"data: [DONE]\n\n"]


def crlf(events):
    """Return events with the other line end that the standard allows."""
    return [event.replace(b"\n", b"\r\n") for event in events]


def with_comments(events):
    """Return events with a keep-alive comment before each."""
    return [part for event in events for part in (b": keep-alive\n\n", event)]


def many_lines(event):
    """Return an event whose JSON goes over several data: lines."""
    return event.replace(b',"', b',\ndata: "').replace(b"{", b"{\ndata: ", 1)


def token(text):
    """Return one chat event."""
    return b'data: {"choices":[{"delta":{"content":"' + text.encode() + b'"}}]}\n\n'


def compressed(body):
    """Return a body compressed and the header that says so."""
    return gzip.compress(body), {"content-encoding": "gzip"}
