"""`moebius serve` over a real group, two CPU ranks and a tiny model: openai's client, curl, and what may go wrong."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
import ray
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo import load_weights
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.group import RolloutGroup
from moebius.rollout.serve_cli import for_serving
from moebius.rollout.server import make_app
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.transports import trainer
from moebius.rollout.types import Sampling
from tests.http_server import fuzz, serving
from tests.integration.ray_head import free_ports
from tests.integration.server_calls import Arrival, by_broadcast, count_of_switches, idle, storm
from tests.integration.warm import Warm

MODEL = "tiny"
JSON = {"content-type": "application/json"}
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[RolloutGroup]:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(threshold=8, window=2, cooldown_s=0.05),
    )
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=warm.runtime_env)
    config = for_serving(RolloutConfig(ranks=2, device="cpu", engine=engine, sampling=Sampling(max_tokens=24, seed=0)))
    assert config.engine.policy.kind == "interactive"
    with RolloutGroup(config) as group:
        yield group
    ray.shutdown()


@pytest.fixture(scope="module")
def service(group: RolloutGroup) -> RolloutService:
    return RolloutService(group, ServiceSettings(idle_s=0.3, max_pending=300))


@pytest.fixture(scope="module")
def url(service: RolloutService) -> Iterator[str]:
    with serving(make_app(service, model_name=MODEL)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[5, 6, 7], [8, 9]], n=3, max_tokens=12, seed=1, logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.object == "text_completion" and answer.model == MODEL
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 72)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    for choice, prompt in zip(answer.choices, [[5, 6, 7]] * 3 + [[8, 9]] * 3, strict=True):
        assert choice.prompt_token_ids == prompt and len(choice.token_ids) == 12 and choice.text
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12
        tops = choice.logprobs.top_logprobs
        assert all(lp <= 0 for lp in choice.logprobs.token_logprobs) and {len(top) for top in tops} <= {1, 2, 3}
        assert choice.policy_version == 0 and choice.versions == [[0, 12]]
        assert sum(count for _, count in choice.layouts) == 12 and {name for name, _ in choice.layouts} <= {"EP", "TP"}
    again = client.completions.create(
        model=MODEL, prompt=[5, 6, 7], n=3, max_tokens=12, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices[:3]], "one seed"
    assert len({choice.text for choice in again.choices}) == 3, "samples differ"
    assert all(choice.logprobs is None for choice in again.choices)
    other = client.completions.create(
        model=MODEL, prompt=[5, 6, 7], n=3, max_tokens=12, seed=2, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in other.choices] != [choice.text for choice in again.choices]


def test_completions_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": ["What is 2 + 2?", "And 3 + 3?"], "n": 2, "max_tokens": 30, "seed": 5, "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    pieces: dict[int, list[Any]] = {}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            pieces.setdefault(choice.index, []).append(choice)
    assert chunks[-1].usage == whole.usage and sorted(pieces) == [0, 1, 2, 3]
    for choice in whole.choices:
        own = pieces[choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [t for piece in own for t in piece.token_ids] == choice.token_ids
        told = [lp for piece in own if piece.logprobs for lp in piece.logprobs.token_logprobs]
        assert told == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4), "of another layout or batch"
        assert [t for piece in own if piece.logprobs for t in piece.logprobs.text_offset] == choice.logprobs.text_offset
        assert [piece.finish_reason for piece in own if piece.finish_reason] == [choice.finish_reason]
    assert sum(map(len, pieces.values())) > 20, "it came in pieces"


def test_stop_strings(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [9, 10, 11], "seed": 11, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked, max_tokens=40).choices[0].text
    stop = whole[20:24]
    first = whole.index(stop)
    stopped = client.completions.create(**asked, max_tokens=40, stop=[stop, "never said"]).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (whole[:first], "stop", stop)
    streamed = list(client.completions.create(**asked, max_tokens=40, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:first], "nothing of it is told too early"


def test_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "2 + 2 ="}], "n": 2, "max_completion_tokens": 10,
        "seed": 3, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    answer = client.chat.completions.create(**asked)
    assert len(answer.choices) == 2 and answer.choices[0].message.role == "assistant"
    for choice in answer.choices:
        assert len(choice.logprobs.content) <= 10 and {len(e.top_logprobs) for e in choice.logprobs.content} == {2}
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    parts = [{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2 ="}]}]
    assert client.chat.completions.create(**asked | {"messages": parts}).choices[0].message == answer.choices[0].message


def test_many_at_once(client: openai.OpenAI, service: RolloutService) -> None:
    """64 requests together, again after one another: in EP or in TP, the same tokens."""

    def ask(i: int) -> str:
        return client.completions.create(
            model=MODEL, prompt=[5 + i % 7, 6, 7], max_tokens=12 + i % 20, seed=i, extra_body={"ignore_eos": True}
        ).choices[0].text  # fmt: skip

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    idle(service)
    assert [ask(i) for i in range(0, 64, 8)] == together[::8]
    metrics = httpx.get(f"{client.base_url.copy_with(path='/metrics')}").text
    numbers = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("moebius_"))
    assert float(numbers['moebius_requests_total{outcome="ok"}']) >= 72
    assert float(numbers["moebius_output_tokens_total"]) > 64 * 12
    assert float(numbers["moebius_live_samples"]) == 0 and 0 <= float(numbers["moebius_kv_use_ratio"]) <= 1
    assert float(numbers["moebius_iteration_ms"]) > 0


def test_disconnects_abort(url: str, service: RolloutService) -> None:
    before = service.stats().requests["aborted"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=LONG | {"n": 4}, timeout=0.3)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True, "n": 2}, timeout=60) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    idle(service)
    assert service.stats().requests["aborted"] == before + 2


def test_abort_by_id(url: str, service: RolloutService) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"request_id": "long-one"}, timeout=60)
        deadline = time.monotonic() + 20
        while "long-one" not in service.requests():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert httpx.post(f"{url}/abort_requests", json={"request_ids": ["long-one", "none"]}).json()["aborted"] == 1
        answer = asked.result().json()
    assert answer["id"] == "long-one" and answer["choices"][0]["finish_reason"] == "abort"


def test_pause_keeps_what_comes(url: str, client: openai.OpenAI, service: RolloutService) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=60)
        deadline = time.monotonic() + 20
        while not service.stats().live:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert httpx.post(f"{url}/pause", timeout=60).json() == {"status": "paused"}
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"max_tokens": 3}, timeout=60)
        time.sleep(0.3)
        assert not waiting.done() and httpx.get(f"{url}/is_paused").json() == {"is_paused": True}
        httpx.post(f"{url}/resume")
        assert waiting.result().json()["choices"][0]["finish_reason"] == "length"


def test_too_much_is_refused(url: str, client: openai.OpenAI, service: RolloutService) -> None:
    httpx.post(f"{url}/pause", params={"mode": "wait"}, timeout=60)
    with ThreadPoolExecutor(3) as pool:
        held = [
            pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"n": 100, "max_tokens": 2}, timeout=60)
            for _ in range(3)
        ]
        deadline = time.monotonic() + 20
        while service.stats().waiting < 300:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="300 unfinished samples"):
            client.completions.create(model=MODEL, prompt=[1])
        stream = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": True})
        assert stream.status_code == 429 and stream.headers["retry-after"] == "1"
        httpx.post(f"{url}/resume")
        assert [len(answer.result().json()["choices"]) for answer in held] == [100] * 3
    assert client.completions.create(model=MODEL, prompt=[1], max_tokens=2).choices
    too_many = httpx.post(f"{url}/v1/completions", json=LONG | {"n": 301})
    assert too_many.status_code == 400 and "takes at once (300)" in too_many.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "prompt 0 is empty"),
        ({"prompt": [[1], [10**6]]}, "prompt 1: token id 1000000 is outside"),
        ({"prompt": [1] * 300}, "max_model_len=256"),
        ({}, "prompt: required"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1], "n": 0}, "n: Input should be greater"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temprature": 1}, "did you mean 'temperature'"),
        ({"prompt": [1], "logprobs": 50}, "logprobs"),
        ({"prompt": [1], "stop": [""]}, "stop"),
        ({"prompt": [1], "stream_options": {"include_usage": True}}, "stream=true"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": [1], "logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"prompt": [1], "echo": True}, "echo"),
    ],
)
def test_wrong_bodies(url: str, body: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert words in error["message"]


def test_wrong_requests(url: str, client: openai.OpenAI) -> None:
    broken = httpx.post(f"{url}/v1/completions", content="{'prompt'", headers=JSON)
    assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", content='{"prompt":' + "[" * 50_000, headers=JSON).status_code == 400
    form = httpx.post(f"{url}/v1/completions", data={"prompt": "a"})
    assert form.status_code == 400 and "Content-Type: application/json" in form.json()["error"]["message"]
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    large = connection.getresponse()
    assert large.status == 413 and "larger than" in json.loads(large.read())["error"]["message"]
    connection.close()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[])
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=image)
    assert httpx.get(f"{url}/nothing").json()["error"]["message"] == "no such path: /nothing"
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    assert client.completions.create(model=MODEL, prompt=[1], max_tokens=2).choices, "it serves on"


def test_curl(url: str) -> None:
    def curl(path: str, *more: str) -> str:
        done = subprocess.run(
            ["curl", "-sS", "--max-time", "60", *more, url + path], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert json.loads(curl("/health")) == {"status": "ok"}
    assert json.loads(curl("/v1/models"))["data"][0]["id"] == MODEL
    assert json.loads(curl("/get_world_size")) == {"world_size": 2}
    info = json.loads(curl("/server_info?config_format=json"))
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["moebius"]["engine"]["policy"]["kind"] == "interactive"
    body = json.dumps({"prompt": "2 + 2 =", "max_tokens": 3, "stream": True})
    told = curl("/v1/completions", "-N", "-H", "Content-Type: application/json", "-d", body)
    assert told.endswith("data: [DONE]\n\n") and told.count("data: {") >= 2
    assert "moebius_layout{" in curl("/metrics")


ARRIVALS = st.lists(
    st.builds(
        Arrival, st.integers(0, 11), st.floats(0, 2), st.sampled_from(["stays"] * 4 + ["leaves", "aborts"]),
        st.floats(0.001, 0.4),
    ),
    min_size=20, max_size=48,
)  # fmt: skip


def test_random_arrivals_and_aborts(url: str, service: RolloutService) -> None:
    """Whatever comes and leaves when: every request is answered once, and with the tokens of an engine that does not
    switch, which this one is when requests come one at a time, or with their beginning if it was aborted."""
    random = Random(1)
    bodies = [
        {
            "prompt": [random.randrange(3, 60) for _ in range(random.randrange(1, 20))], "n": random.choice([1, 1, 2]),
            "max_tokens": random.choice([3, 12, 30, 70]), "seed": random.randrange(1 << 40),
            "temperature": random.choice([0.0, 0.8, 1.0]), "ignore_eos": True, "return_token_ids": True,
        }
        for _ in range(12)
    ]  # fmt: skip
    httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 20}, timeout=60)
    before = count_of_switches(service)
    alone = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"] for body in bodies]
    assert count_of_switches(service) == before, "these did not see a switch"
    ends: Counter[str] = Counter()

    @settings(
        max_examples=4, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(arrivals=ARRIVALS)
    def one(arrivals: list[Arrival]) -> None:
        started = Counter(service.stats().requests)
        answers = storm(url, bodies, arrivals, f"storm-{ends.total()}")
        idle(service)
        ended = Counter(service.stats().requests) - started
        left = answers.count(None)  # some before their request was taken in
        ends.update(ended)
        assert ended["failed"] == ended["refused"] == 0
        assert len(arrivals) - left <= ended["ok"] + ended["aborted"] <= len(arrivals)
        for arrival, choices in zip(arrivals, answers, strict=True):
            for choice, wanted in zip(choices or [], alone[arrival.body], strict=choices is not None):
                if choice["finish_reason"] == "abort" and arrival.fate == "aborts":
                    assert choice["token_ids"] == wanted["token_ids"][: len(choice["token_ids"])], arrival
                else:
                    assert (choice["token_ids"], choice["finish_reason"]) == (wanted["token_ids"], "length"), arrival

    one()
    assert count_of_switches(service) >= before + 2, "to EP and back"
    assert ends["ok"] > 40 and ends["aborted"] > 3


def test_weights_come_from_a_trainer(url: str, client: openai.OpenAI, group: RolloutGroup) -> None:
    """As TRL sends them, but over gloo: init, start, updates, finish; and updates that fail."""

    def ask() -> tuple[str, int]:
        [choice] = client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=20, seed=1).choices
        return choice.text, choice.policy_version

    def post(path: str, body: Any = None) -> httpx.Response:
        return httpx.post(f"{url}/{path}", json=body, timeout=120)

    old, before = ask()
    weights = load_weights(Path(group.config.engine.model))
    other = {name: tensor * 1.5 for name, tensor in weights.items()}
    nobody = {"names": [], "dtype_names": [], "shapes": []}
    assert "init_weight_transfer_engine first" in post("update_weights", {"update_info": nobody}).text
    [port] = free_ports(1)
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
    assert "do not fit" in post("init_weight_transfer_engine", {"init_info": info | {"world_size": 2}}).text
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, "init_weight_transfer_engine", {"init_info": info})
        together = trainer.open_trainer(port, 3)
        assert asked.result().status_code == 200, asked.result().text
    for tensors, packed in ((other, True), (weights, False)):
        assert post("start_weight_update", {}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(ask)
            assert [a.status_code for a in by_broadcast(url, tensors, packed, together)] == [200, 200]
            assert not waits.done(), "requests wait for the end of the update"
            before += 1
            assert post("finish_weight_update", {}).json()["version"] == before
            assert waits.result()[1] == before
        assert post("reset_prefix_cache").json() == {"success": True}
        assert (ask() == (old, before)) is (tensors is weights)
    # A tensor that the model does not have, and an update that is not whole.
    assert post("start_weight_update", {"version": 40}).status_code == 200
    [refused] = by_broadcast(url, {"nothing.weight": torch.ones(3)}, True, together)
    assert refused.status_code == 400 and "nothing.weight" in refused.json()["error"]["message"]
    assert post("start_weight_update", {"version": 41}).status_code == 200
    assert post("finish_weight_update", {}).status_code == 400
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask)
        assert post("start_weight_update", {"version": 42}).status_code == 200
        assert [a.status_code for a in by_broadcast(url, weights, True, together)] == [200, 200]
        assert post("finish_weight_update", {}).status_code == 200
        assert waits.result() == (old, 42)


def test_sleep(url: str, client: openai.OpenAI) -> None:
    def ask() -> str:
        return client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=20, seed=1).choices[0].text

    before = ask()
    assert httpx.post(f"{url}/sleep", params={"level": 1}, timeout=60).status_code == 200
    assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask)
        httpx.post(f"{url}/wake_up", params={"tags": "weights"}, timeout=60)
        time.sleep(0.2)
        assert not waits.done(), "the KV is asleep yet"
        assert httpx.post(f"{url}/wake_up", timeout=60).status_code == 200
        assert waits.result() == before


def test_no_request_breaks_it(url: str, client: openai.OpenAI) -> None:
    statuses = fuzz(url, 30, {"/v1/completions", "/v1/chat/completions", "/reset_prefix_cache"}, seconds=6)
    assert all(sum(counts.values()) >= 3 for counts in statuses.values())
    assert client.completions.create(model=MODEL, prompt=[1], max_tokens=2).choices
