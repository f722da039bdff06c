"""`pdcluster bench replay` from the command line, against a server of the test's own."""

import asyncio
import json
import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from pdcluster.commands import benchmarking
from pdcluster.errors import UserError
from tests.pdcluster.replay.endpoint import endpoint, event, plain, stream, usage
from tests.pdcluster.replay.test_trace import row, written


async def bench(*arguments, **environment):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdcluster", "bench", "replay", *map(str, arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )
    out, error = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), error.decode()


def answers(number):
    return [stream(event("a"), event("b"), usage(2, prompt=640, cached=128))] if number != 2 else [plain(503, b"full")]


async def test_a_replay_prints_figures_with_conditions_and_writes_both_files(tmp_path):
    trace = written(tmp_path, *(row(at * 1000, output=40) for at in range(6)))
    out, svg = tmp_path / "out.json", tmp_path / "run.svg"
    async with endpoint(answers) as served:
        code, told, error = await bench(
            *(served.target.origin, trace, "--from", 1, "--to", 5, "--speed", 20, "--max-output", 2, "--seed", 4),
            *("--model", "m", "--api-key-env", "LLM_KEY", "--json", "--out", out, "--svg", svg, "--revision", "r1"),
            LLM_KEY="hush",
        )
    assert code == 0, error
    made = json.loads(told)
    assert (made["figures"]["requests"], made["figures"]["answered"], made["figures"]["in_target"]) == (4, 3, 0.75)
    assert made["figures"]["cached_share"] == 0.2
    conditions = made["conditions"]
    assert (conditions["model"], conditions["revision"], conditions["cache_state"]) == ("m", "r1", None)
    assert conditions["failures"] == {"HTTP 503": 1}
    assert (conditions["trace"]["requests"], conditions["trace"]["replayed"], conditions["trace"]["seed"]) == (6, 4, 4)
    assert (conditions["output_tokens"]["most"], conditions["input_tokens"]["mean"]) == (2, 600)
    assert conditions["warm_up_requests"] == 1
    assert len(json.loads(out.read_text())["requests"]) == 4
    assert ET.parse(svg) is not None
    assert len(served.requests) == 5
    head, body = served.requests[1]
    assert "authorization: Bearer hush" in head
    assert (body["max_tokens"], body["stream"], len(body["messages"][0]["content"])) == (2, True, 2400)
    assert "4 of 6 requests in 0 s" in error


async def test_people_get_a_table_and_every_kind_of_failure(tmp_path):
    trace = written(tmp_path, *(row(at) for at in range(3)))
    async with endpoint(answers) as served:
        code, told, error = await bench(served.target.origin, trace, "--model", "m", "--api", "completions")
    assert code == 0, error
    assert "TTFT" in told
    assert "failed: 1 x HTTP 503; the first: full" in told
    assert "conditions: {" in told
    assert served.requests[0][0].startswith("POST /v1/completions ")
    assert isinstance(served.requests[0][1]["prompt"], str)


async def test_an_endpoint_that_refuses_the_first_request_is_one_line(tmp_path):
    async with endpoint(lambda number: [plain(401, b"no key")]) as served:
        code, told, error = await bench(served.target.origin, written(tmp_path, row()), "--model", "m")
    assert (code, told) == (1, "")
    assert f"error: {served.target.origin}/v1/chat/completions: a first, small request failed: HTTP 401 no key" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--from", "5", "--to", "5"), "--to 5: must be later than --from 5"),
        (("--api-key-env", "NOBODY_SET_THIS"), "--api-key-env NOBODY_SET_THIS: this variable is not set"),
        (("--out", "/nowhere/out.json"), "/nowhere/out.json: cannot be written"),
        ((), "does not say which model is served"),
    ],
)
async def test_mistakes_are_one_line_and_exit_code_two(tmp_path, arguments, told):
    argv = ["replay", "http://127.0.0.1:9", str(written(tmp_path, row())), *arguments]
    error = (await asyncio.to_thread(CliRunner().invoke, benchmarking.bench, argv)).exception
    assert isinstance(error, UserError)  # the command line makes it one line and exit code 2
    assert told in str(error)
    assert "\n" not in str(error)


async def test_the_model_is_the_first_that_is_listed(tmp_path):
    async def serve(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(plain(200, b'{"data":[{"id":"listed"}]}'))
        await writer.drain()
        writer.close()

    from pdcluster.replay.exchange import parse_target
    from pdcluster.replay.replaying import find_model

    asked = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
    assert await asyncio.to_thread(find_model, target) == "listed"
    server.close()
    assert b"authorization: bearer key" in asked[0].lower()
