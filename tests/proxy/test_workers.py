"""Several processes on one port: one load, one set of metrics, and a death that costs only its own streams."""

import asyncio
import os
import signal
import ssl

import httpx
import psutil
import pytest

from tests.proxy.running import Running
from tests.stand_in.engine import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


def figure(text, name, label=""):
    lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def ask_anew(proxy, body=BODY):
    """Ask over a connection of its own, so that any worker may get it."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=10) as client:
        return await client.post(CHAT, json=body)


async def metrics(proxy):
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{proxy.port}/metrics")).text


async def until(condition, limit=10):
    async with asyncio.timeout(limit):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_workers_share_one_load_and_one_set_of_metrics_and_end_together():
    async with Running("--workers", "2") as proxy:
        parent = psutil.Process(proxy.process.pid)
        workers = parent.children()
        assert len(workers) == 2
        replies = await asyncio.gather(*(ask_anew(proxy) for _ in range(40)))
        assert {reply.status_code for reply in replies} == {200}
        for _ in range(6):
            assert figure(await metrics(proxy), "pdcluster_requests_total", 'outcome="ok"') == 40

        gate = asyncio.Event()
        proxy.decode.faults = [Fault(hold=gate)] * 8
        held = [asyncio.create_task(ask_anew(proxy)) for _ in range(8)]

        async def all_seen():
            return figure(await metrics(proxy), "pdcluster_in_flight", 'role="decode"') == 8

        await until(all_seen)
        gate.set()
        assert {reply.status_code for reply in await asyncio.gather(*held)} == {200}
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.exit_code() == 0
        assert not [worker for worker in workers if worker.is_running()]


async def test_a_killed_worker_loses_only_its_own_streams_and_is_replaced():
    async with Running("--workers", "2") as proxy:
        parent = psutil.Process(proxy.process.pid)
        workers = parent.children()
        gate = asyncio.Event()
        proxy.decode.faults = [Fault(hold=gate, pause_after=2)] * 30
        served = {worker.pid: 0 for worker in workers}
        streams = [asyncio.create_task(stream(proxy)) for _ in range(30)]

        async def all_there():
            return len(proxy.decode.requests) == 30

        await until(all_there)
        await proxy.client.aclose()  # its idle connection is no stream
        for worker in workers:
            served[worker.pid] = sum(
                connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == proxy.port
                for connection in worker.net_connections("tcp")
            )
        victim = min(workers, key=lambda worker: served[worker.pid])
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(5)

        async def replaced():
            return len(parent.children()) == 2

        await until(replaced)
        gate.set()
        whole = [text for text in await asyncio.gather(*streams) if text.endswith("data: [DONE]\n\n")]
        assert len(whole) == 30 - served[victim.pid]
        proxy.decode.faults = []
        replies = await asyncio.gather(*(ask_anew(proxy) for _ in range(10)))
        assert {reply.status_code for reply in replies} == {200}

        async def none_in_flight():
            return figure(await metrics(proxy), "pdcluster_in_flight") == 0

        await until(none_in_flight)


async def stream(proxy):
    text = ""
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=20) as client,
            client.stream("POST", CHAT, json=STREAM) as reply,
        ):
            async for piece in reply.aiter_text():
                text += piece
    except httpx.HTTPError:
        pass
    return text


async def test_workers_do_not_outlive_a_parent_that_was_killed():
    async with Running("--workers", "2") as proxy:
        workers = psutil.Process(proxy.process.pid).children()
        proxy.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 10)
        assert alive == []


@pytest.fixture
def certificates(tmp_path):
    """A CA, a server's and a client's certificate."""
    trustme = pytest.importorskip("trustme", reason="makes certificates; it is in the dev extra")
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example")
    paths = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "server", "key", "client")}
    authority.cert_pem.write_to_path(paths["ca"])
    server.cert_chain_pems[0].write_to_path(paths["server"])
    server.private_key_pem.write_to_path(paths["key"])
    client.private_key_and_cert_chain_pem.write_to_path(paths["client"])
    return paths


async def test_https_with_a_clients_certificate_and_an_admin_port(certificates, unused_tcp_port):
    flags = ("--tls-certificate", certificates["server"], "--tls-key", certificates["key"])
    flags += ("--tls-client-ca", certificates["ca"], "--admin-port", str(unused_tcp_port))
    trusting = ssl.create_default_context(cafile=certificates["ca"])
    known = ssl.create_default_context(cafile=certificates["ca"])
    known.load_cert_chain(certificates["client"])
    async with Running(*flags, scheme="https", verify=known) as proxy:
        reply = await proxy.client.post(CHAT, json=STREAM)
        assert reply.text.endswith("data: [DONE]\n\n")
        assert (await proxy.client.post(CHAT, json=BODY)).status_code == 200
        async with httpx.AsyncClient(verify=trusting) as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"https://127.0.0.1:{proxy.port}/health")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}") as admin:
            assert (await admin.get("/ready")).json()["ready"] is True
            endpoints = (await admin.get("/endpoints")).json()["endpoints"]
            assert {(item["role"], item["state"], item["in_flight"]) for item in endpoints} == {
                ("prefill", "ready", 0),
                ("decode", "ready", 0),
            }
            assert "pdcluster_requests_total" in (await admin.get("/metrics")).text
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.exit_code() == 0


async def test_keys_come_from_the_environment_and_show_nowhere(unused_tcp_port):
    key = "sk-never-to-be-seen"
    flags = ("--admin-port", str(unused_tcp_port))
    async with Running(*flags, environment={"PDCLUSTER_API_KEYS": f"a={key}"}) as proxy:
        assert (await proxy.client.post(CHAT, json=BODY)).status_code == 401
        reply = await proxy.client.post(CHAT, json=BODY, headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        assert key not in " ".join(psutil.Process(proxy.process.pid).cmdline())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}") as admin:
            text = (await admin.get("/metrics")).text
            assert 'reason="no_key"' in text
            assert key not in text
