"""Traces: what is read, what is refused with its line, and when a request becomes due."""

import gzip
import json
from pathlib import Path

import pytest

from pdcluster.errors import UserError
from pdcluster.replay.trace import Shape, Window, read_trace, shaped

PUBLISHED = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl.gz"


def row(at=0, tokens=600, output=10, blocks=(1, 2), **more):
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": list(blocks), **more}


def written(tmp_path, *rows, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows))
    return path


def test_rows_become_requests_in_order_of_time(tmp_path):
    trace = read_trace(
        written(tmp_path, row(2500, blocks=(7, 8)), "", row(500, tokens=512, blocks=(3,), output=2, x=1))
    )
    assert [(item.at, item.input_tokens, item.output_tokens, item.blocks) for item in trace.requests] == [
        (0.5, 512, 2, (3,)),
        (2.5, 600, 10, (7, 8)),
    ]
    assert (trace.name, trace.total) == ("trace.jsonl", 2)


def test_a_packed_trace_is_known_by_its_bytes_not_its_name(tmp_path):
    path = tmp_path / "trace.data"
    path.write_bytes(gzip.compress(json.dumps(row(1000)).encode()))
    assert read_trace(path).requests[0].at == 1.0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        (row(at=-1), "timestamp must be milliseconds since the start, is -1"),
        (row(at="now"), "timestamp"),
        (row(at=True), "timestamp"),
        (row(tokens=0), "input_length must be a whole number of tokens, 1 or more, is 0"),
        (row(output=1.5), "output_length must be a whole number of tokens, 1 or more, is 1.5"),
        ({"timestamp": 1, "input_length": 4, "output_length": 4}, "hash_ids must be a list"),
        (row(blocks=("a", "b")), "hash_ids must be a list of whole numbers"),
        (row(tokens=1025), "2 hash_ids are too few for 1025 tokens, which need 3"),
    ],
)
def test_what_cannot_be_a_request_is_refused_with_file_and_line(tmp_path, line, told):
    path = written(tmp_path, row(), line)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert told in str(caught.value)


def test_files_that_are_no_traces_are_refused_in_words(tmp_path):
    cut_off = tmp_path / "cut.gz"
    cut_off.write_bytes(gzip.compress(json.dumps(row()).encode() * 50)[:40])
    for path, told in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (cut_off, "ended before")):
        with pytest.raises(UserError, match=f"cannot be read as a trace: .*{told}"):
            read_trace(path)


def test_a_window_holds_its_beginning_and_not_its_end(tmp_path):
    path = written(tmp_path, *(row(at * 1000) for at in range(5)))
    trace = read_trace(path, Window(1, 3))
    assert ([item.at for item in trace.requests], trace.total) == ([1, 2], 5)
    with pytest.raises(UserError, match="none of its 5 requests lies from second 9 to the end"):
        read_trace(path, Window(9))


def test_times_are_of_the_window_and_divided_by_speed(tmp_path):
    trace = read_trace(written(tmp_path, row(10_000), row(14_000)), Window(10, 30))
    schedule = shaped(trace, Shape(speed=2))
    assert [item.due for item in schedule.arrivals] == [0, 2]
    assert schedule.seconds == 10
    assert shaped(read_trace(written(tmp_path, row(8000))), Shape(speed=2)).seconds == 4


def test_lengths_are_cut_left_out_and_scaled_and_what_was_left_out_is_counted(tmp_path):
    trace = read_trace(written(tmp_path, row(output=500), row(1, tokens=1024), row(2, tokens=3, output=1)))
    schedule = shaped(trace, Shape(max_output=200, max_input=40, block_tokens=32))
    assert [(item.input_tokens, item.output_tokens) for item in schedule.arrivals] == [(37, 200), (1, 1)]
    assert schedule.dropped == 1
    with pytest.raises(UserError, match=r"all 3 requests are longer than 0 tokens"):
        shaped(trace, Shape(max_input=0))


def test_a_seed_shuffles_requests_of_one_timestamp_and_no_others(tmp_path):
    rows = [row(at, tokens=number + 1) for at in (0, 3000) for number in range(20)]
    trace = read_trace(written(tmp_path, *rows))

    def order(seed):
        return [(item.due, item.input_tokens) for item in shaped(trace, Shape(seed=seed)).arrivals]

    assert order(1) == order(1) != order(2)
    assert order(0) == [(at, n + 1) for at in (0, 3) for n in range(20)]
    assert sorted(order(1)) == sorted(order(2)) == [(at, n + 1) for at in (0, 3) for n in range(20)]
    assert [due for due, _ in order(1)] == sorted(due for due, _ in order(1))


def test_spread_moves_arrivals_within_so_many_seconds_of_the_trace(tmp_path):
    trace = read_trace(written(tmp_path, *(row(3000) for _ in range(50))))
    dues = [item.due for item in shaped(trace, Shape(speed=2, spread=3, seed=1)).arrivals]
    assert dues == sorted(dues)
    assert len(set(dues)) == 50
    assert 1.5 <= dues[0] < 1.7
    assert 2.8 < dues[-1] <= 3.0


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published trace is not beside this checkout")
def test_the_published_trace_is_read_whole():
    trace = read_trace(PUBLISHED, Window(600, 960))
    assert (trace.total, len(trace.requests)) == (12_031, 1140)
    assert shaped(trace, Shape(speed=4)).seconds == 90
