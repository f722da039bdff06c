"""Where engines publish KV events and the proxy looks for them: the two ends must meet, in vLLM's own reading."""

import json

import pytest

from pdcluster.kv_events import engine_addresses, subscriber_addresses
from tests.pdcluster.test_plan import gpus, plan, value

EVENTS = ("pools.prefill.kv_events=true",)


def listens(address):
    """Tell what vLLM 0.32 does with an address: it connects to all that is neither a wildcard nor local."""
    return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


def of_rank(address, rank):
    """Move an address as vLLM 0.32 does for a further rank."""
    if not rank:
        return address
    assert "inproc" not in address
    assert "tcp" in address
    base, _, port = address.rpartition(":")
    return f"{base}:{int(port) + rank}"


def subscriptions(made):
    argv = made.proxy.argv
    return [argv[at + 1] for at, token in enumerate(argv) if token == "--kv-events"]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.7", "0.0.0.0"])
def test_an_engine_listens_where_the_proxy_looks(host, rank):
    told, looked = engine_addresses(host, 5000, 6000), subscriber_addresses(host, 5000, 6000, rank)
    for engine, proxy in zip(told, looked, strict=True):
        assert listens(engine)
        wildcard = f"tcp://{'127.0.0.1' if host == '0.0.0.0' else host}:"
        assert of_rank(engine, rank).replace("tcp://*:", wildcard) == proxy


def test_on_loopback_nothing_is_open_to_the_network():
    for address in engine_addresses("127.0.0.1", 5000, 6000):
        assert address.startswith("ipc://@")


def test_the_flag_turns_events_and_rendering_on_for_one_pool():
    made = plan(*EVENTS, "pools.prefill.replicas=2")
    for instance in made.of_role("prefill"):
        config = json.loads(value(instance, "--kv-events-config"))
        assert config["enable_kv_cache_events"] is True
        assert config["publisher"] == "zmq"
        assert "--enable-scale-out" in instance.argv
    assert not {"--kv-events-config", "--enable-scale-out"} & set(made.of_role("decode")[0].argv)
    origins = {item.tokens[0]: item.origin for item in made.of_role("prefill")[0].arguments}
    assert origins["--kv-events-config"] == origins["--enable-scale-out"] == "--set pools.prefill.kv_events"


@pytest.mark.parametrize("flag", ["--enable-scale-out", "--no-enable-scale-out"])
def test_what_the_user_says_of_rendering_stands_alone(flag):
    instance = plan(*EVENTS, f"pools.prefill.extra_args=[{flag}]").instances[0]
    assert [token for token in instance.argv if "scale-out" in token] == [flag]


def test_without_it_nothing_changes():
    made = plan()
    assert not subscriptions(made)
    assert all("kv events replay" not in [ports.purpose for ports in item.ports] for item in made.instances)


def test_the_proxy_is_told_of_every_rank_and_the_ends_meet():
    made = plan(*EVENTS, "pools.prefill.replicas=2", "pools.prefill.data_parallel_size=3", inventory=gpus(7))
    expected = []
    for instance in made.of_role("prefill"):
        config = json.loads(value(instance, "--kv-events-config"))
        for rank in range(3):
            ends = (of_rank(config["endpoint"], rank), of_rank(config["replay_endpoint"], rank))
            expected.append(f"{instance.name}={','.join(ends)}")
    assert subscriptions(made) == expected
    ends = [end for text in expected for end in text.partition("=")[2].split(",")]
    assert len(set(ends)) == 12


def test_its_ports_are_its_own():
    made = plan(
        *EVENTS,
        "pools.decode.kv_events=true",
        "pools.decode.replicas=3",
        "pools.decode.data_parallel_size=2",
        inventory=gpus(7),
    )
    ports = [port for instance in made.instances for ranges in instance.ports for port in ranges.ports]
    assert len(ports) == len(set(ports))


def test_the_proxy_understands_what_the_launcher_tells_it():
    from proxy.cli import _endpoints, _kv_events

    made = plan(*EVENTS, "pools.prefill.replicas=2")
    given = [f"{item.name}={item.url}" for item in made.of_role("prefill")]
    found = _kv_events(subscriptions(made), _endpoints(given, "prefill"))
    for instance in made.of_role("prefill"):
        config = json.loads(value(instance, "--kv-events-config"))
        (source,) = found[instance.name]
        assert (source.publish, source.replay) == (config["endpoint"], config["replay_endpoint"])
