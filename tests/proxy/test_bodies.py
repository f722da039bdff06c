"""Bodies of both legs, for whatever a client may send."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.connectors import CONNECTORS
from proxy.errors import BadRequestError
from proxy.firewall import clean_reply, refuse_transfer_fields, safe_request_id
from proxy.request import KINDS, InferenceRequest, parse_object, why_aggregated

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
        "stream",
        "stream_options",
        "min_tokens",
        "stop",
        "store",
        "prompt",
    ]
)
OBJECTS = st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=6)
HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r"}
HANDOFF |= {"remote_host": "10.0.0.1", "remote_port": 5600}


def request(raw, route="/v1/chat/completions"):
    return InferenceRequest(KINDS[route], raw, parse_object(raw), {})


@pytest.fixture(params=CONNECTORS)
def connector(request):
    return CONNECTORS[request.param]()


@given(OBJECTS, st.sampled_from(["", " ", "\n\t"]), st.booleans())
def test_decode_gets_the_clients_object_and_the_handoff(value, space, ascii_only):
    connector = CONNECTORS["nixl"]()
    raw = (space + json.dumps(value, ensure_ascii=ascii_only) + space).encode("utf-8", "surrogatepass")
    try:
        asked = request(raw)
    except BadRequestError:
        return  # a lone surrogate as raw bytes is no UTF-8
    assert json.loads(b"".join(connector.decode_body(asked, HANDOFF))) == {
        **json.loads(raw),
        "kv_transfer_params": HANDOFF,
    }


@given(OBJECTS, st.sampled_from(sorted(KINDS)))
def test_prefill_makes_one_token_whole_and_changes_nothing_else(value, route):
    connector = CONNECTORS["nixl"]()
    asked = request(json.dumps(value).encode(), route)
    before = dict(asked.fields)
    body = json.loads(connector.prefill_body(asked))
    kind = KINDS[route]
    assert asked.fields == before
    assert all(body[name] == 1 for name in kind.token_limits if name in body)
    assert body[kind.token_limits[0]] == 1
    assert body["stream"] is False
    assert not {"min_tokens", "stream_options", "stop"} & body.keys()
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    ours = {*kind.token_limits, "stream", "n", "store", "kv_transfer_params", "ignore_eos"}
    dropped = {
        "min_tokens",
        "stream_options",
        "stop",
        "stop_token_ids",
        "stop_sequences",
        "logprobs",
        "top_logprobs",
        "background",
    }
    assert {key: body[key] for key in body.keys() - ours} == {key: value[key] for key in value.keys() - ours - dropped}


def test_a_contract_holds_for_every_connector(connector):
    asked = request(b'{"messages": []}')
    assert isinstance(connector.prefill_body(asked), bytes)
    assert connector.handoff({"kv_transfer_params": HANDOFF}) == HANDOFF
    assert connector.handoff({}) is None
    assert isinstance(connector.overlaps, bool)
    assert isinstance(connector.may_decode_alone, bool)


def test_an_empty_object_gets_the_handoff_without_a_comma(connector):
    assert json.loads(b"".join(connector.decode_body(request(b" { } "), HANDOFF))) == {"kv_transfer_params": HANDOFF}


@given(st.binary(max_size=40))
def test_any_bytes_are_parsed_to_an_object_or_refused(raw):
    with contextlib.suppress(BadRequestError):
        assert isinstance(parse_object(raw), dict)


@given(OBJECTS)
def test_reasons_for_running_aggregated_are_a_fixed_set(value):
    known = {
        "n",
        "best_of",
        "prompt_list",
        "prompt_logprobs",
        "prompt_embeds",
        "previous_response_id",
        "echo",
        "use_beam_search",
        "background",
        None,
    }
    assert why_aggregated(value) in known


@given(VALUES)
def test_a_transfer_field_is_refused_unless_it_is_empty(value):
    if value:
        with pytest.raises(BadRequestError):
            refuse_transfer_fields({"kv_transfer_params": value})
    elif value is None or value == {}:
        refuse_transfer_fields({"kv_transfer_params": value})


@given(OBJECTS)
def test_cleaning_a_reply_takes_only_what_must_go(value):
    value = {key: item for key, item in value.items() if key not in ("metrics", "prompt_token_ids")}
    reply = {**value, "kv_transfer_params": HANDOFF, "ec_transfer_params": None}
    assert json.loads(clean_reply(json.dumps(reply).encode(), {})) == value


@given(st.text())
def test_request_ids_are_harmless_or_replaced(text):
    safe = safe_request_id(text.encode("utf-8", "surrogatepass"))
    assert safe is None or (safe == text and safe.isascii() and not set(safe) & set(" \r\n\t\"'<>"))
