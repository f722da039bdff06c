"""API keys, their limits, and what engines and browsers are told."""

import asyncio
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api_keys import ApiKey, KeyFileError, load_key_file, parse_key_list, presented_key
from proxy.rate_limits import COLUMNS_PER_KEY, RateLimits
from proxy.shared_counts import SharedCounts

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-a-secret-of-team-a"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(
    ("headers", "words"),
    [({}, "an API key is needed"), (bearer("sk-wrong-key"), "not known"), ({"authorization": "Basic eDp5"}, "needed")],
    ids=["none", "unknown", "other scheme"],
)
async def test_without_a_known_key_a_request_is_401_and_its_body_is_not_read(make_rig, route, headers, words):
    rig = await make_rig(api_keys=parse_key_list(f"a={KEY}"))
    reply = await rig.client.post(route, json=BODY, headers=headers)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert words in reply.json()["error"]["message"]
    assert rig.prefills[0].requests == rig.decodes[0].requests == []


@pytest.mark.parametrize("header", [bearer(KEY), {"x-api-key": KEY}], ids=["bearer", "anthropic"])
async def test_a_known_key_passes_and_reaches_no_engine(make_rig, header):
    rig = await make_rig(api_keys=parse_key_list(f"a={KEY},b=sk-b-secret"))
    assert (await rig.client.post(CHAT, json=BODY, headers=header)).status_code == 200
    assert (await rig.client.get("/v1/models", headers=header)).status_code == 200
    for engine in rig.prefills + rig.decodes:
        assert all(KEY not in str(seen.headers) for seen in engine.requests)


async def test_what_needs_no_key_and_what_does(make_rig):
    rig = await make_rig(wait=False, api_keys=parse_key_list(f"a={KEY}"))
    for path, status in {"/health": 200, "/ready": None, "/v1/models": 401, "/metrics": 401, "/version": 401}.items():
        reply = await rig.client.get(path)
        assert reply.status_code != 401 if status is None else reply.status_code == status, path
    text = (await rig.client.get("/metrics", headers=bearer(KEY))).text
    assert 'pdcluster_refusals_total{reason="no_key"}' in text
    assert KEY not in text


async def test_the_engines_own_key_is_sent_on_both_legs_on_probes_and_on_scrapes(make_rig):
    rig = await make_rig(api_keys=parse_key_list(f"a={KEY}"), engine_api_key="sk-engine")
    await rig.client.post(CHAT, json=BODY, headers=bearer(KEY))
    await rig.client.get("/v1/models", headers=bearer(KEY))
    await rig.client.get("/metrics", headers=bearer(KEY))
    for engine in rig.prefills + rig.decodes:
        assert {seen.headers.get("authorization") for seen in engine.requests + engine.probes} == {"Bearer sk-engine"}


async def test_a_spent_limit_is_429_with_a_truthful_retry_after(make_rig):
    rig = await make_rig(api_keys=parse_key_list(f"a={KEY},b=sk-b-secret", requests=3))
    replies = [await rig.client.post(CHAT, json=BODY, headers=bearer(KEY)) for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 120
    assert replies[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert (await rig.client.post(CHAT, json=BODY, headers=bearer("sk-b-secret"))).status_code == 200
    text = (await rig.client.get("/metrics", headers=bearer("sk-b-secret"))).text
    assert 'pdcluster_refusals_total{reason="requests_per_minute"} 2.0' in text


async def test_tokens_that_were_really_used_are_counted(make_rig):
    rig = await make_rig(api_keys=parse_key_list(f"a={KEY}", tokens=200))
    rig.decodes[0].tokens = 300
    stream = {**BODY, "stream": True}
    assert (await rig.client.post(CHAT, json=stream, headers=bearer(KEY))).status_code == 200
    await asyncio.sleep(0)
    assert (await rig.client.post(CHAT, json=BODY, headers=bearer(KEY))).status_code == 429
    big = {**BODY, "messages": [{"role": "user", "content": "x" * 5000}]}
    reply = await rig.client.post(CHAT, json=big, headers=bearer(KEY))
    assert (reply.status_code, "retry-after" in reply.headers) == (429, False)


async def test_browsers_of_other_origins_are_let_in_only_where_that_was_asked_for(make_rig):
    origin = {"origin": "https://chat.example"}
    closed = await make_rig()
    opened = await make_rig(cors_origins=("https://chat.example",))
    for rig, expected in ((closed, None), (opened, "https://chat.example")):
        for body in (BODY, {**BODY, "stream": True}):
            reply = await rig.client.post(CHAT, json=body, headers=origin)
            assert reply.status_code == 200
            assert reply.headers.get("access-control-allow-origin") == expected
    preflight = await opened.client.options(CHAT, headers={**origin, "access-control-request-method": "POST"})
    assert preflight.status_code == 200
    rig.decodes[0].faults = []
    other = await opened.client.post(CHAT, json=BODY, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping"),
        ("- a", "must be a mapping"),
        ("a: {key: sk-long-enough, rpm: 3}", "unknown field rpm"),
        ("a: short", "at least 8"),
        ("a: 12345678", "quote it"),
        ("a: 'with a space'", "without spaces"),
        ("a b: sk-long-enough", "a name has letters"),
        ("a: sk-long-enough\nb: sk-long-enough", "under two names"),
        ("a: {key: sk-long-enough, requests_per_minute: 0}", "whole number from 1"),
        ("a: [", "is not YAML in line"),
    ],
)
def test_a_bad_key_file_is_refused_in_words_that_show_no_key(tmp_path, text, words):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=words) as caught:
        load_key_file(path)
    assert str(path) in str(caught.value)
    assert "long-enough" not in str(caught.value)


def test_a_key_file_that_others_can_read_is_warned_about(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"a: {KEY}\nb: {{key: sk-b-secret, tokens_per_minute: 5}}\n")
    path.chmod(0o644)
    keys, warnings = load_key_file(path, requests=7)
    assert "chmod 600" in warnings[0]
    found = keys.find(b"sk-b-secret")
    assert (found.name, found.requests_per_minute, found.tokens_per_minute) == ("b", 7, 5)
    path.chmod(0o600)
    assert load_key_file(path)[1] == []


@pytest.mark.parametrize(
    "text", ["", " , ", "a=short", "a=sk-long-enough,a=sk-long-other", "a=sk-long-enough,sk-long-enough"]
)
def test_bad_keys_in_the_environment_are_refused_without_showing_them(text):
    with pytest.raises(KeyFileError, match="PDCLUSTER_API_KEYS") as caught:
        parse_key_list(text)
    assert "long" not in str(caught.value)


def test_a_key_without_a_name_gets_one_and_nothing_shows_keys():
    keys = parse_key_list(f"{KEY}, b=sk-b-secret")
    assert [key.name for key in keys] == ["key-1", "b"]
    assert KEY not in repr(list(keys))
    assert keys.find(KEY.encode() + b"x") is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"bearer  abc "}, b"abc"),
        ({b"authorization": b"Bearer"}, None),
        ({b"x-api-key": b"abc"}, b"abc"),
        ({b"authorization": b"Basic abc", b"x-api-key": b"d"}, b"d"),
    ],
)
def test_a_key_is_taken_from_either_header(headers, key):
    assert presented_key(headers) == key


def limited(requests=None, tokens=None):
    now = [1_000_000.0]
    key = ApiKey("a", 0, b"", requests, tokens)
    return key, RateLimits(SharedCounts(COLUMNS_PER_KEY), 0, lambda: now[0]), now


@given(st.integers(1, 20), st.lists(st.floats(0, 50), max_size=60))
def test_no_more_pass_than_the_limit_and_a_retry_at_the_promised_time_succeeds(limit, pauses):
    key, limits, now = limited(requests=limit)
    admitted = []
    for pause in pauses:
        now[0] += pause
        refusal = limits.admit(key, 1)
        if refusal is None:
            admitted.append(now[0])
            continue
        assert 0 < refusal.seconds <= 120
        now[0] += refusal.seconds + 1e-3
        assert limits.admit(key, 1) is None
        admitted.append(now[0])
    for minute in {int(moment // 60) for moment in admitted}:
        assert sum(int(moment // 60) == minute for moment in admitted) <= limit


def test_tokens_are_corrected_both_ways_and_what_never_fits_is_told_apart():
    key, limits, now = limited(tokens=100)
    assert limits.admit(key, 60) is None
    assert limits.admit(key, 60).seconds > 0
    limits.correct(key, -50, now[0])
    assert limits.admit(key, 60) is None
    limits.correct(key, 100, now[0])
    assert limits.admit(key, 1).limit == "tokens_per_minute"
    assert limits.admit(key, 101).seconds is None


def test_what_a_request_of_an_earlier_minute_did_not_use_makes_no_room_in_this_one():
    key, limits, now = limited(tokens=100)
    admitted = now[0]
    assert limits.admit(key, 90) is None
    now[0] += 130
    limits.correct(key, -90, admitted)
    assert limits.admit(key, 100) is None
    assert limits.admit(key, 1) is not None


def count_in_a_worker(counts, row):
    counts.take_row(row)
    for _ in range(1000):
        counts.mine[1] += 1
    counts.mine[0] = row
    os._exit(0)


def test_workers_see_one_anothers_counts_and_a_dead_ones_are_cleared():
    counts = SharedCounts(3, rows=3, volatile=2)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=count_in_a_worker, args=(counts, row)) for row in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
    assert (counts.total(1), counts.of(2, 0), counts.mine[1]) == (2000, 2, 0)
    counts.clear(1)
    assert counts.total(1) == 1000
    counts.mine[2] = 5
    counts.clear(0)
    assert counts.mine[2] == 5
