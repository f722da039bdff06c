"""What of a request is compared with earlier ones."""

import orjson
import pytest

from proxy.request import KINDS, InferenceRequest
from proxy.scheduling.prompt_text import prompt_salt, prompt_text


def request(route="/v1/chat/completions", **fields):
    raw = orjson.dumps(fields)
    return InferenceRequest(KINDS[route], raw, orjson.loads(raw), {})


USER = {"role": "user", "content": "Where is Paris?"}
ANSWER = {"role": "assistant", "content": "In France."}
MORE = {"role": "user", "content": "And Rome?"}


def test_a_conversation_that_goes_on_begins_with_what_it_was():
    before = prompt_text(request(messages=[USER]))
    assert prompt_text(request(messages=[USER, ANSWER, MORE])).startswith(before)


def test_sampling_and_the_order_of_fields_do_not_matter():
    one = request(model="m", messages=[USER], temperature=0.5, stream=True)
    other = request(max_tokens=9, messages=[dict(reversed(USER.items()))], model="m")
    assert prompt_text(one) == prompt_text(other)
    assert prompt_salt(one) == prompt_salt(other)


def test_a_string_is_the_same_as_its_text_part():
    parts = {"role": "user", "content": [{"type": "text", "text": "Where is Paris?"}]}
    assert prompt_text(request(messages=[USER])) == prompt_text(request(messages=[parts]))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**USER, "role": "system"}]},
        {"messages": [{**USER, "name": "me"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER], "system": "Be brief."},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": "nonsense"},
        {"messages": [3, None, ["x"]]},
        {},
    ],
)
def test_what_changes_the_prompt_changes_the_text(fields):
    assert prompt_text(request(**fields)) != prompt_text(request(messages=[USER]))


def test_tools_come_before_the_conversation_whatever_the_order_of_their_keys():
    one = prompt_text(request(messages=[USER], tools=[{"a": 1, "b": {"c": 2, "d": 3}}]))
    other = prompt_text(request(tools=[{"b": {"d": 3, "c": 2}, "a": 1}], messages=[USER]))
    assert one == other
    assert one.index("tools") < one.index("Paris")


def test_two_messages_are_not_one():
    assert prompt_text(request(messages=[USER, USER])) != prompt_text(
        request(messages=[{"role": "user", "content": "Where is Paris?user\x00Where is Paris?"}])
    )


@pytest.mark.parametrize("prompt", ["Paris is", ["Paris is"]])
def test_a_completion_is_its_prompt(prompt):
    assert prompt_text(request("/v1/completions", prompt=prompt)) == "Paris is"


@pytest.mark.parametrize("prompt", [[5, 6, 70_000], [[5, 6, 70_000]]])
def test_token_ids_are_four_bytes_each(prompt):
    ids = prompt_text(request("/v1/completions", prompt=prompt))
    assert len(ids) == 12
    assert prompt_text(request("/v1/completions", prompt=[5, 6, 70_000, 8])).startswith(ids)


@pytest.mark.parametrize("prompt", [[-1], [1 << 40], [1.5], ["a", "b"], [None], {"a": 1}])
def test_nonsense_for_a_prompt_is_text_too(prompt):
    assert isinstance(prompt_text(request("/v1/completions", prompt=prompt)), str)


def test_responses_input_and_instructions():
    short = prompt_text(request("/v1/responses", instructions="Be brief.", input="Where?"))
    assert "Be brief." in short
    assert short.index("Be brief.") < short.index("Where?")
    listed = request("/v1/responses", input=[USER, ANSWER])
    assert prompt_text(listed).startswith(prompt_text(request("/v1/responses", input=[USER])))


def test_what_fast_json_refuses_is_still_text():
    tools = [{"huge": 1 << 70, "lone": "\ud800"}]
    made = InferenceRequest(KINDS["/v1/chat/completions"], b"", {"messages": [USER], "tools": tools}, {})
    assert str(1 << 70) in prompt_text(made)


def test_the_salt_is_model_and_cache_salt():
    salts = {prompt_salt(request(model=m, cache_salt=s)) for m in ("a", "b") for s in ("x", "y", None)}
    assert len(salts) == 6
