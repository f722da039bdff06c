"""Ask the same of two endpoints, in each API, streamed and not, and compare greedy answers token for token."""

import json
import random
from dataclasses import dataclass, field

import httpx

TIE = 1e-4
APIS = ("chat", "completions", "responses", "messages")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass
class Ties:
    """Differing tokens that were excused because both sides were within TIE of choosing otherwise."""

    excused: list = field(default_factory=list)


def token_prompt(length, seed):
    return [random.Random(seed * 10_007 + length).randrange(100, 40_000) for _ in range(length)]


def words(count, seed):
    rng = random.Random(seed)
    return " ".join(
        rng.choice(["harbour", "ledger", "seven", "cargo", "pier", "north", "lamp", "stone", "river", "glass"])
        for _ in range(count)
    )


def body(api, text, tokens):
    common = {"model": "tiny", "temperature": 0}
    return (
        common
        | {
            "chat": {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "logprobs": True,
                "top_logprobs": 2,
            },
            "completions": {"prompt": text, "max_tokens": tokens, "logprobs": 2, "return_token_ids": True},
            "responses": {"input": text, "max_output_tokens": tokens},
            "messages": {"messages": [{"role": "user", "content": text}], "max_tokens": tokens},
        }[api]
    )


@dataclass
class Answer:
    """Text, usage, and for chat and completions each token with the gap to the second best."""

    text: str
    usage: dict
    tokens: list
    gaps: list
    path: str


def ask(url, api, request, *, stream=False):
    if stream:
        extra = {"stream_options": {"include_usage": True}} if api in ("chat", "completions") else {}
        with httpx.stream(
            "POST", url + PATHS[api], json={**request, "stream": True, **extra}, timeout=300, trust_env=False
        ) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = list(reply.iter_lines())
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if api in ("chat", "completions"):
            assert [line for line in lines if line][-1] == "data: [DONE]"
        return gather(api, events, reply.headers)
    reply = httpx.post(url + PATHS[api], json=request, timeout=300, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert "kv_transfer_params" not in reply.text or "x-pdcluster-path" not in reply.headers
    return read(api, reply.json(), reply.headers)


def read(api, reply, headers):
    path = headers.get("x-pdcluster-path", "")
    if api in ("chat", "completions"):
        tokens, gaps = logprobs(api, reply["choices"][0])
        text = reply["choices"][0]["message"]["content"] if api == "chat" else reply["choices"][0]["text"]
        return Answer(text, counts(reply["usage"]), tokens, gaps, path)
    if api == "responses":
        text = "".join(part["text"] for item in reply["output"] for part in item.get("content", []))
        return Answer(text, counts(reply["usage"]), [], [], path)
    return Answer("".join(part["text"] for part in reply["content"]), counts(reply["usage"]), [], [], path)


def gather(api, events, headers):
    path = headers.get("x-pdcluster-path", "")
    if api in ("chat", "completions"):
        text, tokens, gaps, usage = "", [], [], {}
        for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += (choice["delta"].get("content") or "") if api == "chat" else choice["text"]
                more, more_gaps = logprobs(api, choice)
                tokens, gaps = tokens + more, gaps + more_gaps
        return Answer(text, counts(usage), tokens, gaps, path)
    if api == "responses":
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return Answer(text, counts(events[-1]["response"]["usage"]), [], [], path)
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    usage = next(event["usage"] for event in events if event["type"] == "message_delta")
    return Answer(text, counts(usage), [], [], path)


def counts(usage):
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    return {"prompt": prompt, "output": usage.get("completion_tokens", usage.get("output_tokens"))}


def logprobs(api, choice):
    found = choice.get("logprobs")
    if not found:
        return [], []
    if api == "chat":
        tops = [[top["logprob"] for top in item["top_logprobs"]] for item in found["content"]]
        tokens = [item["token"] for item in found["content"]]
    else:
        tops = [list(top.values()) for top in found["top_logprobs"]]
        tokens = found["tokens"]
    return tokens, [_gap(top) if len(top) > 1 else 0.0 for top in tops]


def _gap(top):
    second, best = sorted(top)[-2:]
    return best - second


def same(expected, got, ties):
    """Assert that two greedy answers are equal token for token; a tie on both sides is excused and counted."""
    for index, (left, right) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if left != right:
            tied = expected.gaps[index] <= TIE and got.gaps[index] <= TIE
            assert tied, (index, left, right, expected.gaps[index], got.gaps[index])
            ties.excused.append((index, left, right))
            return
    assert got.text == expected.text
    assert len(got.tokens) == len(expected.tokens)
    assert got.usage == expected.usage
