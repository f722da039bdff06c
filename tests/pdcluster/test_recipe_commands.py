"""`pdcluster recipe ...` as a user meets it."""

import json
import subprocess
import sys

import pytest

K3 = "moonshotai/Kimi-K3"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pdcluster", "recipe", *arguments], capture_output=True, text=True, timeout=60
    )


def test_list_and_show_answer_people_and_machines():
    assert K3 in run("list").stdout
    assert json.loads(run("list", "kimi", "--json").stdout)[0]["minimum_vllm"] == "0.29.0"
    assert "declared_minimum_gb    1680" in run("show", K3).stdout
    assert json.loads(run("show", K3, "--json").stdout)["variants"]["fp8"]["precision"] == "fp8"


def test_resolve_prints_each_setting_with_its_origin_and_where_it_was_declared():
    done = run("resolve", K3, "--hardware", "b300", "--feature", "reasoning")
    assert done.returncode == 0, done.stderr
    assert "hardware_overrides.blackwell.extra_args, declared at 8959cf64189c (2026-08-21)" in done.stdout
    assert "taken by default: variant default, strategy single_node_tp" in done.stderr


def test_resolve_in_json_holds_argv_environment_and_history():
    found = json.loads(run("resolve", K3, "--hardware", "h200", "--strategy", "pd_cluster", "--json").stdout)
    command = found["commands"]["decode-node-1"]
    assert command["argv"][:3] == ["vllm", "serve", K3]
    tuned = next(item for item in command["arguments"] if item["tokens"][0] == "--max-num-seqs")
    assert (tuned["tokens"][1], tuned["displaced"][0]["tokens"][1]) == ("5", "8")


def test_explain_tells_one_settings_history():
    done = run("resolve", K3, "--hardware", "h200", "--strategy", "pd_cluster", "--explain", "--max-num-seqs")
    assert "instead of --max-num-seqs 8, from strategy override" in done.stdout


def test_a_forbidden_choice_ends_with_two_and_says_what_to_choose():
    done = run("resolve", K3, "--variant", "nvfp4", "--hardware", "h200")
    assert done.returncode == 2
    assert "error: precision nvfp4 needs generation blackwell" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("resolve", "moonshot/Kimi-K3").stderr.count("did you mean moonshotai/Kimi-K3?") == 1


def test_diff_ends_with_one_where_settings_differ():
    done = run("diff", K3, "hardware=b300", "hardware=b300,variant=nvfp4")
    assert done.returncode == 1
    assert "RedHatAI/Kimi-K3-NVFP4" in done.stdout
    assert run("diff", K3, "hardware=b300", "hardware=b300").returncode == 0
    assert "did you mean hardware?" in run("diff", K3, "hardwear=b300", "hardware=b300").stderr


@pytest.mark.parametrize("verb", ["list", "show", "resolve", "diff", "verify"])
def test_every_verb_has_help_with_examples(verb):
    done = run(verb, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
