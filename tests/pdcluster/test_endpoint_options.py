"""Keys, TLS, workers and the admin port of the endpoint, from the spec to the proxy's command line."""

from itertools import pairwise

import pytest
from typer.testing import CliRunner

from pdcluster.cli import app
from pdcluster.engine_args import scrub
from pdcluster.errors import SpecError
from pdcluster.preflight import Prepared, missing_files
from pdcluster.spec_loading import load_spec, parse_set_flags
from tests.pdcluster.test_plan import plan

SET = [
    "proxy.workers=3",
    "proxy.admin_port=8101",
    "proxy.api_key_file=keys.yaml",
    "proxy.tokens_per_minute=9000",
    "proxy.tls_certificate=chain.pem",
    "proxy.tls_key=key.pem",
    "proxy.tls_client_ca=ca.pem",
    'proxy.cors_origins=["https://chat.example"]',
]


def loaded(*assignments):
    return load_spec(None, parse_set_flags(["model=tiny", *assignments]))


def test_every_option_of_the_endpoint_reaches_the_proxy_and_defaults_add_none():
    argv = plan(*SET).proxy.argv
    pairs = dict(pairwise(argv))
    assert pairs["--workers"] == "3"
    assert (pairs["--api-key-file"], pairs["--tokens-per-minute"]) == ("keys.yaml", "9000")
    assert (pairs["--tls-certificate"], pairs["--tls-key"], pairs["--tls-client-ca"]) == (
        "chain.pem",
        "key.pem",
        "ca.pem",
    )
    assert pairs["--cors-origin"] == "https://chat.example"
    plain = plan().proxy.argv
    assert not set(plain) & {"--workers", "--api-key-file", "--tls-certificate", "--cors-origin", "--admin-port"}


def test_with_tls_the_endpoint_is_https_and_a_client_ca_moves_the_launchers_probe_to_the_admin_port():
    proxy = plan(*SET).proxy
    assert (proxy.url, proxy.probe_url) == ("https://127.0.0.1:8000", "http://127.0.0.1:8101")


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["proxy.tls_key=k"], "need tls_certificate"),
        (["proxy.tls_certificate=c", "proxy.tls_client_ca=ca"], "set admin_port too"),
        (["proxy.workers=0"], "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_work_together_are_refused(assignments, words):
    with pytest.raises(SpecError, match=words):
        loaded(*assignments)


def test_files_that_are_not_there_are_named_with_their_key(tmp_path):
    there = tmp_path / "chain.pem"
    there.touch()
    spec = loaded(f"proxy.tls_certificate={there}", "proxy.api_key_file=/nowhere/keys.yaml")
    problems = missing_files(Prepared(spec, None, None))
    assert [problem.where for problem in problems] == ["proxy.api_key_file"]


def test_the_engines_key_reaches_engines_by_the_environment_only(monkeypatch):
    assert scrub({"PDCLUSTER_ENGINE_API_KEY": "sk-engine", "VLLM_API_KEY": "other"})["VLLM_API_KEY"] == "sk-engine"
    assert "VLLM_API_KEY" not in scrub({"VLLM_API_KEY": "other"})
    monkeypatch.setenv("PDCLUSTER_ENGINE_API_KEY", "sk-engine")
    monkeypatch.setenv("PDCLUSTER_API_KEYS", "a=sk-client-key")
    for arguments in (["plan", "--json"], ["plan", "--shell"]):
        shown = CliRunner().invoke(app, [*arguments, "--model", "tiny"])
        assert "sk-engine" not in shown.output
        assert "sk-client" not in shown.output
