"""What the proxy's exact index predicts against what real engines report, over replayed requests."""

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import orjson
import pytest

from proxy.config import EndpointConfig, Timeouts
from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient, EngineRequest
from proxy.exchange import Limit
from proxy.firewall import Authorization, headers_for_engine
from proxy.kv_events.following import Followed, KvEvents
from proxy.request import KINDS, InferenceRequest
from proxy.scheduling.block_index import BlockIndex, Publisher
from proxy.tokens import Tokenizer, Tokenizing
from tests.e2e.answers import words
from tests.e2e.conftest import metric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl.gz"
HEADERS = headers_for_engine({b"content-type": b"application/json"}, "cached-prefixes", Authorization())
REQUESTS = 100
MOST_BLOCKS = 14  # of a request, so that 4,096 tokens suffice


@pytest.fixture(scope="module")
def cluster(two_by_two):
    return two_by_two


def conversations():
    """Many conversations at once, each with one of a few long beginnings, and growing turn by turn."""
    rng = random.Random(4)
    running = [[1000 + rng.randrange(4)] for _ in range(25)]
    for turn in range(REQUESTS):
        one = rng.choice(running)
        yield list(one)
        one.append(turn)
        if len(one) > MOST_BLOCKS:
            one[1:] = []


def trace():
    """Requests of a production trace from its 600th second on, of those conversations that come at least three times."""
    if not TRACE.exists():
        pytest.skip(f"{TRACE} is not there")
    with gzip.open(TRACE, "rt") as lines:
        requests = [json.loads(line) for line in lines]
    late = [item["hash_ids"][:MOST_BLOCKS] for item in requests if item["timestamp"] >= 600_000]
    times = Counter(ids[1] for ids in late if len(ids) > 1)
    return [ids for ids in late if len(ids) > 1 and times[ids[1]] > 2][: REQUESTS // 2]


def request(number, ids):
    """Turn block ids into a request of one of the APIs; the same ids always into the same text."""
    conversation = ids[:2][-1]
    api = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "ids")[conversation % 4]
    texts = [words(120, seed=item) for item in ids]
    common = {"model": "tiny", "temperature": 0}
    if conversation % 3 == 0:
        common["cache_salt"] = "a tenant's"
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    turns[-1]["role"] = "user"
    match api:
        case "/v1/completions":
            return api, {**common, "prompt": " ".join(texts), "max_tokens": 4}
        case "/v1/chat/completions":
            return api, {**common, "messages": turns, "max_tokens": 4, "stream": False}
        case "/v1/responses":
            return api, {
                **common,
                "instructions": texts[0],
                "input": " ".join(texts[1:]) or "go on",
                "max_output_tokens": 4,
            }
    prompt = [token for item in ids for token in random.Random(item).choices(range(100, 40_000), k=150)]
    return "/v1/completions", {**common, "prompt": prompt, "max_tokens": 1 + number % 9}


def reported(reply):
    usage = reply["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or 0


class Watched:
    """A prefill engine, the index that follows it, and the tokens it gives."""

    def __init__(self, url):
        self.endpoint = Endpoint(EndpointConfig("prefill-0", url, "prefill"), state="ready", ready=True)
        self.client = EngineClient(Timeouts())
        followed = Followed([self.endpoint], {"prefill-0": ()})
        self.events = KvEvents(followed, BlockIndex(), self.client, HEADERS, time.monotonic)
        self.results = []
        limits = Tokenizing(answer=60.0)
        pools = Pools((self.endpoint,))
        self.tokenizer = Tokenizer(pools, self.client, lambda _: HEADERS, time.monotonic, self.results.append, limits)

    async def predict(self, route, fields):
        raw = orjson.dumps(fields)
        tokens = await self.tokenizer.of(InferenceRequest(KINDS[route], raw, fields, {}))
        assert tokens is not None, self.results[-1]
        found = self.events.index.cached(tokens.packed, salt=fields.get("cache_salt"))
        return len(tokens), found.get(Publisher(0), 0)

    async def ask(self, route, fields):
        asked = EngineRequest(route, orjson.dumps(fields), HEADERS)
        reply = await self.client.call(self.endpoint, asked, leg="test", limit=Limit(120.0))
        assert reply.status == 200, reply.body
        return orjson.loads(reply.body)

    async def caught_up(self):
        """Wait until what the last request stored is known: it is published as the answer is sent."""
        while not self.events.exact(Publisher(0)):
            await asyncio.sleep(0.02)
        before = -1
        while before != (before := self.events.progress()[Publisher(0)].batches):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def watched(url):
    made = Watched(url)
    following = asyncio.create_task(made.events.run())
    try:
        yield made
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        made.client.close()


async def replay(url, blocks):
    """Replay requests one by one; return (tokens, predicted, reported) for each, and the index's last word."""
    seen = []
    async with asyncio.timeout(600), watched(url) as engine:
        for number, ids in enumerate(blocks):
            route, fields = request(number, ids)
            await engine.caught_up()
            count, predicted = await engine.predict(route, fields)
            reply = await engine.ask(route, fields)
            assert reply["usage"].get("prompt_tokens", reply["usage"].get("input_tokens")) == count
            seen.append((count, predicted, reported(reply)))
        await engine.caught_up()
        assert set(engine.results) <= {"rendered", "given", "kept"}
        progress = engine.events.progress()[Publisher(0)]
        assert (progress.gaps, progress.restarts, progress.garbage) == (0, 0, 0)
        assert engine.events.index.orphans == engine.events.index.refused == 0
    return seen


@pytest.mark.parametrize("blocks", [conversations, trace])
def test_the_predicted_cached_tokens_are_those_that_the_engine_reports(cluster, blocks):
    url = cluster.engines("prefill")["prefill-0"]
    seen = asyncio.run(replay(url, blocks()))
    right = sum(predicted == engine for _, predicted, engine in seen)
    total, cached = sum(count for count, _, _ in seen), sum(engine for _, _, engine in seen)
    print(f"\n{blocks.__name__}: {right} of {len(seen)} right; {cached} of {total} prompt tokens were cached")
    assert cached > total / 20
    assert right >= 0.95 * len(seen), [item for item in seen if item[1] != item[2]]


def test_the_proxy_of_a_launched_cluster_follows_its_engines(cluster):
    batches = {}
    for name, url in cluster.engines("prefill").items():
        for figure in ("current", "complete"):
            assert metric(cluster.url, f"pdcluster_kv_events_{figure}", endpoint=name) == 1
        batches[name] = metric(cluster.url, "pdcluster_kv_events_batches_total", endpoint=name)
        fields = {"model": "tiny", "prompt": words(400, seed=77_777), "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=fields, timeout=60, trust_env=False).status_code == 200
    deadline = time.monotonic() + 10
    while any(
        metric(cluster.url, "pdcluster_kv_events_batches_total", endpoint=name) <= before
        for name, before in batches.items()
    ):
        assert time.monotonic() < deadline, batches
        time.sleep(0.1)
