"""The command line as a user meets it: each call is a process of its own."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from pdcluster import preflight
from pdcluster.errors import UserError


@pytest.fixture
def pdcluster(tmp_path):
    """Run `pdcluster` with state and cache in a directory of the test's own."""
    environment = {**os.environ, "PDCLUSTER_HOME": str(tmp_path / "home"), "PDCLUSTER_CACHE": str(tmp_path / "cache")}

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "pdcluster", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment | variables,
            cwd=tmp_path,
        )

    return run


@pytest.fixture
def checkpoint(tmp_path):
    """A directory that looks like a small checkpoint."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "num_attention_heads": 4}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refused(done, *words):
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith("error: ") or "Usage:" in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_an_unknown_model_is_refused_with_the_nearest_name(pdcluster):
    refused(pdcluster("launch", "--model", "smolm2"), "model smolm2: unknown", "did you mean smollm2?")


def test_a_missing_checkpoint_is_refused(pdcluster):
    refused(pdcluster("launch", "--model", "/no/such/model"), "no such directory")


def test_a_directory_without_a_config_is_refused(pdcluster, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(pdcluster("plan", "--model", str(tmp_path / "empty")), "there is no config.json")


def test_zero_replicas_are_refused(pdcluster):
    refused(pdcluster("launch", "--prefill", "0"), "pools.prefill.replicas (--prefill)", "greater than or equal to 1")


def test_unreadable_yaml_is_refused_with_its_line(pdcluster, tmp_path):
    (tmp_path / "bad.yaml").write_text("model: [")
    refused(pdcluster("launch", "--config", "bad.yaml"), "bad.yaml:1:", "not valid YAML")


def test_more_devices_than_there_are_are_refused(pdcluster, checkpoint):
    refused(pdcluster("plan", "--model", str(checkpoint), "--set", "pools.decode.devices=[0]"), "pools.decode.devices")


def test_too_little_memory_is_refused(pdcluster, checkpoint):
    refused(pdcluster("plan", "--model", str(checkpoint), "--decode", "4000"), "memory: about", "--fit-memory")


def test_memory_that_is_short_starts_fewer_engines_where_that_was_asked_for(pdcluster, checkpoint):
    done = pdcluster("plan", "--model", str(checkpoint), "--decode", "4000", "--fit-memory", "--json")
    assert done.returncode == 0, done.stderr
    assert "memory is short" in done.stderr
    assert 2 <= len(json.loads(done.stdout)["instances"]) < 4000


def test_a_context_longer_than_the_models_is_refused(pdcluster, checkpoint):
    refused(
        pdcluster("launch", "--model", str(checkpoint), "--max-model-len", "4096"), "4096 tokens", "use at most 2048"
    )


def test_a_port_in_use_is_refused_with_the_port_and_its_purpose(pdcluster, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = pdcluster(
            "check", "--model", str(checkpoint), "--port", port, "--set", "pools.decode.kv_cache_dtype=none"
        )
        assert done.returncode == 2
        done = pdcluster("check", "--model", str(checkpoint), "--port", port)
    if "vLLM is not installed" in done.stderr:
        pytest.skip("vLLM is not installed here: check stops at that")
    refused(done, f"proxy.port: 127.0.0.1:{port}: address already in use")


@pytest.mark.parametrize(("missing", "words"), [("vllm", "vLLM is not installed"), ("nixl", "NIXL is not installed")])
def test_missing_packages_are_refused_with_what_to_install(monkeypatch, missing, words):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith(missing) else real(name) or object()
    )
    monkeypatch.setattr(preflight, "vllm_version", lambda: None if missing == "vllm" else "0.32.0")
    with pytest.raises(UserError, match=words):
        preflight.refuse_missing_packages()


def test_an_unknown_flag_and_an_unknown_verb_are_usage_errors(pdcluster):
    refused(pdcluster("launch", "--replicas", "2"), "--replicas")
    refused(pdcluster("lunch"), "lunch")


@pytest.mark.parametrize("verb", ["status", "logs", "down"])
def test_a_cluster_that_does_not_exist_is_refused_by_name(pdcluster, verb):
    refused(pdcluster(verb, "--name", "ghost"), "cluster ghost: not found")


def test_a_plan_is_the_same_twice_and_its_shell_lines_parse(pdcluster, checkpoint):
    arguments = ("plan", "--model", str(checkpoint), "--prefill", "2", "--decode", "2")
    first, second = (pdcluster(*arguments, "--json") for _ in range(2))
    assert first.stdout == second.stdout
    assert len(json.loads(first.stdout)["instances"]) == 4
    shell = pdcluster(*arguments, "--shell")
    assert subprocess.run(["sh", "-n"], input=shell.stdout, text=True).returncode == 0
    table = pdcluster(*arguments)
    assert "prefill-1" in table.stdout
    assert "--kv-transfer-config" in table.stdout


def test_the_schema_is_json(pdcluster):
    assert json.loads(pdcluster("schema").stdout)["title"] == "ClusterSpec"


def test_models_lists_the_embedded_ones(pdcluster):
    listed = json.loads(pdcluster("models", "--json").stdout)
    assert {model["name"] for model in listed} == {"smollm2", "tiny", "tiny-mla"}
    assert pdcluster("models").returncode == 0


def test_every_verb_has_help_with_an_example(pdcluster):
    verbs = re.findall(r"^  ([a-z]+) {2,}", pdcluster("--help").stdout, re.MULTILINE)
    assert {"launch", "plan", "check", "status", "logs", "down", "doctor", "models", "schema", "proxy"} <= set(verbs)
    for verb in verbs:
        done = pdcluster(verb, "--help")
        assert done.returncode == 0, done.stderr
        assert f"pdcluster {verb}" in done.stdout.replace("Usage: ", "", 1).partition("Examples:")[2], verb


def test_help_answers_without_heavy_imports(pdcluster):
    code = "import sys, pdcluster.cli; print(sorted({'pydantic','httpx','rich.live','yaml','psutil','fastapi','torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_output_into_a_closed_pipe_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m pdcluster schema | head -1"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_a_bug_is_one_line_with_a_report_and_its_own_exit_code(pdcluster, tmp_path):
    code = (
        "import sys; from pdcluster import cli; from pdcluster.commands import planning\n"
        "import pdcluster.spec_loading as s; s.json_schema = lambda: 1 / 0\n"
        "sys.argv = ['pdcluster', 'schema']; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 3
    assert "this is a bug in pdcluster: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in next(tmp_path.glob("pdcluster-bug-*.txt")).read_text()


def test_logs_can_be_followed(pdcluster, tmp_path):
    from pdcluster.state import ClusterRecord, RunDirectory, boot_id

    directory = RunDirectory.of(tmp_path / "home", "default")
    directory.create()
    directory.write(ClusterRecord("default", "r", "ready", 1, 0.0, boot_id(), "u", "m"))
    directory.log("decode-0").write_text("one\ntwo\n")
    assert pdcluster("logs", "decode-0", "-n", "1").stdout == "two\n"
    refused(pdcluster("logs", "decode-9"), "no log of decode-9", "there are: decode-0")
    follower = subprocess.Popen(
        [sys.executable, "-m", "pdcluster", "logs", "-f"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PDCLUSTER_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert follower.stdout.readline() == "decode-0 | one\n"
        assert follower.stdout.readline() == "decode-0 | two\n"
        with directory.log("decode-0").open("a") as file:
            file.write("three\n")
        assert follower.stdout.readline() == "decode-0 | three\n"
    finally:
        follower.kill()
        follower.wait()
        follower.stdout.close()


def test_down_ends_what_a_killed_launcher_left(pdcluster, tmp_path):
    from pdcluster.processes import is_running, start_time
    from pdcluster.state import ClusterRecord, ProcessRecord, RunDirectory, boot_id

    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    began = start_time(orphan.pid)
    directory = RunDirectory.of(tmp_path / "home", "default")
    directory.create()
    record = ClusterRecord("default", "r", "ready", 2**22 + 5, 1.0, boot_id(), "u", "m")
    directory.write(record.with_process(ProcessRecord("decode-0", "decode", "u", "healthy", orphan.pid, began)))
    assert pdcluster("status").returncode == 1
    done = pdcluster("down")
    assert done.returncode == 0, done.stderr
    orphan.wait(timeout=5)
    assert not is_running(orphan.pid, began)
    assert json.loads(pdcluster("status", "--json").stdout)["phase"] == "stopped"
    assert time.time() - directory.read().written < 30


@pytest.mark.parametrize("verb", ["status", "logs", "down"])
def test_a_name_that_is_a_path_is_refused(pdcluster, verb):
    refused(pdcluster(verb, "--name", "../../etc"), "small letters, digits and hyphens only")


def test_a_home_that_cannot_be_made_is_a_users_error():
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster", "launch", "--model", "tiny"],
        capture_output=True,
        text=True,
        env={**os.environ, "PDCLUSTER_HOME": "/proc/none"},
    )
    refused(done, "/proc/none", "set PDCLUSTER_HOME")


@pytest.mark.parametrize(
    ("flags", "key"), [(("--host", "999.1.1.1"), "proxy.host"), (("--set", "host=203.0.113.5"), "host")]
)
def test_an_address_that_is_not_this_hosts_is_one_line(pdcluster, checkpoint, flags, key):
    done = pdcluster("check", "--model", str(checkpoint), *flags)
    if "is not installed" in done.stderr:
        pytest.skip("vLLM or NIXL is not installed here: check stops at that")
    refused(done, f"error: {key}: {flags[1].removeprefix('host=')}")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_plan_prints_no_key_of_engines_or_clients_in_any_form(pdcluster, checkpoint):
    secrets = {"PDCLUSTER_ENGINE_API_KEY": "engines-never-shown", "PDCLUSTER_API_KEYS": "a=clients-never-shown"}
    for form in ([], ["--json"], ["--shell"]):
        done = pdcluster("plan", "--model", str(checkpoint), *form, **secrets)
        assert done.returncode == 0, done.stderr
        assert "VLLM_API_KEY" in done.stdout
        assert "never-shown" not in done.stdout + done.stderr


def test_a_key_file_that_is_not_there_is_refused_before_the_start(pdcluster, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = pdcluster("check", "--model", str(checkpoint), "--port", str(port), "--set", "proxy.api_key_file=none.yaml")
    refused(done, "proxy.api_key_file: ", "none.yaml: cannot be read")
