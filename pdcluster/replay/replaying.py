"""A trace against an endpoint, from beginning to end: check that it answers, drive, give the run back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import orjson
import uvloop

from pdcluster.errors import LaunchError, UserError
from pdcluster.replay.driver import Driver, Limits, Progress, Run
from pdcluster.replay.exchange import Answer, Target, ask
from pdcluster.replay.prompts import Prompts
from pdcluster.replay.trace import Arrival, Schedule

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OWN_BLOCK = -1  # no trace's: ids count from zero


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are written: the model's name, which API, whether outputs must have the trace's length.

    `whole_output` sends `ignore_eos`, which vLLM knows and others may refuse.
    """

    model: str
    api: Literal["chat", "completions"] = "chat"
    whole_output: bool = False

    @property
    def path(self) -> str:
        """The path that requests go to."""
        return _PATHS[self.api]

    def body(self, prompt: str, output_tokens: int) -> bytes:
        """Return the JSON of a request: greedy, streamed, with usage at its end."""
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.whole_output:
            fields["ignore_eos"] = True
        if self.api == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        return orjson.dumps(fields)


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a run needs besides its arrivals. `warm_up` requests go first, one by one, and do not count."""

    target: Target
    asking: Asking
    prompts: Prompts
    limits: Limits
    warm_up: int = 1

    def write(self, arrival: Arrival) -> bytes:
        """Return a request to the byte."""
        body = self.asking.body(self.prompts.text(arrival), arrival.output_tokens)
        return self.target.request(self.asking.path, body)


def run_replay(what: Replay, schedule: Schedule, say: Callable[[str], None], say_every: float = 5.0) -> Run:
    """Replay a schedule; raises `LaunchError` where the endpoint does not answer a first small request."""
    return uvloop.run(_replay(what, schedule, say, say_every))


async def _replay(what: Replay, schedule: Schedule, say: Callable[[str], None], say_every: float) -> Run:
    async def send(request: bytes, answer: Answer) -> None:
        await ask(what.target, request, answer, time.perf_counter)

    for number in range(what.warm_up):
        await _warm_up(what, number)
    total = len(schedule.arrivals)

    def tell(progress: Progress) -> None:
        say(
            f"{progress.seconds:.0f} of {schedule.seconds:.0f} s: {progress.sent} of {total} sent, "
            f"{progress.in_flight} in flight, {progress.failed} failed"
        )

    return await Driver(send, what.write, what.limits, tell, tell_every=say_every).run(schedule.arrivals)


async def _warm_up(what: Replay, number: int) -> None:
    """Ask for two tokens with a prompt of the replay's own, so that the trace finds nothing of it cached."""
    answer = Answer()
    arrival = Arrival(0.0, 64, 2, (_OWN_BLOCK - number,) * 8)
    try:
        async with asyncio.timeout(what.limits.timeout):
            await ask(what.target, what.write(arrival), answer, time.perf_counter)
    except TimeoutError:
        answer.fail("timeout", f"not over after {what.limits.timeout:g} s")
    if answer.first is None:
        answer.fail("no text")
    if answer.error:
        where = what.target.origin + what.asking.path
        raise LaunchError(f"{where}: a first, small request failed: {answer.error} {answer.detail}".rstrip())


def find_model(target: Target) -> str:
    """Return the first model that an endpoint lists; raises `UserError` that says to name one."""
    import httpx  # noqa: PLC0415 - only where the model is not named

    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    address = f"{target.origin}/v1/models"
    try:
        reply = httpx.get(address, headers=headers, timeout=10)
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{address}: does not say which model is served: {error}; give --model") from None
