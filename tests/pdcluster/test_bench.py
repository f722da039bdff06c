"""The benchmark of the proxy: what it counts, what it refuses to count, and a short run of it."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from pdcluster.bench import routers, runs
from pdcluster.bench.cases import CASES, Measurement, percentile, scaled
from pdcluster.bench.http import split_message
from pdcluster.bench.load import Load, Seen, _Connection, put, request_bytes
from pdcluster.bench.report import FLOOR, OURS, PEER, conditions, make_rows, told
from pdcluster.bench.routers import Ports
from pdcluster.bench.runs import Run
from pdcluster.bench.stand_ins import StandIn, Tally
from pdcluster.errors import LaunchError, UserError

HEAD = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":" tok"}}]}\n\n'


def chunked(*pieces, end=b"0\r\n\r\n"):
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + body + end


def run_of(router, cpu, *, requests=10, events=640, gaps=(), case="paced"):
    seen = Seen(requests=requests, events=events, first=[0.001, 0.002], gaps=list(gaps))
    return Run(case, router, Measurement(seen, cpu, 50_000_000, 20))


def test_ratios_are_made_round_by_round_and_judged_against_the_aim():
    (paced,) = [case for case in CASES if case.name == "paced"]
    made = [
        run_of(OURS, 0.8),
        run_of(PEER, 1.0),
        run_of(OURS, 1.8),
        run_of(PEER, 2.0),
        run_of(OURS, 1),
        run_of(PEER, 1),
    ]
    row = make_rows([paced], made)[0]
    assert (round(row.ratio, 3), row.ratio_range) == (0.9, (0.8, 1.0))
    assert (row.met, row.target) == (False, "<= 0.85")
    assert row.ours == pytest.approx(1e6 / 640)
    alone = make_rows([paced], [run_of(OURS, 0.8)])[0]
    assert (alone.ratio, alone.met, alone.peer) == (None, None, None)


def test_the_longest_wait_is_beyond_the_pace_and_judged_by_itself():
    (giant,) = [case for case in CASES if case.name == "giant"]
    row = make_rows([giant], [run_of(OURS, 1, gaps=(0.02, 0.05), case="giant")])[0]
    assert (row.ours, row.met) == (pytest.approx(30), False)


def test_the_longest_wait_has_no_ratio_but_the_bare_relays_figure_beside_it():
    (giant,) = [case for case in CASES if case.name == "giant"]
    assert giant.floor
    made = [
        run_of(router, 1, gaps=(gap,), case="giant") for router, gap in ((OURS, 0.03), (PEER, 0.06), (FLOOR, 0.025))
    ]
    row = make_rows([giant], made)[0]
    assert (row.ratio, row.ratio_range) == (None, None)
    assert (row.ours, row.peer, row.floor) == (pytest.approx(10), pytest.approx(40), pytest.approx(5))
    assert row.met is True


def test_a_smaller_scale_leaves_each_client_a_request():
    assert {scaled(case, 0.0001).load.requests for case in CASES} == {case.load.concurrency for case in CASES}
    assert percentile([], 0.5) == 0


@pytest.mark.parametrize("size", [1, 7, 999])
def test_messages_are_found_however_they_arrive(size):
    data = chunked(b"abc", b"de") + HEAD + b"content-length: 2\r\n\r\nok" + b"GET / HTTP/1.1\r\n\r\n"
    held, bodies = b"", []
    for start in range(0, len(data), size):
        held += data[start : start + size]
        while (found := split_message(held)) is not None:
            _, body, held = found
            bodies.append(body)
    assert bodies == [b"abcde", b"ok", b""]


@pytest.mark.parametrize(
    ("stream", "answer", "wrong"),
    [
        (True, chunked(EVENT, EVENT, b"data: [DONE]\n\n"), None),
        (True, chunked(EVENT, b"data: [DONE]\n\n"), "a stream with events missing"),
        (True, chunked(EVENT, EVENT), "a stream without its end"),
        (True, b"HTTP/1.1 502 No\r\ncontent-length: 0\r\n\r\n", "an error"),
        (False, HEAD + b"content-length: 8\r\n\r\n tok tok", None),
        (False, HEAD + b"content-length: 4\r\n\r\n tok tok", "not the answer that was asked for"),
        (False, HEAD + b"content-length: 4\r\n\r\n tok", "not the answer that was asked for"),
    ],
)
async def test_only_the_whole_answer_counts(stream, answer, wrong):
    async def serve(reader, writer):
        data = b""
        while split_message(data) is None:
            data += await reader.read(1 << 16)
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = Load(server.sockets[0].getsockname()[1], concurrency=1, requests=1, tokens=2, stream=stream)
    seen = await asyncio.wait_for(put(load, 1), 5)
    server.close()
    assert seen.wrong == ({} if wrong is None else {wrong: 1})
    await asyncio.wait_for(over.wait(), 5)
    await asyncio.sleep(0)


async def test_events_are_counted_wherever_a_read_ends():
    answer = chunked(EVENT, EVENT, b"data: [DONE]\n\n")
    for cut in range(len(HEAD), len(answer)):
        seen = Seen()
        connection = _Connection(Load(0, concurrency=1, requests=1, tokens=2), seen)
        connection.connection_made(Mock())
        told = connection.ask(b"")
        connection.data_received(answer[:cut])
        connection.data_received(answer[cut:])
        assert (await asyncio.wait_for(told, 1), seen.events) == ("", 2), cut


def test_a_router_that_does_not_come_up_leaves_no_other_running(monkeypatch):
    ours, engines, stopped = Mock(), Mock(), []
    monkeypatch.setattr(runs, "start_stand_ins", lambda ports: engines)
    monkeypatch.setattr(runs, "start_ours", lambda ports, workers: ours)
    monkeypatch.setattr(runs, "start_vllm_router", Mock(side_effect=UserError("not ready")))
    monkeypatch.setattr(runs, "stop", stopped.append)
    with pytest.raises(UserError, match="not ready"):
        runs.run_all(CASES, 1, 1, print, peer=True)
    ours.stop.assert_called_once_with()
    assert stopped == [engines]


def test_conditions_name_scale_and_requests_for_people_too():
    line = told(conditions([scaled(case, 2) for case in CASES[:2]], 3, 2, 1, "none"))
    assert "scale: 2; requests: paced 1,280, burst 4,800; workers: 1" in line


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('no such flag'); sys.exit('and another line')", "no such flag\nand another line"),
        ("raise SystemExit(7)", "It said nothing."),
    ],
)
def test_a_router_that_ends_at_once_is_shown_with_its_own_words(monkeypatch, program, said):
    began = time.monotonic()
    with pytest.raises(LaunchError, match="vllm-router ended with exit code") as caught:
        start_with(monkeypatch, program)
    assert str(caught.value).endswith(said)
    assert time.monotonic() - began < 10


def test_only_the_end_of_a_long_output_is_shown(monkeypatch):
    with pytest.raises(LaunchError) as caught:
        start_with(monkeypatch, "print('x' * 100_000); print('the end'); raise SystemExit(1)")
    assert str(caught.value).endswith("x\nthe end")
    assert len(str(caught.value)) < 3000


def test_a_router_that_is_never_ready_is_ended_and_shown_with_its_own_words(monkeypatch):
    monkeypatch.setattr(routers, "_READY_S", 1.0)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        routers.subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[0]
    )
    with pytest.raises(LaunchError, match=r"not ready within 1 s; is this machine busy\? It said:\nloading"):
        start_with(monkeypatch, "import time; print('loading', flush=True); time.sleep(60)")
    assert started[0].poll() is not None


def start_with(monkeypatch, program):
    """Start a program of Python in vllm-router's place."""
    monkeypatch.setattr(routers, "find_vllm_router", lambda: sys.executable)
    monkeypatch.setattr(routers, "_engines", lambda _: [])
    start = routers._start
    monkeypatch.setattr(routers, "_start", lambda argv, *more: start([argv[0], "-c", program], *more))
    routers.start_vllm_router(Ports((1,), (2,), 3))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(60)", "was not warm within 0.5 s in paced"),
        ("pass", "the load generator died"),
        ("import time; print('warm', flush=True); time.sleep(60)", "was not done within 0.5 s"),
    ],
    ids=["never warm", "dead", "never done"],
)
def test_a_load_that_never_comes_to_an_end_ends_the_benchmark_and_not_the_other_way_round(monkeypatch, program, words):
    popen, started = subprocess.Popen, []

    def start(argv, **more):
        started.append(popen([argv[0], "-c", program], **more))
        return started[-1]

    monkeypatch.setattr(runs.subprocess, "Popen", start)
    monkeypatch.setattr(runs, "_WARM_S", 0.5)
    monkeypatch.setattr(runs, "_LONGEST_S", 0.5)
    router = Mock(port=1, key="", cpu_seconds=lambda: 0.0, resident_bytes=lambda: 1)
    router.name = "ours"
    with pytest.raises(LaunchError, match=words):
        runs.measure(replace(CASES[0], beside=CASES[0].load), router)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


async def test_stand_ins_count_what_breaks_the_protocol():
    loop, tally = asyncio.get_running_loop(), Tally()
    server = await loop.create_server(lambda: StandIn("decode", tally), "127.0.0.1", 0)
    load = Load(server.sockets[0].getsockname()[1], concurrency=1, requests=2, tokens=2)
    seen = await asyncio.wait_for(put(load, 2), 5)
    server.close()
    assert (seen.wrong, tally.decodes) == ({}, 2)
    assert tally.breaches == {"decode without a handoff that is good": 2}


def test_prompts_have_the_size_that_was_asked_for():
    assert 400_000 < len(request_bytes(Load(1, 1, 1, 4, prompt=400_000), 0)) < 401_000


def pdcluster(*arguments):
    argv = [sys.executable, "-m", "pdcluster", "bench", "proxy", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100)


def test_a_short_run_of_ours_alone_prints_figures_and_their_conditions():
    done = pdcluster("--peer", "none", "--rounds", "1", "--scale", "0.01", "--cases", "burst,plain", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert [figure["case"] for figure in made["figures"]] == ["burst", "burst", "burst", "plain"]
    assert all(figure["ours"] > 0 for figure in made["figures"])
    assert (made["conditions"]["rounds"], made["conditions"]["peer"]) == (1, "none")
    assert (made["conditions"]["scale"], made["conditions"]["requests"]) == (0.01, {"burst": 32, "plain": 60})
    assert "round 1 of 1: plain on pdcluster" in done.stderr


def test_an_unknown_case_and_a_missing_peer_are_refused_in_words(monkeypatch):
    done = pdcluster("--cases", "fast")
    assert (done.returncode, "there are paced, burst" in done.stderr) == (2, True)
    monkeypatch.setattr(routers.shutil, "which", lambda _: None)
    monkeypatch.setattr(routers.sys, "executable", "/nowhere/python")
    with pytest.raises(UserError, match=r"pip install 'pdcluster\[bench\]'"):
        routers.find_vllm_router()
