"""A real 2-prefill 2-decode cluster of the tiny model against one aggregated engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from proxy.config import EndpointConfig, Timeouts
from proxy.connectors.nixl import NixlConnector
from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient
from proxy.firewall import Authorization, headers_for_engine
from proxy.metrics import COLUMNS, Metrics
from proxy.release import Releases
from proxy.request import KINDS, InferenceRequest
from proxy.shared_counts import SharedCounts
from tests.e2e.answers import APIS, Ties, ask, body, same, token_prompt, words
from tests.e2e.conftest import eventually, metric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 128
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, KV heads, head size, float32, tokens
LENGTHS = (
    1,
    2,
    3,
    5,
    8,
    13,
    21,
    34,
    55,
    89,
    100,
    127,
    128,
    129,
    144,
    200,
    233,
    255,
    256,
    257,
    300,
    377,
    383,
    384,
    385,
    450,
)
LENGTHS += (511, 512, 513, 610, 700, 800, 900, 987, 1023, 1024, 1025, 1300, 1597, 1920, 2048, 2500, 2584, 3000)


@pytest.fixture(scope="module")
def cluster(two_by_two):
    yield two_by_two
    two_by_two.down()  # the next modules need its memory


def completion(prompt, tokens=12, **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2, **more}


def kv_usage(cluster):
    return {name: metric(url, "vllm:kv_cache_usage_perc") for name, url in cluster.engines().items()}


def test_greedy_answers_equal_the_aggregated_ones_for_prompts_of_1_to_3000_tokens(cluster, aggregated):
    assert len(LENGTHS) >= 40
    ties = Ties()
    for length in LENGTHS:
        request = completion(token_prompt(length, seed=1), tokens=8)
        expected = ask(aggregated, "completions", request)
        for stream in (False, True):
            got = ask(cluster.url, "completions", request, stream=stream)
            assert got.path == "disaggregated"
            same(expected, got, ties)
    print(f"{2 * len(LENGTHS)} answers compared, {len(ties.excused)} differing tokens excused as ties")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_api_gives_the_aggregated_answer_and_usage(cluster, aggregated, api, stream):
    ties = Ties()
    for seed, size in enumerate((3, 60, 150, 400)):
        request = body(api, words(size, seed), tokens=10)
        got = ask(cluster.url, api, request, stream=stream)
        assert got.path == "disaggregated"
        assert got.usage["output"] == 10
        same(ask(aggregated, api, request, stream=stream), got, ties)


def test_concurrent_requests_get_their_own_answers(cluster, aggregated):
    requests = [completion(token_prompt(40 + 37 * index, seed=2)) for index in range(24)]
    expected = [ask(aggregated, "completions", request) for request in requests]
    with ThreadPoolExecutor(12) as pool:
        got = list(
            pool.map(
                lambda item: ask(cluster.url, "completions", item[1], stream=item[0] % 2 == 0), enumerate(requests)
            )
        )
    ties = Ties()
    for left, right in zip(expected, got, strict=True):
        same(left, right, ties)


def test_the_bytes_that_moved_are_those_of_the_prompts_blocks(cluster):
    def moved():
        return sum(metric(url, "vllm:nixl_bytes_transferred_sum") for url in cluster.engines("decode").values())

    for length in (50, 128, 300, 1000):
        before = moved()
        ask(cluster.url, "completions", completion(token_prompt(length, seed=3), tokens=2))
        expected = -(-length // BLOCK) * BLOCK_BYTES
        assert eventually(lambda: moved() - before == expected), (length, moved() - before, expected)  # noqa: B023
    total = moved()
    assert eventually(lambda: metric(cluster.url, "pdcluster_kv_transfer_bytes_sum") == total)
    assert metric(cluster.url, "pdcluster_kv_transfer_seconds_count") > 0


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("n", {"n": 2, "temperature": 0.5, "seed": 7}),
        ("prompt_list", {"prompt": ["The pier", "A lamp"]}),
        ("echo", {"echo": True}),
    ],
)
def test_what_cannot_be_split_runs_on_decode_alone_and_is_right(cluster, aggregated, reason, more):
    request = {**completion("The harbour ledger"), **more}
    answers = [
        httpx.post(url + "/v1/completions", json=request, timeout=60, trust_env=False)
        for url in (cluster.url, aggregated)
    ]
    texts = [[choice["text"] for choice in answer.json()["choices"]] for answer in answers]
    assert answers[0].headers["x-pdcluster-path"] == f"aggregated; reason={reason}"
    assert texts[0] == texts[1]


def test_a_stop_token_that_comes_first_still_hands_over(cluster, aggregated):
    request = completion(token_prompt(200, seed=4), tokens=8, return_token_ids=True)
    reply = httpx.post(aggregated + "/v1/completions", json=request, timeout=60, trust_env=False).json()
    stopped = {**request, "stop_token_ids": [reply["choices"][0]["token_ids"][0]]}
    texts = [
        httpx.post(url + "/v1/completions", json=stopped, timeout=60, trust_env=False).json()
        for url in (aggregated, cluster.url)
    ]
    assert texts[0]["choices"][0]["finish_reason"] == texts[1]["choices"][0]["finish_reason"] == "stop"
    assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]


def test_the_body_that_ends_an_engine_is_refused_and_all_engines_live(cluster):
    deadly = {"model": "tiny", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
    for api in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        reply = cluster.client.post(api, json=deadly)
        assert reply.status_code == 400, reply.text
        assert "kv_transfer_params" in reply.text
    for url in cluster.engines().values():
        assert httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200


def test_engine_errors_come_back_as_they_are(cluster):
    unknown = cluster.client.post("/v1/completions", json={"model": "nope", "prompt": "x"})
    assert unknown.status_code == 404
    assert "nope" in unknown.json()["error"]["message"]
    long = cluster.client.post("/v1/completions", json=completion(token_prompt(5000, seed=5)))
    assert long.status_code == 400
    assert "4096" in long.json()["error"]["message"]


def test_models_and_tokenizer_answer_through_the_proxy(cluster):
    assert [model["id"] for model in cluster.client.get("/v1/models").json()["data"]] == ["tiny"]
    tokens = cluster.client.post("/tokenize", json={"model": "tiny", "prompt": "hello world"}).json()["tokens"]
    back = cluster.client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    assert back == "hello world"


async def test_kv_that_no_decode_will_fetch_is_given_back_within_2_seconds_of_a_lease_of_120(cluster):
    prefill, decode = cluster.engines("prefill")["prefill-0"], cluster.engines("decode")["decode-0"]
    request = InferenceRequest(KINDS["/v1/completions"], b"", completion(token_prompt(900, seed=5)), {})
    asked = NixlConnector().prefill_body(request)
    headers = {"content-type": "application/json", "x-request-id": "left-between-the-legs"}
    reply = httpx.post(f"{prefill}/v1/completions", content=asked, headers=headers, timeout=120).json()
    handoff = NixlConnector().handoff(reply)
    assert eventually(lambda: metric(prefill, "vllm:kv_cache_usage_perc") > 0)
    endpoint = Endpoint(EndpointConfig("decode-0", decode, "decode"), ready=True)
    client, metrics = EngineClient(Timeouts()), Metrics((endpoint,), SharedCounts(1 + COLUMNS), 1)
    releases = Releases(client, Pools((endpoint,)), metrics)
    began = time.monotonic()
    lines = headers_for_engine({b"content-type": b"application/json"}, headers["x-request-id"], Authorization())
    releases.begin(endpoint, NixlConnector().release_body(request, handoff), lines)
    await releases.finish(5)
    assert eventually(lambda: metric(prefill, "vllm:kv_cache_usage_perc") == 0, 10)
    print(f"KV given back after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 2
    assert b"pdcluster_handoffs_released_total 1.0" in metrics.render()
    client.close()


def test_everything_is_given_back_afterwards(cluster):
    assert eventually(lambda: set(kv_usage(cluster).values()) == {0.0}, 40), kv_usage(cluster)
    assert metric(cluster.url, "pdcluster_in_flight") == 0
    assert metric(cluster.url, "pdcluster_fallbacks_total") == 0
    assert metric(cluster.url, "pdcluster_handoffs_stranded_total") == 0
    for url in cluster.engines("prefill").values():
        assert metric(url, "vllm:nixl_num_kv_expired_reqs_total") == 0


def test_status_says_ready_and_logs_show_each_process(cluster):
    assert cluster.run("status").returncode == 0
    logs = cluster.run("logs", "-n", "3").stdout
    assert {line.split(" | ")[0] for line in logs.splitlines()} >= {
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "proxy",
    }


def test_an_engine_that_is_killed_comes_back_and_no_request_fails(cluster, aggregated):
    victim = cluster.record.processes["prefill-1"]
    import psutil

    psutil.Process(victim.pid).kill()
    ties = Ties()

    def back():
        request = completion(token_prompt(150, seed=6), tokens=4)
        same(ask(aggregated, "completions", request), ask(cluster.url, "completions", request), ties)
        item = cluster.record.processes["prefill-1"]
        return item.phase == "healthy" and item.pid != victim.pid

    # A request now and then: a stream of them would take the cores from the engine that is loading.
    assert eventually(back, 480, every=3.0)
    assert cluster.run("status").returncode == 0
