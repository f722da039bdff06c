"""What the launcher does for the endpoint's keys, limits, TLS and admin port."""

import http.server
import re
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import trustme

from pdcluster.commands import launching
from pdcluster.endpoint_files import find_endpoint_problems
from pdcluster.errors import SpecError
from pdcluster.inventory import Inventory
from pdcluster.model_facts import Checkpoint
from pdcluster.plan import make_plan, proxy_probe_url
from pdcluster.preflight import Prepared, busy_ports
from pdcluster.spec_loading import load_spec, parse_set_flags

ROOT = Path(__file__).parent.parent.parent
CPU = Inventory("cpu", cores={0: (0, 1)}, memory_bytes=10**12, available_bytes=10**12)


def prepared(*assignments, keyed=False):
    loaded = load_spec(None, parse_set_flags(assignments))
    plan = make_plan(loaded, CPU, Checkpoint("/m", local=True, facts=None), "python", keyed=keyed)
    return Prepared(loaded, plan, CPU)


def values(argv, flag):
    return [argv[index + 1] for index, token in enumerate(argv) if token == flag]


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A CA, a certificate for 127.0.0.1 with its key, and another key."""
    directory = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    issued, other = ca.issue_cert("127.0.0.1"), ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(directory / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(directory / "key.pem"))
    other.private_key_pem.write_to_path(str(directory / "other-key.pem"))
    (directory / "text.pem").write_text("no PEM at all")
    (directory / "empty.pem").touch()
    return directory


@pytest.fixture
def https_server(tls):
    """Serve HTTPS on a free port; the headers of each request are in `seen`."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.seen = seen
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_proxy_of_which_nothing_is_asked_gets_none_of_the_flags():
    argv = prepared().plan.proxy.argv
    flags = ("--workers", "--api-key-file", "--tls-certificate", "--admin-port", "--cors-origin", "--tokens-per-minute")
    assert not set(flags) & set(argv)


def test_all_that_was_set_reaches_the_proxys_arguments_with_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plan = prepared(
        "proxy.workers=4",
        "proxy.api_key_file=keys.yaml",
        "proxy.tls_certificate=/tls/c.pem",
        "proxy.tls_key=/tls/k.pem",
        "proxy.tls_client_ca=/tls/ca.pem",
        "proxy.requests_per_minute=60",
        "proxy.tokens_per_minute=9000",
        "proxy.admin_port=9100",
        "proxy.cors_origins=[https://a.example, 'http://localhost:3000']",
    ).plan
    argv = plan.proxy.argv
    expected = {
        "--workers": ["4"],
        "--api-key-file": [str(tmp_path / "keys.yaml")],
        "--tls-certificate": ["/tls/c.pem"],
        "--tls-key": ["/tls/k.pem"],
        "--tls-client-ca": ["/tls/ca.pem"],
        "--requests-per-minute": ["60"],
        "--tokens-per-minute": ["9000"],
        "--admin-port": ["9100"],
        "--cors-origin": ["https://a.example", "http://localhost:3000"],
    }
    assert {flag: values(argv, flag) for flag in expected} == expected
    assert plan.proxy.url == "https://127.0.0.1:8000"
    assert all(instance.url.startswith("http://") for instance in plan.instances)


@pytest.mark.parametrize(
    ("assignments", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["proxy.admin_port=9100"], "http://127.0.0.1:8000"),
        (["proxy.tls_certificate=/c", "proxy.tls_key=/k", "proxy.host='::'"], "https://[::1]:8000"),
        (
            ["proxy.tls_certificate=/c", "proxy.tls_key=/k", "proxy.tls_client_ca=/a", "proxy.admin_port=9100"],
            "http://127.0.0.1:9100",
        ),
    ],
)
def test_health_is_asked_where_the_launcher_needs_no_certificate(assignments, url):
    assert proxy_probe_url(prepared(*assignments).loaded.spec.proxy) == url


@pytest.mark.parametrize(
    ("assignment", "where"),
    [
        ("proxy.workers=0", "proxy.workers"),
        ("proxy.admin_port=70000", "proxy.admin_port"),
        ("proxy.requests_per_minute=0", "proxy.requests_per_minute"),
        ("proxy.cors_origins=[a.example]", "proxy.cors_origins.0"),
        ("proxy.cors_origins=['https://a.example/path']", "proxy.cors_origins.0"),
        ("proxy.cors_origins=https://a.example", "proxy.cors_origins"),
        ("proxy.api_key_file=[a]", "proxy.api_key_file"),
        ("proxy.admin_port=8000", "proxy.admin_port: 8000 is proxy.port too"),
        ("proxy.admin_port=18100", "proxy.admin_port: 18100 is the http port of prefill-0 too"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_key_path(assignment, where):
    with pytest.raises(SpecError) as caught:
        prepared(assignment)
    assert str(caught.value).startswith(where)


def test_a_taken_admin_port_is_found_before_the_start(https_server):
    port = https_server.server_address[1]
    (problem,) = busy_ports(prepared(f"proxy.admin_port={port}", "proxy.port=1025", "ports.base=19100"))
    assert str(problem).startswith(f"proxy.admin_port: 127.0.0.1:{port}: ")
    assert "--set proxy.admin_port=" in problem.fix


def spec_with(tls, **files):
    assignments = [f"proxy.{name}={tls / file}" for name, file in files.items()]
    return load_spec(None, parse_set_flags(assignments)).spec.proxy


def test_good_files_are_no_problem(tls):
    proxy = spec_with(tls, tls_certificate="certificate.pem", tls_key="key.pem", tls_client_ca="ca.pem")
    assert find_endpoint_problems(proxy, {}) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"api_key_file": "none.yaml"}, r"proxy\.api_key_file: .*none\.yaml: cannot be read: no such file"),
        ({"api_key_file": "."}, r"proxy\.api_key_file: .*cannot be read: is a directory"),
        ({"api_key_file": "empty.pem"}, r"proxy\.api_key_file: .*is empty"),
        ({"tls_certificate": "none", "tls_key": "key.pem"}, r"proxy\.tls_certificate: .*cannot be read"),
        ({"tls_certificate": "text.pem", "tls_key": "key.pem"}, r"proxy\.tls_key: .*cannot be loaded.*both must be PEM"),
        ({"tls_certificate": "certificate.pem", "tls_key": "other-key.pem"}, r"proxy\.tls_key: .*is not the key of"),
        (
            {"tls_certificate": "certificate.pem", "tls_key": "key.pem", "tls_client_ca": "text.pem"},
            r"proxy\.tls_client_ca: .*holds no certificate",
        ),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_found_before_the_start(tls, files, words):
    (problem,) = find_endpoint_problems(spec_with(tls, **files), {})
    assert re.search(words, str(problem)), problem


def test_limits_without_any_key_are_refused():
    proxy = prepared("proxy.requests_per_minute=5").loaded.spec.proxy
    (problem,) = find_endpoint_problems(proxy, {})
    assert str(problem).startswith("proxy.requests_per_minute: ")
    assert find_endpoint_problems(proxy, {"PDCLUSTER_API_KEYS": "a=12345678"}) == []


def test_the_launcher_sees_a_tls_proxys_health_and_shows_it_no_key(https_server):
    port = https_server.server_address[1]
    ready = prepared("proxy.tls_certificate=/c", "proxy.tls_key=/k", f"proxy.port={port}", keyed=True)
    with launching._client(ready, {"PDCLUSTER_ENGINE_API_KEY": "engines-own-key"}) as client:
        assert client.get(proxy_probe_url(ready.loaded.spec.proxy) + "/ready").status_code == 200
    assert "authorization" not in {name.lower() for name in https_server.seen[0]}


def test_without_tls_the_launchers_client_trusts_no_unknown_server(https_server):
    with launching._client(prepared(), {}) as client, pytest.raises(httpx.ConnectError):
        client.get(f"https://127.0.0.1:{https_server.server_address[1]}/ready")


@pytest.mark.parametrize(("file", "trusted"), [("ca.pem", True), ("certificate.pem", True), (None, False)])
def test_the_question_script_verifies_against_the_certificate_or_its_ca(https_server, tls, file, trusted):
    url = f"https://127.0.0.1:{https_server.server_address[1]}"
    command = [sys.executable, str(ROOT / "deploy" / "ask.py"), url, "Why?", *([str(tls / file)] if file else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PDCLUSTER_API_KEY": "sk-of-mine"})
    assert ("CERTIFICATE_VERIFY_FAILED" in done.stderr) != trusted
    if trusted:
        assert https_server.seen[0]["authorization"] == "Bearer sk-of-mine"
