"""Token ids of a prompt: where they come from, and that nothing waits or fails for want of them."""

import asyncio

import orjson
import pytest

from proxy.config import EndpointConfig
from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineReply
from proxy.errors import EngineFailedError, EngineTimeoutError
from proxy.metrics import TOKEN_RESULTS
from proxy.request import KINDS, InferenceRequest
from proxy.scheduling.block_index import pack
from proxy.tokens import Tokenizer, Tokenizing, Tokens

CHAT, COMPLETIONS, RESPONSES, MESSAGES = KINDS
USER = {"role": "user", "content": "Where is Paris?"}
NO_RENDER = EngineReply(403, {}, b'{"error":{"message":"Scale-out endpoints are disabled."}}')
NO_SUCH_ROUTE = EngineReply(404, {}, b'{"detail":"Not Found"}')
NO_SUCH_MODEL = EngineReply(404, {}, b'{"error":{"message":"The model `x` does not exist.","code":404}}')


def reply(value, status=200):
    return EngineReply(status, {}, orjson.dumps(value))


RENDERED = reply({"token_ids": [1, 2, 3], "sampling_params": {}})
TOKENIZED = reply({"tokens": [4, 5], "count": 2, "max_model_len": 99})


class FakeClient:
    """Answers by path; notes what was asked of whom."""

    def __init__(self, **answers):
        self.answers = {"render": RENDERED, "tokenize": TOKENIZED, **answers}
        self.asked = []
        self.gate = None

    async def call(self, endpoint, request, *, leg, limit):
        self.asked.append((endpoint.name, request.path, orjson.loads(request.body)))
        assert limit.seconds == 0.5
        assert endpoint.in_flight == 1
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answers[request.path.rpartition("/")[2]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def paths(self):
        return [path for _, path, _ in self.asked]


class Setup:
    def __init__(self, client=None, ready=("p0", "d0"), **limits):
        self.client = client or FakeClient()
        roles = {"p": "prefill", "d": "decode"}
        self.endpoints = tuple(
            Endpoint(EndpointConfig(name, f"http://{name}", roles[name[0]]), state="ready", ready=True)
            for name in ready
        )
        self.now = 0.0
        self.results = []
        self.tokenizer = Tokenizer(
            Pools(self.endpoints),
            self.client,
            lambda _: b"",
            lambda: self.now,
            self.results.append,
            Tokenizing(**limits),
        )

    async def of(self, route=CHAT, **fields):
        raw = orjson.dumps(fields)
        found = await self.tokenizer.of(InferenceRequest(KINDS[route], raw, orjson.loads(raw), {}))
        assert all(result in TOKEN_RESULTS for result in self.results)
        return found


@pytest.mark.parametrize("route", KINDS)
async def test_an_engine_that_renders_gives_exact_tokens_for_every_api(route):
    setup = Setup(FakeClient(render=reply([{"token_ids": [1, 2, 3]}])) if route == COMPLETIONS else None)
    fields = {"model": "m", "prompt": "x"} if route == COMPLETIONS else {"model": "m", "messages": [USER]}
    tokens = await setup.of(route, **fields, stream=True)
    assert tokens == Tokens(pack([1, 2, 3]), exact=True)
    assert (len(tokens), tokens.ids()) == (3, [1, 2, 3])
    assert setup.client.asked == [("p0", f"{route}/render", {**fields, "stream": True})]
    assert setup.results == ["rendered"]
    assert all(endpoint.in_flight == 0 for endpoint in setup.endpoints)


@pytest.mark.parametrize("missing", [NO_RENDER, NO_SUCH_ROUTE])
async def test_without_render_routes_it_is_tokenized_and_render_is_not_asked_again_for_a_while(missing):
    setup = Setup(FakeClient(render=missing), ready=("p0",))
    fields = {"model": "m", "messages": [USER], "tools": [{"type": "function"}]}
    assert await setup.of(**fields, temperature=0.5) == Tokens(pack([4, 5]), exact=False)
    assert await setup.of(**fields, temperature=0.6) == Tokens(pack([4, 5]), exact=False)
    assert setup.client.paths == [f"{CHAT}/render", "/tokenize", "/tokenize"]
    assert setup.client.asked[-1][2] == fields
    setup.now = 301.0
    await setup.of(**fields)
    assert setup.client.paths[3:] == [f"{CHAT}/render", "/tokenize"]


async def test_a_completions_prompt_is_tokenized_exactly():
    setup = Setup(FakeClient(render=NO_RENDER))
    tokens = await setup.of(COMPLETIONS, model="m", prompt="x", add_special_tokens=False, max_tokens=4)
    assert tokens == Tokens(pack([4, 5]), exact=True)
    assert setup.client.asked[-1][2] == {"model": "m", "prompt": "x", "add_special_tokens": False}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (RESPONSES, {"input": "x"}),
        (MESSAGES, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}),
    ],
)
async def test_what_tokenize_cannot_do_is_not_guessed(route, fields):
    setup = Setup(FakeClient(render=NO_RENDER))
    assert await setup.of(route, **fields) is None
    assert setup.results == ["unsupported"]


@pytest.mark.parametrize("prompt", [[7, 8], [[7, 8]]])
async def test_ids_that_were_sent_are_used_and_nobody_is_asked(prompt):
    setup = Setup()
    assert await setup.of(COMPLETIONS, prompt=prompt) == Tokens(pack([7, 8]), exact=True)
    assert not (await setup.of(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=1)).exact
    assert setup.results == ["given", "given"]
    assert setup.client.asked == []


@pytest.mark.parametrize("prompt", [[], [-1], [1 << 40], [[]], [True]])
async def test_ids_that_are_none_are_the_engines_to_refuse(prompt):
    setup = Setup(FakeClient(render=reply({"error": "bad"}, 400)))
    assert await setup.of(COMPLETIONS, prompt=prompt) is None
    assert setup.results == ["refused"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "tool_use", "document"])
async def test_what_is_not_text_is_left_to_the_engine(kind):
    setup = Setup()
    image = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind}]}
    assert await setup.of(messages=[USER, image]) is None
    assert await setup.of(RESPONSES, input=[image]) is None
    assert setup.results == ["not_text", "not_text"]
    assert setup.client.asked == []


async def test_text_in_parts_is_text():
    setup = Setup()
    parts = [{"type": "input_text", "text": "a"}, {"text": "b"}, "c"]
    assert await setup.of(RESPONSES, input=[{"role": "user", "content": parts}, "odd"]) is not None


async def test_the_same_body_is_asked_once():
    setup = Setup()
    first = await setup.of(messages=[USER])
    assert await setup.of(messages=[USER]) is first
    await setup.of(MESSAGES, messages=[USER])
    assert setup.results == ["rendered", "kept", "rendered"]


async def test_what_is_kept_is_bounded_and_what_was_used_last_stays():
    setup = Setup(kept=3 * 12)
    for name in "abcad":
        await setup.of(messages=[USER], user=name)
    await setup.of(messages=[USER], user="a")
    await setup.of(messages=[USER], user="b")
    assert setup.results == ["rendered"] * 3 + ["kept", "rendered", "kept", "rendered"]
    assert setup.tokenizer._size == 36


async def test_the_same_body_asked_at_once_is_kept_once():
    setup = Setup()
    both = [setup.of(messages=[USER]), setup.of(messages=[USER])]
    setup.client.gate = asyncio.Event()
    setup.endpoints[1].take()  # so that both ask the same endpoint one after the other
    tasks = [asyncio.create_task(both[0])]
    await asyncio.sleep(0)
    setup.endpoints[1].give()
    tasks.append(asyncio.create_task(both[1]))
    await asyncio.sleep(0)
    setup.client.gate.set()
    await asyncio.gather(*tasks)
    assert setup.tokenizer._size == 12


async def test_the_least_busy_engine_is_asked_and_none_where_none_is_ready():
    setup = Setup(ready=("p0", "p1", "d0"))
    setup.endpoints[0].take()
    setup.endpoints[0].take()
    await setup.of(messages=[USER])
    assert setup.client.asked[0][0] == "p1"
    nobody = Setup(ready=())
    assert await nobody.of(messages=[USER]) is None
    assert nobody.results == ["no_endpoint"]


@pytest.mark.parametrize("answer", [reply({"error": "bad"}, 400), NO_SUCH_MODEL, reply({"error": "x"}, 422)])
async def test_a_request_that_the_engine_refuses_has_no_tokens(answer):
    setup = Setup(FakeClient(render=answer))
    for _ in range(5):
        assert await setup.of(messages=[USER]) is None
    assert setup.results == ["refused"] * 5


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (EngineTimeoutError("silent"), "timeout"),
        (EngineFailedError("gone"), "failed"),
        (reply({}, 500), "failed"),
        (reply({}), "failed"),
        (reply([]), "failed"),
        (reply({"token_ids": ["x"]}), "failed"),
        (reply({"token_ids": [-1]}), "failed"),
        (reply({"token_ids": 5}), "failed"),
        (EngineReply(200, {}, b"<html>"), "failed"),
    ],
)
async def test_after_some_failures_in_a_row_nobody_waits_for_a_while(answer, result):
    setup = Setup(FakeClient(render=answer))
    for _ in range(4):
        assert await setup.of(messages=[USER]) is None
    assert setup.results == [result] * 3 + ["paused"]
    setup.now = 5.1
    setup.client.answers["render"] = RENDERED
    assert await setup.of(messages=[USER]) is not None
    assert all(endpoint.in_flight == 0 for endpoint in setup.endpoints)


async def test_failures_with_successes_between_them_are_no_reason_to_pause():
    setup = Setup()
    for turn in range(9):
        setup.client.answers["render"] = RENDERED if turn % 3 == 0 else EngineFailedError("gone")
        await setup.of(messages=[USER], user=str(turn))
    assert "paused" not in setup.results
