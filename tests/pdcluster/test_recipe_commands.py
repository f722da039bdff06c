"""`pdcluster recipe ...` as a user meets it."""

import json
import subprocess
import sys

import pytest

K3 = "moonshotai/Kimi-K3"


def pdcluster(*arguments):
    return subprocess.run([sys.executable, "-m", "pdcluster", *arguments], capture_output=True, text=True, timeout=60)


def run(*arguments):
    return pdcluster("recipe", *arguments)


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


@pytest.mark.parametrize("verb", ["list", "show", "resolve", "diff", "verify", "lint"])
def test_every_verb_has_help_with_examples(verb):
    done = run(verb, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout


def test_plan_prints_pools_every_nodes_command_and_the_proxy_without_a_gpu():
    done = pdcluster(
        "plan", "--recipe", K3, "--variant", "nvfp4", "--hardware", "gb300", "--feature", "reasoning",
        "--prefill", "2", "--decode", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "prefill  2 x 2 nodes, TP 8, experts over all ranks, dspark of 8 tokens"
    assert lines[2] == "decode   4 x 4 nodes, DP 16, experts over all ranks, dspark of 8 tokens"
    assert sum(" on $" in line for line in lines) == 2 * 2 + 4 * 4
    assert any(line.strip().startswith("--reasoning-parser kimi_k3") for line in lines)
    assert "planned for gb300 as its profile declares it: no host was looked at" in done.stdout


def test_plan_for_a_shell_leaves_the_recipes_variables_to_it():
    done = pdcluster("plan", "--recipe", K3, "--hardware", "b300", "--decode-hosts", "d1,d2", "--shell")
    lines = dict(zip(done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2], strict=True))
    assert '--host "$PREFILL_0_NODE_1"' in lines["# prefill-0"]
    assert 'GLOO_SOCKET_IFNAME="$IFACE_NAME"' in lines["# decode-0-node-2"]
    assert "--decode decode-0-node-2=http://d2:18100" in lines["# proxy"]
    shell = f"set -u; PREFILL_0_NODE_1=p IFACE_NAME=e; echo {lines['# decode-0-node-2'].split(' vllm ')[0]}"
    assert "=e" in subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout


def test_every_strategy_prints_its_commands_and_all_of_them_a_table():
    done = pdcluster("plan", "--recipe", K3, "--hardware", "b300", "--strategy", "single_node_tp")
    assert "single: vllm serve moonshotai/Kimi-K3" in done.stdout
    assert "launch` starts pd_cluster" in done.stderr
    cells = json.loads(pdcluster("plan", "--recipe", K3, "--strategy", "all", "--json").stdout)
    assert len(cells) == 4 * 10 * 7
    assert all(cell["told"] and (cell["resolves"] or cell["instead"]) for cell in cells)
    assert "140 resolve, 140 are refused with a reason" in pdcluster("plan", "--recipe", K3, "--strategy", "all").stdout


def test_plan_explains_one_setting_from_the_plan_down_to_the_recipes_layers():
    done = pdcluster(
        "plan",
        "--recipe",
        K3,
        "--hardware",
        "h200",
        "--set",
        "pools.decode.max_num_seqs=7",
        "--explain",
        "max-num-seqs",
    )
    assert "decode pool: --max-num-seqs 7\n  from --set pools.decode.max_num_seqs" in done.stdout
    assert "instead of --max-num-seqs 8" in done.stdout
    assert "no program of the plan has it" in pdcluster("plan", "--recipe", K3, "--explain", "nonsense").stderr


def test_a_count_of_devices_that_no_source_declares_stays_a_variable_in_the_plan():
    done = pdcluster("plan", "--recipe", K3, "--variant", "ascend_w4a8")
    assert "--tensor-parallel-size $GPUS_PER_NODE" in done.stdout
    assert "--gpus-per-node makes this a plan" in done.stderr
    assert "TP 16" in pdcluster("plan", "--recipe", K3, "--variant", "ascend_w4a8", "--gpus-per-node", "16").stdout


def test_launch_refuses_what_runs_on_other_hosts():
    done = pdcluster("launch", "--recipe", K3, "--variant", "nvfp4", "--hardware", "gb300")
    assert done.returncode == 2
    assert "plan --shell" in done.stderr
