"""What the proxy would refuse is found before any engine starts."""

import sys

from pdcluster.plan import Program
from pdcluster.preflight import Prepared, refused_by_proxy


class Plan:
    def __init__(self, *flags):
        argv = (sys.executable, "-m", "proxy", "--decode", "http://127.0.0.1:1", *flags)
        self.proxy = Program("proxy", argv, (), "http://127.0.0.1:8000")


def test_what_the_proxy_accepts_is_no_problem_and_binds_nothing():
    assert refused_by_proxy(Prepared(None, Plan("--port", "1"), None), {}) == []


def test_keys_that_the_proxy_cannot_use_are_a_problem_and_are_not_shown(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("team: [sk-a-secret]\n")
    (problem,) = refused_by_proxy(Prepared(None, Plan("--api-key-file", str(keys)), None), {})
    assert str(keys) in problem.what
    assert "secret" not in problem.what
