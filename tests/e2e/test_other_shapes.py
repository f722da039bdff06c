"""Pools that differ from one another, another kind of model, a launcher that is killed, and vLLM's own parser."""

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from pdcluster import processes
from tests.e2e.answers import Ties, ask, same, token_prompt
from tests.e2e.conftest import aggregated_engine, eventually, free_port, metric, wait_healthy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LENGTHS = (1, 17, 128, 129, 300, 513, 1500)


def completion(prompt, model="tiny", tokens=12):
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2}


def test_prefill_with_tp_2_and_decode_with_tp_1_and_ngram_speculation_give_the_aggregated_answer(
    new_cluster, aggregated
):
    cluster = new_cluster(
        "shapes",
        "--model",
        "tiny",
        "--set",
        "pools.prefill.tensor_parallel_size=2",
        "--set",
        "pools.decode.speculative={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}",
    )
    wait_healthy(aggregated)
    ties = Ties()
    for length in LENGTHS:
        for stream in (False, True):
            request = completion(token_prompt(length, seed=11))
            same(ask(aggregated, "completions", request), ask(cluster.url, "completions", request, stream=stream), ties)
    repetitive = completion(token_prompt(12, seed=12) * 20, tokens=48)
    same(ask(aggregated, "completions", repetitive), ask(cluster.url, "completions", repetitive), ties)
    decode = cluster.engines("decode")["decode-0"]
    assert metric(decode, "vllm:spec_decode_num_draft_tokens_total") > 0
    assert metric(decode, "vllm:nixl_bytes_transferred_sum") > 0
    cluster.down()  # its cores and ports are for the next test


def test_a_model_with_latent_attention_and_a_launcher_that_is_killed(new_cluster, tmp_path):
    with aggregated_engine("tiny-mla", tmp_path) as aggregated:
        cluster = new_cluster("mla", "--model", "tiny-mla")
        wait_healthy(aggregated)
        ties = Ties()
        for length in LENGTHS:
            for stream in (False, True):
                request = completion(token_prompt(length, seed=21), model="tiny-mla")
                got = ask(cluster.url, "completions", request, stream=stream)
                assert got.path == "disaggregated"
                same(ask(aggregated, "completions", request), got, ties)
        assert metric(cluster.engines("decode")["decode-0"], "vllm:nixl_bytes_transferred_sum") > 0
    after_kill_9_of_the_launcher_down_leaves_no_process(cluster)


def after_kill_9_of_the_launcher_down_leaves_no_process(cluster):
    """Checked on the cluster above, since each launch takes a minute."""
    members = cluster.processes()
    assert len(members) >= 7  # API server, engine core and worker of two engines, and the proxy
    launcher = cluster.record.launcher_pid
    os.kill(launcher, signal.SIGKILL)
    assert eventually(lambda: not processes.is_running(launcher, cluster.record.launcher_started))
    assert cluster.run("status").returncode == 1
    assert httpx.get(f"{cluster.url}/ready", timeout=10, trust_env=False).status_code == 200
    assert cluster.run("down", limit=120).returncode == 0
    assert not [process for process in members if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_vllms_own_parser_judges_the_planned_arguments(tmp_path):
    environment = {**os.environ, "PDCLUSTER_CACHE": str(tmp_path)}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 2048}')

    def check(*assignments):
        command = [
            sys.executable,
            "-m",
            "pdcluster",
            "check",
            "--port",
            str(free_port()),
            "--model",
            str(tmp_path / "model"),
        ]
        command += [item for assignment in assignments for item in ("--set", assignment)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    good = check("pools.decode.speculative={method: ngram, num_speculative_tokens: 3}", "pools.decode.max_num_seqs=4")
    assert good.returncode == 0, good.stderr
    bad = check(
        "pools.decode.extra_args=[--no-such-flag]",
        "pools.prefill.kv_cache_dtype=fp1",
        "pools.decode.kv_cache_dtype=fp1",
    )
    assert bad.returncode == 2
    assert "pools.decode: vLLM 0.32.0 refuses the arguments" in bad.stderr
    assert "pools.prefill: vLLM 0.32.0 refuses the arguments" in bad.stderr
    assert "Traceback" not in bad.stderr
