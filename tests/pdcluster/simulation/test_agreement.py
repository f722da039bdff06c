"""Virtual time and the wire tell the same story of the same small scenario."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from pdcluster.replay.prompts import Prompts
from pdcluster.replay.trace import Arrival
from pdcluster.simulation.profile import EngineProfile
from pdcluster.simulation.push import RoundRobin
from pdcluster.simulation.virtual import Shape, Simulation

PROFILE = replace(EngineProfile(), prefill_tokens_per_s=10_000.0, cache_blocks=60, transfer_latency_s=0.01)
PREFILL, DECODE = 2, 2


def scenario():
    rng = random.Random(3)
    due, arrivals = 0.0, []
    for index in range(44):
        due += rng.expovariate(14.0)
        shared = rng.randrange(6)
        blocks = (*(1000 * shared + part for part in range(4)), 10_000 + index, 20_000 + index)
        arrivals.append(Arrival(due, rng.choice((2200, 2600, 3072)), rng.randrange(10, 40), blocks))
    return arrivals


async def push(client, number, arrival, prompts, begun):
    """Send one request as `RoundRobin` places it; return time to the first token, time between tokens, cached tokens."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(arrival.due - (loop.time() - begun))
    sent = loop.time()
    text = prompts.text(arrival)
    reply = await client.prefill(text, f"prefill-{number % PREFILL}")
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": arrival.output_tokens,
        "stream": True,
        "kv_transfer_params": reply["kv_transfer_params"],
    }
    times = []
    url = client.engines.urls[f"decode-{number % DECODE}"] + "/v1/chat/completions"
    async with client.http.stream("POST", url, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                assert json.loads(line[6:])["choices"][0]["delta"]["content"] == " t"
                times.append(loop.time())
    assert len(times) == arrival.output_tokens
    between = (times[-1] - times[0]) / (len(times) - 1)
    return times[0] - sent, between, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


async def on_the_wire(serving, arrivals):
    async with serving(PREFILL, DECODE, profile=PROFILE) as client:
        begun, prompts = asyncio.get_running_loop().time(), Prompts()
        return await asyncio.gather(
            *(push(client, number, arrival, prompts, begun) for number, arrival in enumerate(arrivals))
        )


def test_both_agree_within_a_tenth(serving, in_no_time):
    arrivals = scenario()
    simulation = Simulation(Shape(PREFILL, DECODE, PROFILE), RoundRobin)
    outcomes = simulation.run(arrivals)
    seen = in_no_time(on_the_wire(serving, arrivals))

    def mean(values):
        return sum(values) / len(arrivals)

    def late(values):
        return sorted(values)[int(0.9 * len(arrivals))]

    first = [outcome.ttft for outcome in outcomes]
    between = [outcome.tpot for outcome in outcomes]
    assert mean(first) > 0.15  # there were queues to agree on
    assert mean(item[0] for item in seen) == pytest.approx(mean(first), rel=0.1)
    assert late(item[0] for item in seen) == pytest.approx(late(first), rel=0.1)
    assert mean(item[1] for item in seen) == pytest.approx(mean(between), rel=0.1)
    assert sum(item[2] for item in seen) == pytest.approx(sum(outcome.cached_tokens for outcome in outcomes), rel=0.1)
