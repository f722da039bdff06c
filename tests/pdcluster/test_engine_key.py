"""The engines' key: where it goes, and that it is seen nowhere."""

import json
import os
import sys
from dataclasses import replace

import httpx
import pytest

from pdcluster.backends.local import LocalBackend
from pdcluster.engine_args import SCRUBBED
from pdcluster.engine_key import EngineAuth, refuse_unusable_key
from pdcluster.errors import UserError
from pdcluster.inventory import Inventory
from pdcluster.model_facts import Checkpoint
from pdcluster.plan import make_plan
from pdcluster.spec_loading import load_spec
from pdcluster.state import RunDirectory

KEY = "never-shown-4711"
INHERITED = {**os.environ, "PDCLUSTER_ENGINE_API_KEY": KEY, "PDCLUSTER_API_KEYS": "a=clients-never-shown"}
CPU = Inventory("cpu", cores={0: (0, 1)}, memory_bytes=10**12, available_bytes=10**12)


def plan(*, keyed=True):
    return make_plan(load_spec(), CPU, Checkpoint("/m", local=True, facts=None), "python", keyed=keyed)


def test_engines_get_it_under_vllms_name_and_the_proxy_inherits_it():
    made = plan()
    for instance in made.instances:
        environment = instance.full_environment(INHERITED)
        assert environment["VLLM_API_KEY"] == KEY
        assert not {"PDCLUSTER_ENGINE_API_KEY", "PDCLUSTER_API_KEYS"} & environment.keys()
    proxy = made.proxy.full_environment(INHERITED)
    assert proxy["PDCLUSTER_ENGINE_API_KEY"] == KEY
    assert proxy["PDCLUSTER_API_KEYS"] == INHERITED["PDCLUSTER_API_KEYS"]
    assert "VLLM_API_KEY" not in proxy


def test_without_a_key_engines_get_none_not_even_one_that_was_set_for_vllm():
    made = plan(keyed=False)
    for program in (*made.instances, made.proxy):
        assert "VLLM_API_KEY" not in program.full_environment({"VLLM_API_KEY": "someone's"})
    assert "PDCLUSTER_ENGINE_API_KEY" in SCRUBBED["VLLM_API_KEY"]


def test_the_plan_holds_where_to_take_it_from_and_not_the_key():
    made = plan()
    shown = json.dumps(made.to_json()) + repr(made) + "".join(item.shell() for item in (*made.instances, made.proxy))
    assert KEY not in shown
    assert made.to_json()["instances"][0]["environment"]["VLLM_API_KEY"] == "(hidden)"
    assert 'VLLM_API_KEY="${PDCLUSTER_ENGINE_API_KEY}"' in made.instances[0].shell()


def test_a_started_engine_has_it_in_its_environment_and_not_in_its_arguments(tmp_path):
    directory = RunDirectory.of(tmp_path, "default")
    directory.create()
    backend = LocalBackend(directory, INHERITED)
    code = "import os; print(os.environ['VLLM_API_KEY'], 'PDCLUSTER_ENGINE_API_KEY' in os.environ)"
    instance = replace(plan().instances[0], argv=(sys.executable, "-c", code))
    handle = backend.start(instance)
    backend._children[handle.pid].wait(timeout=20)
    assert backend.logs(instance.name, 5) == [f"{KEY} False"]
    assert KEY not in repr(instance)


def test_it_is_sent_to_engines_and_to_no_other_address():
    seen = {}

    def answer(request):
        seen[str(request.url)] = request.headers.get("authorization")
        return httpx.Response(200)

    auth = EngineAuth({"PDCLUSTER_ENGINE_API_KEY": KEY}, ["http://127.0.0.1:18100", "http://[::1]:80"])
    with httpx.Client(transport=httpx.MockTransport(answer), auth=auth) as client:
        for url in (
            "http://127.0.0.1:18100/v1/completions",
            "http://[::1]/health",
            "http://127.0.0.1:8000/ready",
            "https://127.0.0.1:18100/health",
        ):
            client.get(url)
    assert list(seen.values()) == [f"Bearer {KEY}", f"Bearer {KEY}", None, None]
    assert KEY not in repr(auth)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "k\u00e9y"])
def test_a_key_that_no_header_carries_is_refused_and_not_repeated(key):
    with pytest.raises(UserError, match="PDCLUSTER_ENGINE_API_KEY: has a space") as caught:
        refuse_unusable_key({"PDCLUSTER_ENGINE_API_KEY": key})
    assert key not in str(caught.value)
    refuse_unusable_key({"PDCLUSTER_ENGINE_API_KEY": ""})
    refuse_unusable_key({})
