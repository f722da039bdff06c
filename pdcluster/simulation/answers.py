"""What simulated engines answer, in the shapes of vLLM's chat and completions APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from pdcluster.simulation.connection import Reply

_ERRORS = {400: "BadRequestError", 403: "ForbiddenError", 404: "NotFoundError", 500: "InternalServerError"}


def error(status: int, message: str) -> dict[str, Any]:
    """Return an error as vLLM writes it."""
    return {"error": {"message": message, "type": _ERRORS[status], "param": None, "code": status}}


@dataclass(slots=True)
class Answer:
    """One answer under way; `word` is the text of each token."""

    reply: Reply
    name: str
    chat: bool
    stream: bool
    with_usage: bool
    model: str
    created: int
    prompt_tokens: int
    output_tokens: int
    word: str = " t"
    load_format: str = ""  # in which the client asks for the engine's load in a header
    cached_tokens: int = 0
    handoff: dict[str, Any] | None = None  # what a prefill's reply carries
    made: int = 0
    begun: bool = False

    def token(self) -> None:
        """Take one more token; a stream sends it."""
        self.made += 1
        if not self.stream:
            return
        if not self.begun:
            self.begun = True
            self.reply.start()
        last = self.made >= self.output_tokens
        self.reply.event(orjson.dumps(self._chunk("length" if last else None)))
        if last and self.with_usage:
            self.reply.event(orjson.dumps({**self._head(".chunk"), "choices": [], "usage": self._usage()}))

    def done(self, headers: dict[str, str]) -> None:
        """End: a stream with [DONE], a whole answer with everything and these headers."""
        if self.stream:
            self.reply.end()
        else:
            self.reply.send(200, self._whole(), headers)

    def failed(self, message: str) -> None:
        """Answer with an error as vLLM does for what fails inside it: of a stream the 200 is out before it knows."""
        if self.stream:
            self.reply.start()
            self.reply.event(orjson.dumps(error(500, message)))
            self.reply.end()
        else:
            self.reply.send(500, error(500, message))

    def _head(self, part: str) -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if not self.chat:
            choice["text"] = self.word
        elif self.made == 1:
            choice["delta"] = {"role": "assistant", "content": self.word}
        else:
            choice["delta"] = {"content": self.word}
        return {**self._head(".chunk"), "choices": [choice]}

    def _whole(self) -> dict[str, Any]:
        text = self.word * self.output_tokens
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return {
            **self._head(""),
            "choices": [choice],
            "usage": self._usage(),
            "kv_transfer_params": self.handoff,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
