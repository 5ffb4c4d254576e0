"""Several models of one server: loaded when they are named, unloaded when idle or for another one, by known bytes."""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving import client, running, served_llm, until
from sparse_models import tiny_llama
from toy_model import ToyExecutor

from powerinfer.cli import serve
from powerinfer.cli.common import Output, Parser, config_from, read_duration
from powerinfer.config import EngineConfig, ServeConfig
from powerinfer.errors import ModelError, RequestError, VramError
from powerinfer.hub import models_in
from powerinfer.hybrid.resolved import Needs
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve import service as service_module
from powerinfer.serve.served import Budget, ModelSource
from powerinfer.serve.server import Server, make_server
from powerinfer.serve.service import ServicePolicy
from powerinfer.system import resident_memory

ASK = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


class Toy:
    """A model of `size` bytes; loading waits for `go`."""

    def __init__(self, name: str, size: int = 1) -> None:
        self.name, self.size, self.vram = name, size, 0
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.go.set()
        self.executors: list[ToyExecutor] = []
        self.budgets: list[Budget] = []
        self.held = False  # of the next executor
        self.error: BaseException | None = None

    def load(self, progress: Callable[[str, int, int], None], budget: Budget) -> LLM:
        progress("loading weights", 1, 4)
        self.begun.release()
        assert self.go.wait(30)
        progress("loading weights", 4, 4)
        if self.error is not None:
            raise self.error
        self.budgets.append(budget)
        self.executors.append(ToyExecutor())
        self.executors[-1].held = self.held
        return served_llm(self.executors[-1], max_queue=32)

    def needs(self, budget: Budget) -> Needs:
        if budget.ram is not None and self.size > budget.ram:
            raise RequestError(f"it needs {self.size} bytes of {budget.ram}")
        if budget.vram is not None and self.vram > budget.vram:
            raise VramError(f"{budget.vram} bytes of VRAM hold no layer")
        return Needs(self.size, 0, self.vram)

    @property
    def source(self) -> ModelSource:
        return ModelSource((self.name,), self.load, self.needs)

    @property
    def open(self) -> int:
        """Engines that were not closed."""
        return sum(not one.closed for one in self.executors)


@contextmanager
def serving(*toys: Toy, ram: int = 10, keep_alive: float | None = None, together: int = 0, waiting: int = 32,
            **config: Any) -> Iterator[Server]:  # fmt: skip
    policy = ServicePolicy(Budget(ram), together, keep_alive, waiting)
    server = make_server([toy.source for toy in toys], ServeConfig(**{"port": 0, "drain": 2.0, **config}), 64, policy)
    with running(server):
        yield server


def ask(server: Server, name: str | None, **more: Any) -> httpx2.Response:
    with client(server) as http:
        return http.post("/v1/completions", json={**ASK, **({} if name is None else {"model": name}), **more})


def well(server: Server, name: str) -> None:
    answer = ask(server, name)
    assert answer.status_code == 200 and answer.json()["model"] == name, answer.text


def ask_and_leave(server: Server, name: str, at: int) -> None:
    """Ask, and close the connection once model number `at` is waited for; until the server knows that."""
    body = json.dumps({**ASK, "model": name}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", httpx2.URL(server.url).port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        until(lambda: server.service.models[at].waiting == 1)
    until(lambda: server.service.models[at].waiting == 0)


def statuses(server: Server) -> dict[str, str]:
    with client(server) as http:
        return dict(http.get("/health").json()["models"])


def figure(server: Server, name: str) -> float | None:
    with client(server) as http:
        lines = http.get("/metrics").text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), None)


# ---------------------------------------------------------------- loading on demand


def test_models_are_loaded_when_they_are_named() -> None:
    a, b = Toy("a"), Toy("b")
    with serving(a, b) as server, client(server) as http:
        assert http.get("/health").json() == {"status": "ok", "models": {"a": "unloaded", "b": "unloaded"}}
        rows = http.get("/v1/models").json()["data"]
        assert [(row["id"], row["max_model_len"], row["status"]["value"]) for row in rows] == [
            ("a", None, "unloaded"), ("b", None, "unloaded"),
        ]  # fmt: skip
        well(server, "b")
        assert statuses(server) == {"a": "unloaded", "b": "ok"} and not a.executors
        assert http.get("/v1/models/b").json()["max_model_len"] == 512
        assert http.get("/v1/models/b").json()["status"] == {"value": "loaded"}
        well(server, "a")
        assert statuses(server) == {"a": "ok", "b": "ok"}
        for model in ("a", "b"):
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": model}
            assert http.post("/v1/chat/completions", json=chat).json()["model"] == model
            assert http.post("/tokenize", json={"content": "xy", "model": model}).json()["count"] == 2
        assert figure(server, 'powerinfer_model_loads_total{model="a"}') == 1
        assert figure(server, 'powerinfer_generated_tokens_total{model="b"}') == 5
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            assert [model.id for model in api.models.list()] == ["a", "b"]
    assert a.open == b.open == 0


def test_which_model_must_be_said() -> None:
    with serving(Toy("a"), Toy("b")) as server:
        for none in (None, ""):
            answer = ask(server, none)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_missing"
        for name in ("c", "../a", "a/../b", "/etc/passwd", "%2e%2e/a", "a\x00", "A" * 200):
            answer = ask(server, name)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found", name
            assert len(answer.text) < 1000
        with client(server) as http:
            for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fa", "/v1/models/c", "/v1/engine?model=c"):
                assert http.get(path).status_code == 404
        assert statuses(server) == {"a": "unloaded", "b": "unloaded"}


def test_requests_of_one_model_load_it_once() -> None:
    a, b = Toy("a"), Toy("b")
    a.go.clear()
    with serving(a, b) as server, ThreadPoolExecutor(8) as pool:
        well(server, "b")
        asked = [pool.submit(ask, server, "a") for _ in range(8)]
        until(lambda: server.service.models[0].waiting == 8)
        assert a.begun.acquire(timeout=30)
        well(server, "b")  # meanwhile
        assert statuses(server)["a"] == "loading"
        with client(server) as http:
            assert http.get("/v1/models/a").json()["status"] == {"value": "loading"}
        a.go.set()
        assert [one.result().status_code for one in asked] == [200] * 8
    assert len(a.executors) == 1


def test_the_queue_for_a_model_is_bounded_in_length_and_time() -> None:
    a = Toy("a")
    a.go.clear()
    with serving(a, Toy("b"), waiting=2, queue_timeout=3.0) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, server, "a") for _ in range(2)]
        until(lambda: server.service.models[0].waiting == 2)
        answer = ask(server, "a")
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        for one in asked:
            assert one.result().status_code == 503 and "3 s" in one.result().text
            assert one.result().json()["error"]["code"] == "loading" and int(one.result().headers["retry-after"]) >= 1
        a.go.set()
        until(lambda: statuses(server)["a"] == "ok")
        well(server, "a")
    assert len(a.executors) == 1


def test_clients_that_leave_while_it_loads() -> None:
    """Loading goes on: the next request finds a whole model, and keep-alive ends it if there is none."""
    a = Toy("a")
    a.go.clear()
    with serving(a, Toy("b"), keep_alive=0.2) as server:
        ask_and_leave(server, "a", 0)
        assert statuses(server)["a"] == "loading"
        a.go.set()
        until(lambda: a.executors and a.open == 0)
        well(server, "a")
    assert len(a.executors) == 2


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_name_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "powerinfer.serve")
    a, b = Toy("a"), Toy("b")
    with serving(a, b) as server:
        for error, says in (
            (ModelError("a.gguf is cut off"), "a.gguf is cut off"),
            (MemoryError(), "out of memory"),
            (ZeroDivisionError("a bug"), "a bug"),
        ):
            a.error = error
            answer = ask(server, "a")
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "model_failed"
            assert answer.json()["error"]["message"].startswith("a cannot be loaded: ") and says in answer.text
            assert statuses(server)["a"] == "failed"
            with client(server) as http:
                listed = http.get("/v1/models/a").json()["status"]
                assert listed["value"] == "failed" and says in listed["reason"]
                looked = http.get("/v1/engine", params={"model": "a"})
                assert looked.status_code == 503 and "a could not be loaded: " in looked.text
            well(server, "b")
        logged = [record for record in caplog.records if record.getMessage() == "load_failed"]
        assert len(logged) == 3 and all(record.facts["model"] == "a" for record in logged)  # type: ignore[attr-defined]
        assert logged[0].facts["reason"] == "a.gguf is cut off"  # type: ignore[attr-defined]
        a.error = None
        well(server, "a")
        assert statuses(server)["a"] == "ok"


def test_an_engine_that_breaks_is_loaded_again() -> None:
    a, b = Toy("a"), Toy("b")
    with serving(a, b) as server:
        well(server, "a")
        a.executors[0].fail_at[a.executors[0].begun] = ZeroDivisionError("a bug")
        answer = ask(server, "a")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "failed"
        assert statuses(server)["a"] == "failed"
        well(server, "b")
        well(server, "a")
        assert a.executors[0].closed and len(a.executors) == 2


def test_an_engine_that_breaks_while_another_model_waits_for_its_memory() -> None:
    """A client of it comes back before its last answer has ended: it does not keep what has broken."""
    a, b = Toy("a", 6), Toy("b", 6)
    a.held = True
    with serving(a, b) as server, ThreadPoolExecutor(3) as pool, ExitStack() as leases:
        one, two = server.service.models
        answer = pool.submit(ask, server, "a")
        until(lambda: a.executors and a.executors[0].begun)
        other = pool.submit(ask, server, "b")
        until(lambda: two.waiting == 1)
        one.take(leases)  # an answer that ends later
        a.executors[0].fail_at[0] = ZeroDivisionError("a bug")
        a.held = False
        a.executors[0].release()
        assert answer.result().json()["error"]["code"] == "failed"
        again = pool.submit(ask, server, "a")
        until(lambda: one.waiting == 1)
        loop = server.service._tasks[one].get_loop()
        loop.call_soon_threadsafe(leases.pop_all().close)
        assert other.result(30).status_code == again.result(30).status_code == 200
        assert a.executors[0].closed and len(a.executors) == 2


# ---------------------------------------------------------------- unloading


def test_an_idle_model_is_unloaded_and_its_figures_stay() -> None:
    a, b = Toy("a"), Toy("b")
    with serving(a, b, keep_alive=0.2) as server:
        well(server, "a")
        until(lambda: a.open == 0)
        until(lambda: statuses(server)["a"] == "unloaded")
        assert figure(server, 'powerinfer_generated_tokens_total{model="a"}') == 3
        assert figure(server, 'powerinfer_kv_pages{model="a"}') is None
        assert figure(server, 'powerinfer_model_loaded{model="a"}') == 0
        well(server, "a")
        assert figure(server, 'powerinfer_generated_tokens_total{model="a"}') == 6
        assert figure(server, 'powerinfer_model_loads_total{model="a"}') == 2


def test_keep_alive_of_nothing() -> None:
    a = Toy("a")
    with serving(a, Toy("b"), keep_alive=0.0) as server:
        for number in (1, 2):
            well(server, "a")
            until(lambda: a.open == 0)
            assert len(a.executors) == number


def test_a_model_in_use_is_not_unloaded() -> None:
    """Neither when its keep-alive is over, nor for another model, which waits for it."""
    a, b = Toy("a", 6), Toy("b", 6)
    a.held = True
    with serving(a, b, keep_alive=0.0) as server, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(ask, server, "a")
        until(lambda: a.executors and a.executors[0].begun)
        other = pool.submit(ask, server, "b")
        until(lambda: server.service.models[1].waiting == 1)
        assert a.open == 1 and not b.executors
        a.executors[0].release()
        assert stream.result().status_code == other.result().status_code == 200
        assert a.open == 0


def test_who_waits_for_memory_may_leave() -> None:
    a, b = Toy("a", 6), Toy("b", 6)
    a.held = True
    with serving(a, b) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, "a")
        until(lambda: a.executors and a.executors[0].begun)
        ask_and_leave(server, "b", 1)
        until(lambda: not server.service._tasks)
        assert statuses(server) == {"a": "ok", "b": "unloaded"} and not b.executors
        a.executors[0].release()
        assert first.result().status_code == 200
        well(server, "b")
        assert a.open == 0


def test_the_model_unused_for_longest_makes_room() -> None:
    a, b, c = Toy("a", 4), Toy("b", 4), Toy("c", 4)
    with serving(a, b, c, ram=10) as server:
        for name in ("a", "b", "a", "c"):
            well(server, name)
        assert statuses(server) == {"a": "ok", "b": "unloaded", "c": "ok"}
        well(server, "b")
        assert statuses(server) == {"a": "unloaded", "b": "ok", "c": "ok"}
    assert [budget.ram for toy in (a, b, c) for budget in toy.budgets] == [4] * 4


def test_a_model_in_use_stays_though_it_was_asked_first() -> None:
    a, b, c = Toy("a", 4), Toy("b", 4), Toy("c", 4)
    a.held = True
    with serving(a, b, c, ram=10) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "a")
        until(lambda: a.executors and a.executors[0].begun)
        well(server, "b")
        well(server, "c")
        assert statuses(server) == {"a": "ok", "b": "unloaded", "c": "ok"}
        a.executors[0].release()
        assert answer.result().status_code == 200


def test_at_most_so_many_models() -> None:
    toys = [Toy(name) for name in "abc"]
    with serving(*toys, together=2) as server:
        for name in "abcab":
            well(server, name)
            assert sum(toy.open for toy in toys) <= 2
        assert statuses(server) == {"a": "ok", "b": "ok", "c": "unloaded"}


def test_what_can_never_fit_is_not_loaded() -> None:
    a, b = Toy("a", 11), Toy("b", 10)
    with serving(a, b) as server:
        well(server, "b")
        answer = ask(server, "a")
        assert answer.status_code == 500 and "needs 11 bytes of 10" in answer.text
        assert statuses(server) == {"a": "failed", "b": "ok"} and not a.executors


def test_the_free_memory_counts_what_models_hold_and_what_they_were_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "available_memory", lambda: 100)
    monkeypatch.setattr(service_module, "total_memory", lambda: 1000)
    monkeypatch.setattr(service_module, "resident_memory", lambda: 60)
    assert service_module.free_memory(0) == 100  # the process itself is no model
    assert service_module.free_memory(40) == 140  # all of it resident: 100 are left
    assert service_module.free_memory(90) == 160  # 30 of it not written yet: 70 are left
    monkeypatch.setattr(service_module, "total_memory", lambda: 150)
    assert service_module.free_memory(90) == 150
    monkeypatch.setattr(service_module, "available_memory", lambda: 0)  # unknown
    assert service_module.free_memory(0) == 90


def test_the_end_while_a_model_loads_or_waits_for_memory() -> None:
    a, b = Toy("a", 6), Toy("b", 6)
    a.held = True
    with serving(a, b, drain=0.2) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, server, "a")]
        until(lambda: a.executors and a.executors[0].begun)
        asked.append(pool.submit(ask, server, "b"))
        until(lambda: server.service.models[1].waiting == 1)
        server.should_exit = True
        a.executors[0].release()
        assert {one.result().status_code for one in asked} <= {200, 503}
    assert a.open == b.open == 0


def test_models_are_loaded_and_unloaded_by_hand() -> None:
    a, b = Toy("a"), Toy("b")
    a.held = True
    with serving(a, b) as server, client(server) as http, ThreadPoolExecutor(2) as pool:
        for path in ("/models/load", "/models/unload"):
            assert http.post(path, json={"model": "c"}).status_code == 404
            assert http.post(path, json={}).status_code == 400
        assert http.post("/models/load", json={"model": "b"}).json() == {"success": True}
        assert statuses(server) == {"a": "unloaded", "b": "ok"}
        for _ in range(2):
            assert http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
            assert b.open == 0
        asked = pool.submit(ask, server, "a")
        until(lambda: a.executors and a.executors[0].begun)
        b.go.clear()
        loading = pool.submit(http.post, "/models/load", json={"model": "b"})
        assert b.begun.acquire(timeout=30) and b.begun.acquire(timeout=30)
        answer = http.post("/models/unload", json={"model": "a"})  # while another one is loaded
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "in_use"
        b.go.set()
        assert loading.result().status_code == 200
        a.executors[0].release()
        assert asked.result().status_code == 200


def test_models_make_room_on_a_gpu() -> None:
    a, b = Toy("a", 2), Toy("b", 2)
    a.vram = b.vram = 6
    policy = ServicePolicy(Budget(10, 8), keep_alive=None)
    server = make_server([toy.source for toy in (a, b)], ServeConfig(port=0), 64, policy)
    with running(server):
        well(server, "a")
        well(server, "b")
        assert statuses(server) == {"a": "unloaded", "b": "ok"}
        a.size = 11  # that is not for want of VRAM
        answer = ask(server, "a")
        assert answer.status_code == 500 and "needs 11 bytes" in answer.text
        assert statuses(server) == {"a": "failed", "b": "ok"}
        a.size, a.vram = 2, 9
        answer = ask(server, "a")
        assert answer.status_code == 500 and "VRAM" in answer.text
    assert [budget.vram for toy in (a, b) for budget in toy.budgets] == [8, 8]


def test_the_engine_of_each_model() -> None:
    a, b = Toy("a"), Toy("b")
    with serving(a, b) as server, client(server) as http:
        well(server, "a")
        about = http.get("/v1/engine").json()
        assert about["models"] == [
            {"name": "a", "status": "ok", "loads": 1}, {"name": "b", "status": "unloaded", "loads": 0},
        ]  # fmt: skip
        one = http.get("/v1/engine", params={"model": "a"}).json()
        assert one["model"]["names"] == ["a"] and one["stats"]["answer_tokens"] == 3
        for path in ("/v1/engine", "/v1/engine/live"):
            answer = http.get(path, params={"model": "b"})
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "unloaded"
        assert http.get("/v1/engine/live").status_code == 400
        assert statuses(server)["b"] == "unloaded"  # looking loads nothing


def test_looking_at_llama_servers_properties_loads_nothing() -> None:
    with serving(Toy("a"), Toy("b")) as server, client(server) as http:
        well(server, "a")
        for path in ("/props", "/slots"):
            assert http.get(path).status_code == 400
            assert http.get(path, params={"model": "a"}).status_code == 200
            assert http.get(path, params={"model": "b"}).status_code == 503
        assert statuses(server) == {"a": "ok", "b": "unloaded"}
        body = {"model": "b", "prompt": "x", "n_predict": 1}
        assert http.post("/completion", json=body).json()["model"] == "b"
        assert http.post("/completion", json={"prompt": "x"}).json()["error"]["code"] == "model_missing"


# ---------------------------------------------------------------- names and flags


def parsed(flags: list[str]) -> Any:
    parser = Parser(prog="powerinfer serve")
    serve.configure(parser)
    return parser.parse_args(flags)


def test_the_models_in_a_folder(tmp_path: Path) -> None:
    for name in ("Tiny.Q4_0.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-x.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("Folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "Folder" / "config.json").touch()
    os.symlink(tmp_path / "missing.gguf", tmp_path / "dangling.gguf")
    found = models_in(tmp_path)
    assert {name: path.name for name, path in found.items()} == {
        "tiny.q4_0": "Tiny.Q4_0.gguf", "big": "big-00001-of-00002.gguf", "folder": "Folder",
    }  # fmt: skip
    (tmp_path / "TINY.Q4_0.gguf").touch()
    with pytest.raises(RequestError, match="both named tiny"):
        models_in(tmp_path)
    with pytest.raises(RequestError, match="cannot read the folder"):
        models_in(tmp_path / "missing")


def test_durations() -> None:
    given = {"90": 90, "30s": 30, "5m": 300, "1.5h": 5400, "250ms": 0.25, "0": 0, "-1": None, "-1s": None}
    assert {text: read_duration(text) for text in given} == given
    for text in ("", "5x", "m", "1e9", "nan", "5 m 3"):
        with pytest.raises(ValueError):
            read_duration(text)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--models", "{}", "--alias", "x"], "--alias is for one model"),
        (["--models", "{}", "--prepared", "x"], "--prepared is for one model"),
        (["-m", "{}/a.gguf", "--keep-alive", "5m"], "--keep-alive is for several models"),
        (["-m", "{}/a.gguf", "--max-models", "2"], "--max-models is for several models"),
        (["--models", "{}/missing"], "cannot read the folder"),
        (["--models", "{}", "-m", "a={}/b.gguf"], "both named a"),
        (["-m", "={}/a.gguf", "-m", "{}/b.gguf"], "1 to 128 printable"),
        (["-m", "x={}/missing.gguf", "-m", "{}/b.gguf"], "no file or folder"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], says: str, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    args = parsed([flag.format(tmp_path) for flag in flags])
    with pytest.raises(RequestError, match=says):
        serve.execute(args, Output(False))


def test_a_folder_without_models_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "powerinfer.serve")
    args = parsed(["--models", str(tmp_path), "--port", "0"])
    server = serve._serve_several(args, config_from(args, ServeConfig), config_from(args, EngineConfig), Output(False))
    server._listening.close()
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warned.getMessage().startswith(f"no models in {tmp_path} yet: GGUF files and model folders are served once")


def test_what_a_list_shows_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that were pulled, and those of a clone; of two with one name the former."""
    from powerinfer import hub

    def model(name: str, folder: str) -> hub.StoredModel:
        return hub.StoredModel(name, tmp_path / folder / name, "", 1, 0.0)

    monkeypatch.setattr(hub, "list_stored", lambda: [model("a", "pulled"), model("b", "pulled")])
    monkeypatch.setattr(hub, "list_cloned", lambda: [model("b", "clone"), model("c", "clone")])
    seen: dict[str, Path] = {}
    monkeypatch.setattr(serve, "_source", lambda name, path, _: seen.setdefault(name, path))
    serve._sources("", {}, EngineConfig())
    assert {name: path.parent.name for name, path in seen.items()} == {"a": "pulled", "b": "pulled", "c": "clone"}


def test_what_a_model_needs_is_known_from_its_headers(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    engine = EngineConfig(threads=1)
    needs = serve._needs(path, engine, Budget(1 << 31))
    assert needs.ram > needs.kv > 0 and needs.vram == 0
    with pytest.raises(RequestError, match="are free: lower --context"):
        serve._needs(path, engine, Budget(needs.ram - 1))
    with pytest.raises(RequestError, match="--ram is"):
        serve._needs(path, EngineConfig(threads=1, ram=needs.ram - 1), Budget(needs.ram - 1))
    with serve._load("tiny", path, engine, lambda *_: None, Budget(needs.ram)) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
        assert llm.stats().pages * 32 == llm.context  # the cache of one context


def test_files_of_a_folder_are_served(tmp_path: Path) -> None:
    """Two models of one folder and a broken file, with their own bytes."""
    for name in ("one", "two"):
        tiny_llama(tmp_path / f"{name}.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    args = parsed(["--models", str(tmp_path), "--port", "0", "--threads", "1", "--max-models", "1"])
    configs = config_from(args, ServeConfig), config_from(args, EngineConfig)
    server = serve._serve_several(args, *configs, Output(False))
    with running(server), client(server) as http:
        for name in ("one", "two", "one"):
            answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "model": name})
            assert answer.status_code == 200, answer.text
            answer = http.post("/v1/completions", json={"prompt": "abc", "model": "broken"})
            assert answer.status_code == 500 and "broken.gguf" in answer.json()["error"]["message"]
        assert statuses(server) == {"broken": "failed", "one": "ok", "two": "unloaded"}
        (tmp_path / "two.gguf").rename(tmp_path / "two-00001-of-00001.gguf")  # the same name, another path
        for name in ("two", "one"):
            answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "model": name})
            assert answer.status_code == 200, answer.text
        tiny_llama(tmp_path / "three.gguf")
        (tmp_path / "one.gguf").unlink()
        (tmp_path / "two-00001-of-00001.gguf").unlink()
        answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "model": "three"})
        assert answer.status_code == 200, answer.text
        (tmp_path / "broken.gguf").unlink()
        assert [row["id"] for row in http.get("/v1/models").json()["data"]] == ["three"]
        (tmp_path / "THREE.gguf").touch()  # the list stays as it was
        assert [row["id"] for row in http.get("/v1/models").json()["data"]] == ["three"]


def test_memory_falls_when_a_model_is_unloaded(smollm2: Path) -> None:
    engine = EngineConfig(threads=1, context=512)
    alive: list[weakref.ref[LLM]] = []
    loaded: list[int] = []

    def load(progress: Any, budget: Budget) -> LLM:
        llm = serve._load("small", smollm2, engine, progress, budget)
        alive.append(weakref.ref(llm))
        loaded.append(resident_memory())
        return llm

    source = ModelSource(("small",), load, partial(serve._needs, smollm2, engine))
    server = make_server([source], ServeConfig(port=0), 64, ServicePolicy(keep_alive=0.0))
    with running(server):
        well(server, "small")
        until(lambda: not server.service.models[0].has_engine and alive[0]() is None)
        until(lambda: resident_memory() < loaded[0] - smollm2.stat().st_size * 3 // 4)
        well(server, "small")
        until(lambda: len(alive) == 2 and alive[1]() is None)
