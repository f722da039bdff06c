import pytest

from pdcluster.compat import RULES, find_problems
from pdcluster.model_facts import ModelFacts
from pdcluster.spec import ClusterSpec

DENSE = ModelFacts("LlamaForCausalLM", 8192, attention_heads=16, kv_heads=4, is_mla=False, weight_bytes=10**9)
MLA = ModelFacts("DeepseekV3ForCausalLM", 163840, attention_heads=128, kv_heads=128, is_mla=True, weight_bytes=10**9)


def problems(prefill=None, decode=None, facts=DENSE, proxy=None):
    spec = ClusterSpec.model_validate(
        {"pools": {"prefill": prefill or {}, "decode": decode or {}}, "proxy": proxy or {}}
    )
    return [str(problem) for problem in find_problems(spec, facts)]


def test_the_default_spec_breaks_no_rule():
    assert problems() == []


@pytest.mark.parametrize(
    ("rule", "prefill", "decode", "facts", "where", "words"),
    [
        ("dcp-divides-tp", {}, {"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, MLA, "pools.decode.decode_context_parallel_size", "allowed: 1, 4"),
        ("dcp-transfer", {}, {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}, MLA, "pools.decode.decode_context_parallel_size", "allowed: 1, 8"),
        ("dcp-transfer", {}, {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}, DENSE, "pools.decode.decode_context_parallel_size", "no MLA"),
        ("dcp-pair", {"tensor_parallel_size": 6, "decode_context_parallel_size": 6}, {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}, None, "pools.decode.decode_context_parallel_size", "divide one another"),
        ("dcp-settings", {}, {"dcp_comm_backend": "a2a"}, DENSE, "pools.decode.dcp_comm_backend", "no effect"),
        ("pcp-prefill", {}, {"prefill_context_parallel_size": 2}, MLA, "pools.decode.prefill_context_parallel_size", "producers only"),
        ("same-draft", {}, {"speculative": {"method": "eagle3", "model": "draft"}}, DENSE, "pools.decode.speculative", "ngram, ngram_gpu, suffix"),
        ("same-draft", {"speculative": {"method": "mtp"}}, {"speculative": {"method": "eagle", "model": "x"}}, DENSE, "pools.prefill.speculative", "eagle in the decode pool"),
        ("tp-pair", {"tensor_parallel_size": 2}, {"tensor_parallel_size": 3}, None, "pools.decode.tensor_parallel_size", "divide the other"),
        ("tp-heads", {}, {"tensor_parallel_size": 3}, DENSE, "pools.decode.tensor_parallel_size", "16 attention heads"),
        ("tp-kv-heads", {"tensor_parallel_size": 8}, {}, DENSE, "pools.prefill.tensor_parallel_size", "use at most 4"),
        ("block-size", {"block_size": 64}, {"block_size": 32}, DENSE, "pools.decode.block_size", "multiple of prefill's"),
        ("block-size", {"block_size": 64}, {}, DENSE, "pools.decode.block_size", "set it in both"),
        ("same-types", {"kv_cache_dtype": "fp8"}, {}, DENSE, "pools.decode.kv_cache_dtype", "default against prefill's fp8"),
        ("same-flags", {"extra_args": ["--attention_backend=FLASHINFER"]}, {}, DENSE, "pools.decode.extra_args", "--attention-backend differs"),
        ("length", {}, {"max_model_len": 9000}, DENSE, "pools.decode.max_model_len", "use at most 8192"),
        ("length", {"max_model_len": 8000}, {"max_model_len": 4000}, DENSE, "pools.decode.max_model_len", "use at least 8000"),
        ("owned", {"extra_args": ["--port", "1"]}, {}, DENSE, "pools.prefill.extra_args", "set ports.base instead"),
        ("owned", {"extra_args": ["-tp=2"]}, {}, DENSE, "pools.prefill.extra_args", "set tensor_parallel_size instead"),
        ("owned", {}, {"env": {"VLLM_PORT": "1"}}, DENSE, "pools.decode.env.VLLM_PORT", "two engines would collide"),
        ("owned", {}, {"env": {"VLLM_API_KEY": "1"}}, DENSE, "pools.decode.env.VLLM_API_KEY", "set PDCLUSTER_ENGINE_API_KEY"),
        ("owned", {"extra_args": ["--api-key", "x"]}, {}, DENSE, "pools.prefill.extra_args", "set PDCLUSTER_ENGINE_API_KEY"),
        ("events-cache", {"kv_events": True, "extra_args": ["--no-enable-prefix-caching"]}, {}, DENSE, "pools.prefill.kv_events", "remove --no-enable-prefix-caching"),
        ("owned", {}, {"extra_args": ["--kv-events-config={}"]}, DENSE, "pools.decode.extra_args", "set kv_events instead"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_refused_with_key_path_reason_and_way_out(rule, prefill, decode, facts, where, words):
    found = [text for text in problems(prefill, decode, facts) if f"[{rule}," in text]
    assert found, problems(prefill, decode, facts)
    assert found[0].startswith(where)
    assert words in found[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "facts"),
    [
        ({}, {"tensor_parallel_size": 8, "decode_context_parallel_size": 8, "dcp_comm_backend": "a2a"}, MLA),
        ({"prefill_context_parallel_size": 2}, {}, MLA),
        ({}, {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}, DENSE),
        ({}, {"speculative": {"method": "suffix"}}, DENSE),
        ({"speculative": {"method": "mtp", "num_speculative_tokens": 1}}, {"speculative": {"method": "mtp", "num_speculative_tokens": 2}}, MLA),
        ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, DENSE),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 8}, DENSE),
        ({"block_size": 16}, {"block_size": 64}, DENSE),
        ({"max_model_len": 4000}, {"max_model_len": 8000}, DENSE),
        ({"extra_args": ["--attention-backend", "X"]}, {"extra_args": ["--attention_backend=X"]}, DENSE),
        ({}, {"max_model_len": 10**6}, None),
    ],
)  # fmt: skip
def test_what_the_protocol_allows_is_allowed(prefill, decode, facts):
    assert problems(prefill, decode, facts) == []


@pytest.mark.parametrize(
    ("rule", "proxy", "where", "words"),
    [
        ("tls-files", {"tls_key": "k"}, "proxy.tls_key", "set proxy.tls_certificate"),
        ("tls-files", {"tls_certificate": "c"}, "proxy.tls_certificate", "set proxy.tls_key"),
        ("tls-files", {"tls_client_ca": "a", "admin_port": 9000}, "proxy.tls_client_ca", "set proxy.tls_certificate and proxy.tls_key"),
        ("client-ca", {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}, "proxy.tls_client_ca", "set proxy.admin_port"),
        ("cors", {"cors_origins": ["*", "https://a.example"]}, "proxy.cors_origins", "give * alone"),
    ],
)  # fmt: skip
def test_a_broken_rule_of_the_endpoint_is_refused_likewise(rule, proxy, where, words):
    found = [text for text in problems(proxy=proxy) if f"[{rule}," in text]
    assert len(found) == 1
    assert found[0].startswith(f"{where}: ")
    assert words in found[0]


@pytest.mark.parametrize(("host", "refused"), [("fd00::1", True), ("::1", False), ("10.0.0.1", False)])
def test_kv_events_need_an_address_that_vllm_publishes_on(host, refused):
    spec = ClusterSpec.model_validate({"host": host, "pools": {"decode": {"kv_events": True}}})
    found = [str(problem) for problem in find_problems(spec, DENSE)]
    assert [text.startswith("pools.decode.kv_events") for text in found] == [True] * refused


def test_every_rule_has_a_name_of_its_own_a_reason_and_a_source():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.reason and rule.source for rule in RULES)
