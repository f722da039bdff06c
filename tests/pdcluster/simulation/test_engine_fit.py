"""`bench engine`: constants are found again in measurements, with noise and through the wire; what can't be is told."""

import asyncio
import json
import random
import time
from dataclasses import replace

import pytest

from pdcluster.bench.engine_fit import (
    DecodePoint,
    Measured,
    PrefillPoint,
    fit_profile,
    forecasts,
    least_squares,
    shared_steps,
)
from pdcluster.bench.engine_probe import Probe, Sweep, doubling
from pdcluster.errors import LaunchError, UserError
from pdcluster.replay.exchange import parse_target
from pdcluster.simulation.profile import EngineProfile

TRUE = replace(
    EngineProfile(),
    prefill_tokens_per_s=9000.0,
    prefill_base_s=0.004,
    prefill_pair_s=2e-8,
    decode_base_s=0.012,
    decode_seq_s=0.0007,
    decode_token_s=3e-7,
)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def measured(true=TRUE, noise=0.0, seed=1):
    rng = random.Random(seed)

    def noisy(seconds):
        return seconds * (1.0 + rng.gauss(0.0, noise))

    steps = {tokens: 1 if true.chunk_tokens is None else -(-tokens // true.chunk_tokens) for tokens in LENGTHS}
    prefill = [
        PrefillPoint(tokens, noisy(steps[tokens] * true.prefill_base_s + true.prefill_s(tokens, 0)))
        for tokens in LENGTHS
    ]
    decode = [
        DecodePoint(batch, batch * context, noisy(true.decode_s(batch, batch * context)))
        for batch in (1, 2, 4, 8, 16, 32)
        for context in (64, 2048)
    ]
    return Measured("http://engine", tuple(prefill), tuple(decode), 9000, 16, 500)


def constants(profile):
    names = (
        "prefill_tokens_per_s",
        "prefill_base_s",
        "prefill_pair_s",
        "decode_base_s",
        "decode_seq_s",
        "decode_token_s",
    )
    return {name: getattr(profile, name) for name in names}


@pytest.mark.parametrize("chunk", [None, 1024])
def test_exact_measurements_give_the_constants_back(chunk):
    true = replace(TRUE, chunk_tokens=chunk)
    fitted = fit_profile(measured(true), replace(EngineProfile(), chunk_tokens=chunk))
    assert constants(fitted) == pytest.approx(constants(true), rel=1e-6)
    assert fitted.fit.worst < 1e-6
    assert (fitted.fit.engine, fitted.fit.points) == ("http://engine", 20)
    assert (fitted.max_model_len, fitted.block_tokens, fitted.kv_blocks, fitted.cache_blocks) == (9000, 16, 500, None)


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_forecasts_by_no_more_than_the_noise_and_is_stated(seed):
    points = measured(noise=0.05, seed=seed)
    fitted = fit_profile(points, EngineProfile())
    assert 0.01 < fitted.fit.prefill_error < 0.08
    assert 0.01 < fitted.fit.decode_error < 0.08
    assert min(constants(fitted).values()) >= 0.0
    clean = forecasts(measured(), fitted)
    assert max(abs(forecast.error) for forecast in clean) < 0.12


def test_what_the_engine_does_not_say_stays_the_bases():
    points = replace(measured(), max_model_len=None, block_tokens=None, kv_blocks=None)
    base = replace(EngineProfile(), lease_s=12.0, max_num_seqs=5, transfer_latency_s=0.5)
    fitted = fit_profile(points, base)
    for name in (
        "max_model_len",
        "block_tokens",
        "kv_blocks",
        "cache_blocks",
        "lease_s",
        "max_num_seqs",
        "transfer_latency_s",
    ):
        assert getattr(fitted, name) == getattr(base, name)


def test_constants_are_never_negative():
    # A line through these falls to the left of zero.
    found = least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1.0, 3.0, 5.0])
    assert found[0] == 0.0
    assert found[1] == pytest.approx(1.256, rel=0.001)  # errors are relative: the small values count most
    assert least_squares([(0.0, 0.0)], [1.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prefill": ()}, "--max-prompt"),
        ({"prefill": (PrefillPoint(64, 1.0), PrefillPoint(64, 1.1))}, "--max-prompt"),
        ({"decode": ()}, "--max-batch"),
    ],
)
def test_too_few_points_are_told_with_what_to_do(change, told):
    with pytest.raises(UserError, match=told):
        fit_profile(replace(measured(), **change), EngineProfile())


def test_a_steps_time_is_that_of_the_steps_that_all_share():
    rng = random.Random(4)
    # Three sequences, begun some steps apart; a step takes 10 ms while all decode, 4 ms before and after that.
    ends = [0.004 * step for step in range(1, 7)]
    ends += [ends[-1] + 0.01 * step for step in range(1, 31)]
    ends += [ends[-1] + 0.004 * step for step in range(1, 7)]
    times = [[moment + rng.random() * 0.002 for moment in ends[start : start + 36]] for start in (0, 3, 6)]
    seconds, made = shared_steps(times, 36)
    assert seconds == pytest.approx(0.01, rel=0.01)
    assert made == pytest.approx((6 + 3 + 0) + 3 * 15, abs=3)
    # The same, told in events of two tokens each.
    halved = [each[::2] for each in times]
    assert shared_steps(halved, 36)[0] == pytest.approx(0.01, rel=0.02)
    assert shared_steps([times[0][:10], times[2]], 36) is None


def test_numbers_double_up_to_the_last():
    assert doubling(64, 500) == [64, 128, 256, 500]
    assert doubling(1, 8) == [1, 2, 4, 8]
    assert doubling(1, 1) == [1]
    assert doubling(64, 20) == [20]
    assert doubling(1, 0) == []


SERVED = replace(
    EngineProfile(),
    prefill_tokens_per_s=5000.0,
    prefill_base_s=0.02,
    decode_base_s=0.012,
    decode_seq_s=0.002,
    decode_token_s=1e-6,
    max_num_seqs=8,
    block_tokens=16,
    kv_blocks=400,
    cache_blocks=None,
    max_model_len=2000,
)


async def probed(serving, profile, sweep, say=lambda _: None):
    async with serving(1, 0, profile=profile) as client:
        target = parse_target(client.engines.urls["prefill-0"])
        return await Probe(target, "m", sweep, asyncio.get_running_loop().time, say).run()


def test_an_engine_on_the_wire_is_found_again(serving, in_no_time):
    said = []
    sweep = Sweep(max_prompt=1024, max_batch=8, steps=48, repeats=2)
    points = in_no_time(probed(serving, SERVED, sweep, said.append))
    fitted = fit_profile(points, EngineProfile())
    assert [point.tokens for point in points.prefill] == [64, 128, 256, 512, 1024]
    # Five of the long fit in its memory.
    assert [point.sequences for point in points.decode] == [1, 2, 4, 8, 1, 2, 4, 5]
    assert (fitted.max_model_len, fitted.block_tokens, fitted.kv_blocks) == (2000, 16, 400)
    assert fitted.fit.prefill_error < 0.02
    assert fitted.fit.decode_error < 0.02
    assert fitted.prefill_tokens_per_s == pytest.approx(5000.0, rel=0.03)
    assert fitted.prefill_base_s == pytest.approx(0.02, rel=0.05)
    assert fitted.decode_base_s == pytest.approx(0.012, rel=0.03)
    assert fitted.decode_seq_s == pytest.approx(0.002, rel=0.03)
    assert fitted.decode_token_s == pytest.approx(1e-6, rel=0.15)
    assert len(said) == 13


def test_a_batch_larger_than_the_engines_is_told(serving, in_no_time):
    narrow = replace(SERVED, max_num_seqs=2)
    with pytest.raises(LaunchError, match="4 sequences never decode at once: lower --max-batch"):
        in_no_time(probed(serving, narrow, Sweep(max_prompt=128, max_batch=4, steps=16, repeats=1)))


async def answering(reader, writer, body):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    writer.close()


async def test_what_is_no_engine_is_told():
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    for body, error, told in (
        (b"hello", UserError, "is no engine that can be measured"),
        (models, LaunchError, "64 \\+ 2 tokens failed: stream without its end"),
    ):
        server = await asyncio.start_server(
            lambda reader, writer, body=body: answering(reader, writer, body), "127.0.0.1"
        )
        async with server:
            target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(error, match=told):
                await Probe(target, "m", Sweep(), time.perf_counter, lambda _: None).run()


async def test_the_command_writes_a_profile_that_simulate_takes(serving, tmp_path, capsys):
    from pdcluster.commands.fitting import engine
    from pdcluster.simulation.profile import load_profile

    quick = replace(SERVED, prefill_base_s=0.0, prefill_tokens_per_s=20_000.0, decode_base_s=0.004)
    async with serving(1, 0, profile=quick) as client:
        url = client.engines.urls["prefill-0"]

        def command(**more):
            engine(url, out=tmp_path / "p.json", max_prompt=128, max_batch=1, steps=16, repeats=1, **more)

        await asyncio.to_thread(command, max_num_seqs=6, chunk_tokens=512)
        said = capsys.readouterr()
        await asyncio.to_thread(command, as_json=True)
        told = json.loads(capsys.readouterr().out)
    assert "mean error: prefill" in said.out
    assert "not measured: seats, transfers, lease" in said.out
    assert "prefill of 64 tokens:" in said.err
    profile = load_profile(tmp_path / "p.json")
    assert told["profile"]["fit"]["engine"] == profile.fit.engine == url
    assert [point["what"] for point in told["points"]][:2] == ["prefill of 64 tokens", "prefill of 128 tokens"]
