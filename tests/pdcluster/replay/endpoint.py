"""A server on a port of its own that answers every request with bytes of the test's choosing."""

import asyncio
import json
from contextlib import asynccontextmanager

from pdcluster.bench.http import split_message
from pdcluster.replay.exchange import parse_target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def event(text="word ", **more):
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more}).encode() + b"\n\n"


def usage(tokens, prompt=100, cached=None):
    told = {"completion_tokens": tokens, "prompt_tokens": prompt}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events, done=DONE):
    return HEAD + b"".join(map(chunk, [*events, done] if done else events)) + END


def plain(status, body=b"{}"):
    return b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Endpoint:
    """Requests that came, as (head, JSON); `answer(number)` gives the pieces of the answer, None for silence."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.target = None
        self.hung_up = asyncio.Event()

    async def serve(self, reader, writer):
        data = b""
        while (message := split_message(data)) is None:
            data += await reader.read(1 << 16)
        number = len(self.requests)
        self.requests.append((message[0].decode(), json.loads(message[1])))
        for piece in self.answer(number) or ():
            writer.write(piece)
            await writer.drain()
        if self.answer(number) is None:
            await reader.read()
            self.hung_up.set()
        writer.close()


@asynccontextmanager
async def endpoint(answer):
    served = Endpoint(answer)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "secret")
    try:
        yield served
    finally:
        server.close()
