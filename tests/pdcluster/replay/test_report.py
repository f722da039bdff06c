"""What people and machines are told of a replay, and how its requests are written."""

import json

import pytest

from pdcluster.errors import LaunchError
from pdcluster.replay.driver import Limits, Record, Run
from pdcluster.replay.exchange import Target
from pdcluster.replay.figures import Targets, make_figures
from pdcluster.replay.prompts import Prompts
from pdcluster.replay.replaying import Asking, Replay, run_replay
from pdcluster.replay.report import Known, conditions, sentences, table, to_json
from pdcluster.replay.trace import Arrival, Schedule, Shape, Trace, TraceRequest, Window

TARGET = Target("127.0.0.1", 9)


def figures(*, late=0.0, tokens=3, error=""):
    made = Record(0.0, late, 0.2, 0.24, 0.4, 100, 3, tokens, None, None, 200, error, "why")
    return make_figures(Run((made,), 1.0, 0.5, 1), Targets())


def replay(**more):
    return Replay(TARGET, Asking("m", **more), Prompts(), Limits())


def test_what_nobody_knows_is_null_in_the_conditions():
    trace = Trace("t.jsonl", Window(5, 9), (TraceRequest(5, 100, 3, (1,)),), 40)
    schedule = Schedule((Arrival(0.0, 100, 3, (1,)),), 4.0, 2)
    told = conditions(Known("http://x"), trace, Shape(speed=2, max_input=900), schedule, replay(), figures())
    assert [told[key] for key in ("revision", "cache_state", "prompt_tokens_counted_per_token_asked")] == [None] * 3
    assert (told["trace"]["share_replayed"], told["trace"]["left_out_as_too_long"]) == (0.025, 2)
    assert told["concurrency"]["requests_per_second"] == 0.25
    assert told["failures"] == {}
    assert json.dumps(told)


def test_lateness_early_ends_and_failures_are_told_to_people():
    said = "\n".join(sentences(figures(), Targets()))
    assert "100.0% of 1 requests in target" in said
    assert "cached share of prompts: unknown" in said
    assert "50% of a core" in said
    assert "warning" not in said
    assert "more than 60 ms late" in "\n".join(sentences(figures(late=0.06), Targets()))
    assert "1 answers ended before" in "\n".join(sentences(figures(tokens=2), Targets()))
    assert "failed: 1 x timeout; the first: why" in sentences(figures(error="timeout"), Targets())
    assert table(figures(error="timeout")).row_count == 4


def test_requests_are_told_apart_only_where_their_records_are_given():
    assert "requests" not in to_json(figures(), Targets(), {})
    record = Record(0.0, 0.0, None, None, 1.0, 1, 1, 0, None, None, None, "timeout", "")
    assert to_json(figures(), Targets(), {}, [record])["requests"][0]["error"] == "timeout"


def test_bodies_are_greedy_streams_with_usage_and_only_vllm_is_told_to_ignore_eos():
    chat = json.loads(Asking("m").body("hi", 7))
    assert (chat["messages"], chat["max_tokens"], chat["temperature"]) == ([{"role": "user", "content": "hi"}], 7, 0)
    assert (chat["stream"], chat["stream_options"]) == (True, {"include_usage": True})
    assert "ignore_eos" not in chat
    whole = json.loads(Asking("m", "completions", whole_output=True).body("hi", 7))
    assert (whole["prompt"], whole["ignore_eos"]) == ("hi", True)


def test_a_schedule_does_not_begin_where_the_first_request_fails():
    schedule = Schedule((Arrival(0.0, 100, 3, (1,)),), 1.0, 0)
    with pytest.raises(LaunchError, match=r":9/v1/chat/completions: a first, small request failed: no conn"):
        run_replay(replay(), schedule, print)
