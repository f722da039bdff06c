"""OpenAI's and Anthropic's own packages against a real cluster, and its bytes against those of one engine alone."""

import re

import anthropic
import httpx
import openai
import pytest

from tests.e2e.answers import APIS, PATHS, body, words

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

QUESTION = [{"role": "user", "content": words(60, seed=11)}]
TOOL = {
    "type": "function",
    "function": {
        "name": "moor",
        "description": "Moor a ship at a pier.",
        "parameters": {
            "type": "object",
            "properties": {"pier": {"type": "string", "enum": ["north", "south"]}},
            "required": ["pier"],
            "additionalProperties": False,
        },
    },
}
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def cluster(two_by_two):
    return two_by_two


@pytest.fixture(scope="module")
def decode(cluster):
    """The decode engine itself, asked without a prefill: aggregated, with the same arguments."""
    return cluster.engines("decode")["decode-0"]


def openai_client(url):
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=180,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def anthropic_client(url):
    return anthropic.Anthropic(
        base_url=url,
        api_key="unused",
        max_retries=0,
        timeout=180,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    )


@pytest.fixture(scope="module")
def ours(cluster):
    with openai_client(cluster.url) as client:
        yield client


@pytest.fixture(scope="module")
def truth(aggregated):
    with openai_client(aggregated) as client:
        yield client


@pytest.fixture(scope="module")
def claude(cluster):
    with anthropic_client(cluster.url) as client:
        yield client


@pytest.fixture(scope="module")
def claude_truth(aggregated):
    with anthropic_client(aggregated) as client:
        yield client


def disaggregated(raw):
    """Return the parsed answer of a raw response that came over both engines."""
    assert raw.headers["x-pdcluster-path"] == "disaggregated"
    return raw.parse()


def joined(chunks):
    """Return text and usage of a chat stream; every chunk is of the one answer."""
    chunks = list(chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks[-1].usage


def test_openai_lists_the_model(ours):
    assert [model.id for model in ours.models.list()] == ["tiny"]


def test_openai_chat_whole_and_streamed_is_the_aggregated_answer(ours, truth):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 12}
    expected = truth.chat.completions.create(**asked)
    got = disaggregated(ours.chat.completions.with_raw_response.create(**asked))
    assert got.choices[0].message.content == expected.choices[0].message.content
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (expected.usage.prompt_tokens, 12)
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    text, usage = joined(disaggregated(ours.chat.completions.with_raw_response.create(**streamed)))
    assert text == expected.choices[0].message.content
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, 12)


def test_openais_stream_helper_gathers_the_same_answer(ours, truth):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 12}
    expected = truth.chat.completions.create(**asked).choices[0].message.content
    with ours.chat.completions.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "content.delta") == expected
    assert [event.content for event in events if event.type == "content.done"] == [expected]


async def test_openai_async_requests_run_side_by_side(cluster, truth):
    import asyncio

    prompts = [words(20 + 15 * index, seed=20 + index) for index in range(6)]
    asked = {**GREEDY, "max_completion_tokens": 8}
    expected = [
        truth.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked) for prompt in prompts
    ]
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=180,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:

        async def ask(prompt):
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": prompt}], stream=True, **asked
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        got = await asyncio.gather(*map(ask, prompts))
    assert got == [answer.choices[0].message.content for answer in expected]


@pytest.mark.parametrize("prompt", [words(150, seed=12), list(range(200, 360))], ids=["text", "token ids"])
def test_openai_completions_whole_and_streamed(ours, truth, prompt):
    asked = {**GREEDY, "prompt": prompt, "max_tokens": 12}
    expected = truth.completions.create(**asked)
    got = disaggregated(ours.completions.with_raw_response.create(**asked))
    assert got.choices[0].text == expected.choices[0].text
    assert got.usage.model_dump(exclude_none=True) == expected.usage.model_dump(exclude_none=True)
    chunks = list(disaggregated(ours.completions.with_raw_response.create(**asked, stream=True)))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.choices[0].text


def test_openai_responses_whole_and_streamed(ours, truth):
    asked = {**GREEDY, "input": words(80, seed=13), "max_output_tokens": 12}
    expected = truth.responses.create(**asked)
    got = disaggregated(ours.responses.with_raw_response.create(**asked))
    assert got.output_text == expected.output_text != ""
    assert (got.usage.input_tokens, got.usage.output_tokens) == (expected.usage.input_tokens, 12)
    events = list(disaggregated(ours.responses.with_raw_response.create(**asked, stream=True)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == expected.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.usage.output_tokens == 12
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})


def test_openai_tools_with_choice_none_are_answered_in_text(ours, truth):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 12, "tools": [TOOL], "tool_choice": "none"}
    expected = truth.chat.completions.create(**asked)
    got = disaggregated(ours.chat.completions.with_raw_response.create(**asked))
    assert got.choices[0].message.content == expected.choices[0].message.content
    assert not got.choices[0].message.tool_calls


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "moor"}}],
    ids=["auto", "required", "named"],
)
def test_openai_tool_calls_are_those_of_the_engine_alone(ours, decode, choice):
    """The random model's text means nothing; what the engine's parser makes of it must come through unchanged."""
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 48, "tools": [TOOL], "tool_choice": choice}

    def essence(answer):
        (made,) = answer.choices
        calls = [(call.function.name, call.function.arguments) for call in made.message.tool_calls or []]
        return (
            made.message.content,
            calls,
            made.finish_reason,
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
        )

    got = essence(disaggregated(ours.chat.completions.with_raw_response.create(**asked)))
    with openai_client(decode) as alone:
        assert got == essence(alone.chat.completions.create(**asked))
    assert {name for name, _ in got[1]} <= {"moor"}


def test_openai_streams_the_tool_calls_that_the_engine_alone_streams(ours, decode):
    choice = {"type": "function", "function": {"name": "moor"}}
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 48, "tools": [TOOL], "tool_choice": choice}

    def essence(chunks):
        pieces = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        names = [call.function.name for call in pieces if call.function.name]
        return names, "".join(call.function.arguments or "" for call in pieces)

    got = essence(disaggregated(ours.chat.completions.with_raw_response.create(**asked, stream=True)))
    with openai_client(decode) as alone:
        assert got == essence(alone.chat.completions.create(**asked, stream=True))


def test_without_a_parser_the_engines_refusal_of_a_tool_choice_is_openais_bad_request(truth):
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        truth.chat.completions.create(**GREEDY, messages=QUESTION, tools=[TOOL], tool_choice="required")


def test_openai_raises_the_error_that_belongs_to_each_status(ours):
    with pytest.raises(openai.BadRequestError, match="5000") as bad:
        ours.chat.completions.create(**GREEDY, messages=QUESTION, max_completion_tokens=5000)
    assert bad.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        ours.completions.create(**GREEDY, prompt="x", max_tokens=5000)
    with pytest.raises(openai.NotFoundError, match="no-such-model") as unknown:
        ours.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.body["code"] == 404
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        ours.completions.create(**GREEDY, prompt="x", extra_body={"kv_transfer_params": {"do_remote_prefill": True}})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_error_of_a_streamed_request_comes_before_the_stream(ours, stream):
    with pytest.raises(openai.BadRequestError):
        ours.chat.completions.create(**GREEDY, messages=QUESTION, max_completion_tokens=5000, stream=stream)


def test_anthropic_messages_whole_and_streamed(claude, claude_truth):
    asked = {
        "model": "tiny",
        "messages": QUESTION,
        "system": "You know the harbour.",
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }
    expected = claude_truth.messages.create(**asked)
    got = disaggregated(claude.messages.with_raw_response.create(**asked))
    assert got.content[0].text == expected.content[0].text != ""
    assert got.stop_reason == expected.stop_reason == "max_tokens"
    assert (got.usage.input_tokens, got.usage.output_tokens) == (expected.usage.input_tokens, 12)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected.content[0].text
        final = stream.get_final_message()
        assert stream.response.headers["x-pdcluster-path"] == "disaggregated"
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_anthropic_counts_the_tokens_that_it_then_uses(claude):
    counted = claude.messages.count_tokens(model="tiny", messages=QUESTION)
    used = claude.messages.create(model="tiny", messages=QUESTION, max_tokens=1)
    assert counted.input_tokens == used.usage.input_tokens


def test_anthropic_raises_the_error_that_belongs_to_each_status(claude):
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="tiny", messages=QUESTION, max_tokens=5000)
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        claude.messages.create(model="no-such-model", messages=QUESTION, max_tokens=5)


# What differs between two answers to one request: ids (of the answer, its items and the request), times, the build; and
# fields of the handoff, which no client sees.
_CHANGING = (
    (re.compile(rb'"(id|item_id|response_id|request_id)":\s*"[^"]*"'), rb'"\1":"ID"'),
    (re.compile(rb'"(created|created_at|completed_at)":\s*[0-9.]+'), rb'"\1":0'),
    (re.compile(rb',\s*"(kv|ec)_transfer_params":\s*null'), b""),
    (re.compile(rb',\s*"system_fingerprint":\s*("[^"]*"|null)'), b""),
)


def normalised(raw):
    for pattern, constant in _CHANGING:
        raw = pattern.sub(constant, raw)
    return raw


def bytes_of(url, api, request):
    with httpx.stream("POST", url + PATHS[api], json=request, timeout=180, trust_env=False) as reply:
        raw = reply.read()
        assert reply.status_code == 200, raw
        return normalised(raw), reply.headers.get("x-pdcluster-path")


@pytest.mark.parametrize("api", APIS)
def test_a_streamed_answer_is_that_of_an_engine_alone_to_the_byte(cluster, decode, api):
    """An engine that gets few cores may put two tokens into one event, alone or not: so there are three tries."""
    usage = {"stream_options": {"include_usage": True}} if api in ("chat", "completions") else {}
    differing = []
    for seed in (31, 32, 33):
        request = {**body(api, words(90, seed), tokens=12), "stream": True, **usage}
        ours, path = bytes_of(cluster.url, api, request)
        assert path == "disaggregated"
        alone, _ = bytes_of(decode, api, request)
        if ours == alone:
            return
        differing.append((ours, alone))
    assert differing[-1][0] == differing[-1][1]
