"""Four replicas on a Ray cluster of two nodes, on this machine: clients cannot tell them from one server."""

import asyncio
import inspect
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tests.serve import test_chat, test_completions, test_errors, test_tools
from tests.serve.conftest import Running, in_thread

from foretoken import LLM, SamplingParams, zoo
from foretoken.serve.replicas import ReplicaScale
from foretoken.serve.replicas.front import Front, create_front
from foretoken.serve.replicas.replica import ReplicaConfig
from foretoken.serve.server import Server
from foretoken.serve.settings import ServerSettings

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # nodes on loopback
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # other tests may have the cores
ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'foretoken[ray]'")

pytestmark = pytest.mark.slow
PATIENCE = 240.0  # seconds: nine processes share the cores with other tests
SETTINGS = ServerSettings(model_names=("stdlib", "other"), max_n=8, allow_admin=True)
OPTIONS = {
    "dtype": "float32",
    "methods": ("prediction", "ngram"),
    "max_num_seqs": 8,
    "seed": 1,
    "enable_prefix_caching": True,
    # by measured costs no draft might be profitable for eight engines on few cores
    "speculative_config": {"num_speculative_tokens": 4},
}
SYSTEM = "import os\nimport sys\n\n\n" + "def helper(values):\n    return sorted(values)\n" * 20


class Distant(Running):
    """One who may take longer."""

    patience = PATIENCE
    pause = 0.1

    def figures(self, name: str) -> dict[str, float]:
        """A metric by replica."""
        found = [line for line in self.metrics().splitlines() if line.startswith(f"foretoken:{name}{{")]
        return {line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes of one core each. -> their address"""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    small |= {"no_monitor": True, "include_log_monitor": False}  # processes that scale machines, and copy logs
    found = Cluster(initialize_head=True, head_node_args=small)
    try:
        found.add_node(**small)
        yield found.address
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture(scope="module")
def server(cluster: str, noisy: Path) -> Iterator[Distant]:
    """The front, in a thread, before two replicas a node."""
    from foretoken.serve.replicas.deploy import replicas

    scale = ReplicaScale(replicas=4, address=cluster)
    config = ReplicaConfig(
        model=str(zoo.path("draft")), draft_model=str(noisy), options=OPTIONS, settings=SETTINGS, created=1
    )
    with replicas(config, scale, 10.0) as answering:
        front = Front(answering, SETTINGS)
        ending = Server(create_front(front, SETTINGS), [front])
        with in_thread(ending) as url:
            yield Distant(url, front, ending)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(spare: LLM) -> LLM:
    """Elsewhere it is what ``server`` serves; here the same model again."""
    return spare


def through(module: ModuleType) -> type:
    """The tests of one server's clients, before the replicas: those that need no more than an address."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    needs = {name: set(inspect.signature(test).parameters) for name, test in tests.items()}
    of_clients = [name for name in tests if needs[name] & {"client", "server"} and "limited" not in needs[name]]
    return type(module.__name__, (), {name: staticmethod(tests[name]) for name in of_clients})


TestChat, TestCompletions = through(test_chat), through(test_completions)
TestErrors, TestTools = through(test_errors), through(test_tools)


def test_two_on_each_node(server: Distant) -> None:
    assert len(server.figures("num_requests_running")) == 4
    assert ray.available_resources().get("CPU", 0.0) == 0.0
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/", timeout=PATIENCE).headers["content-type"].startswith("text/html")
    assert server.client.models.retrieve("stdlib").model_extra["max_model_len"] == 8192


def test_all_apis_pass_through(server: Distant, caplog: pytest.LogCaptureFixture) -> None:
    """Responses and messages, whole and streamed; speculation, of which every replica tells and takes changes."""

    def lines() -> list[dict[str, Any]]:
        """The fields that were logged of these requests; one of an earlier test may be logged late."""
        fields = [record.foretoken for record in caplog.records if hasattr(record, "foretoken")]
        return [line for line in fields if line["path"] in ("/v1/responses", "/v1/messages")]

    messages = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 8, "temperature": 0}
    response = {"input": "x = ", "max_output_tokens": 8, "temperature": 0}
    with caplog.at_level(logging.INFO, "foretoken"):
        for path, body, last in (
            ("responses", response, "response.incomplete"),
            ("messages", messages, "message_stop"),
        ):
            whole = server.post(body, path)
            assert whole.status_code == 200 and whole.headers["x-foretoken-replica"]
            assert last in server.post({**body, "stream": True}, path).text
        server.until(lambda: len(lines()) >= 4)
    assert [line["completion_tokens"] for line in lines()] == [8] * 4
    assert all(line["first_token_seconds"] for line in lines())
    url = f"{server.url}/v1/speculation"
    assert len(httpx.get(url, timeout=PATIENCE).json()["replicas"]) == 4
    off = httpx.patch(url, json={"enabled": False}, timeout=PATIENCE).json()
    assert [state["enabled"] for state in off["replicas"].values()] == [False] * 4
    drafted = server.post({"prompt": "x = ", "max_tokens": 8}).json()["metrics"]["speculative_decoding"]
    assert drafted["num_draft_tokens"] == 0
    assert httpx.patch(url, json={"method": "telepathy"}, timeout=PATIENCE).status_code == 400
    on = httpx.patch(url, json={"enabled": True}, timeout=PATIENCE).json()
    assert [state["enabled"] for state in on["replicas"].values()] == [True] * 4


def test_prompts_that_begin_alike_meet(server: Distant) -> None:
    alike = [server.post({"prompt": f"{SYSTEM}def f{i}(", "max_tokens": 4, "temperature": 0}) for i in range(5)]
    assert len({answer.headers["x-foretoken-replica"] for answer in alike}) == 1
    assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192 for answer in alike[1:])
    others = [server.post({"prompt": str(i), "max_tokens": 1}) for i in range(16)]
    assert len({answer.headers["x-foretoken-replica"] for answer in others}) > 1


def test_a_client_that_goes_cancels_its_request(server: Distant) -> None:
    with server.streaming({"prompt": "x = ", "max_tokens": 6000, "ignore_eos": True}) as (answer, _):
        replica = answer.headers["x-foretoken-replica"]
        assert server.figures("num_requests_running")[replica] == 1
    server.until(lambda: server.figures("num_requests_running")[replica] == 0)
    assert not server.worker.busy


def test_a_replica_is_killed_under_load(server: Distant, spare: LLM) -> None:
    """No client notices: all answers are whole, and each is what it is alone. Then there are four again."""
    before = set(server.figures("num_requests_running"))
    bodies = [
        {
            "prompt": f"def f{number}(x):\n",
            "max_tokens": 40 + number,
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "ignore_eos": True,
            "stream": number % 3 > 0,
        }
        for number in range(24)
    ]
    killed = asyncio.run(_load(server, bodies))
    assert len(killed) == len(bodies)
    page = server.metrics()
    outcomes = {
        o: float(page.partition(f'failovers_total{{outcome="{o}"}} ')[2].split()[0]) for o in ("replayed", "broken")
    }
    assert outcomes["replayed"] >= 1 and outcomes["broken"] == 0
    for body, text in zip(bodies, killed, strict=True):
        own = {key: value for key, value in body.items() if key not in ("prompt", "stream")}
        assert text == spare.generate(body["prompt"], SamplingParams(**own))[0].outputs[0].text, body
    server.until(lambda: len(server.figures("num_requests_running")) == 4)
    assert len(before & set(server.figures("num_requests_running"))) == 3


async def _load(server: Distant, bodies: list[dict[str, Any]]) -> list[str]:
    """Ask all at once, and kill the replica that has begun a stream."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = {a["name"].rpartition("#")[2]: ray.get_actor(a["name"], namespace=a["namespace"]) for a in named}

    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            if not body["stream"]:
                return str(json.loads(await answer.aread())["choices"][0]["text"])
            text = ""
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                    if text and not begun.done() and body["max_tokens"] > 50:
                        begun.set_result(answer.headers["x-foretoken-replica"])
            return text

    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        asking = [asyncio.create_task(ask(client, body)) for body in bodies]
        ray.kill(actors[await begun])
        return await asyncio.gather(*asking)
