"""The README says what is true: its files exist, its spec is valid, its commands and routes are ours."""

import re
from pathlib import Path

from pdcluster.compat import find_problems
from pdcluster.model_facts import ModelFacts
from pdcluster.spec_loading import load_spec
from proxy.api_keys import load_key_file
from proxy.request import KINDS, PASSED_ON

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MLA = ModelFacts("DeepseekV3ForCausalLM", 163840, attention_heads=128, kv_heads=128, is_mla=True, weight_bytes=0)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_cluster_spec_is_valid_and_breaks_no_rule(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(blocks("yaml")[0])
    spec = load_spec(path).spec
    assert find_problems(spec, MLA) == []
    assert spec.pools.decode.decode_context_parallel_size == 8


def test_the_endpoints_options_and_the_key_file_are_valid(tmp_path):
    spec, keys = blocks("yaml")[1:3]
    path = tmp_path / "cluster.yaml"
    path.write_text(spec)
    proxy = load_spec(path).spec.proxy
    assert (proxy.workers, proxy.admin_port, proxy.requests_per_minute) == (2, 8001, 600)
    path.write_text(keys)
    found = load_key_file(path)[0]
    assert [key.name for key in found] == ["team-a", "team-b"]


def test_scripts_and_links_point_at_files_that_exist():
    for path in re.findall(r"bash (\S+\.sh)", README):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / path).exists(), path


def test_every_command_is_run_by_ci_or_by_the_end_to_end_test_of_the_readme():
    run = "".join(blocks("bash")[1:2])  # tests/e2e/test_readme_commands.py runs this block as it stands
    ci = (ROOT / ".ci" / "run").read_text()
    gpu = (
        "pip install 'pdcluster[cuda]'",
        "pdcluster launch --config cluster.yaml",
    )  # a GPU host's; checked as a spec above
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split("#")[0].strip()
            assert not command or command in ci or command in gpu or command.split(" ")[0] in run, command


def test_the_routes_named_are_the_routes_there_are():
    for route in (*KINDS, *PASSED_ON, "/v1/models", "/health", "/ready", "/metrics"):
        if route not in ("/score", "/rerank", "/v2/rerank"):  # other spellings of ones that are named
            assert f"`{route}`" in README, route
