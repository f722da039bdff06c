"""Bodies whose shape would stop every stream while they are read are refused before; text is never at issue."""

import json
import time

import pytest

from proxy.errors import BadRequestError
from proxy.request import parse_object

COUNT = 250_000
IDS = 4_000_000


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a":[' + b"{}," * COUNT + b"{}]}", "250,000 objects"),
        (b'{"a":[' + b"[]," * COUNT + b"[]]}", "250,000 lists"),
        (b"{" + b",".join(b'"":1' for _ in range(COUNT + 1)) + b"}", "250,000 names"),
        (b'{"a":[' + b"1," * (IDS + 1) + b"1]}", "4,000,000 values"),
        (b'{"b":NaN,"a":[' + b"{}," * COUNT + b"{}]}", "250,000 objects"),
        (b"[" * (2 * COUNT + 1), "250,000 lists"),
        (b'{"s":"' + b'\\"' * 9 + b'","a":[' + b"{}," * COUNT + b"{}]}", "250,000 objects"),
    ],
    ids=["objects", "lists", "names", "values", "with NaN", "never closed", "behind escaped quotes"],
)
def test_a_body_of_more_parts_than_any_prompt_is_refused_quickly(raw, words):
    began = time.process_time()
    with pytest.raises(BadRequestError, match=words):
        parse_object(raw)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        "{" * 600_000,
        "[{:,}]" * 300_000,
        json.dumps([{"a": [1, 2]}] * 100_000),
        '"{":[' * 300_000,
        "\\" * 299_999 + "{" * 300_000,
        "{\n\t\u00e9" * 300_000,
    ],
    ids=["one bracket", "all marks", "JSON in a string", "quotes", "backslashes", "escapes"],
)
def test_whatever_a_text_holds_is_text(text):
    body = {"messages": [{"role": "user", "content": text}]}
    assert parse_object(json.dumps(body).encode()) == body


def test_prompts_of_token_ids_and_long_conversations_are_no_crowd():
    ids = {"prompt": list(range(1_000_000))}
    assert parse_object(json.dumps(ids).encode()) == ids
    talk = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 50_000}
    assert parse_object(json.dumps(talk).encode()) == talk


async def test_a_crowd_is_400_on_every_kind_of_route_and_reaches_no_engine(rig):
    raw = b'{"a":[' + b"{}," * COUNT + b"{}]}"
    for route in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        reply = await rig.client.post(route, content=raw)
        assert reply.status_code == 400
        assert "250,000 objects" in reply.text
    assert rig.prefills[0].requests == rig.decodes[0].requests == []
