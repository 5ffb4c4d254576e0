"""Replicas of the server on Ray Serve: each loads the model and answers, Ray routes requests to them and restarts them.

Ray's default router is used, the less busy of two replicas. Its prefix-aware one is part of `ray.serve.llm`, which
needs `ray[llm]` with vLLM, and routes calls between Python objects, not HTTP requests.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve

from powerinfer.config import EngineConfig, ServeConfig
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.progress import Progress
from powerinfer.runtime.engine import LLM
from powerinfer.serve.gate import App
from powerinfer.serve.keys import Keys
from powerinfer.serve.logs import log, log_notes, set_up
from powerinfer.serve.served import Budget, ModelSource
from powerinfer.serve.server import IN_PROGRESS, assemble, checked_keys, listen, read_replicas
from powerinfer.serve.service import Service

NAME = "powerinfer"  # of the application and its deployment
CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # of Ray Serve, on every cluster where it runs
HEALTH_SECONDS = 5.0  # between two checks of a replica
STARTS = 2  # of a replica, before the deployment counts as failed


class Setup(NamedTuple):
    """Settings of a replica. path: of the model, on every machine; requests: that it takes, waiting or not."""

    path: str
    names: tuple[str, ...]
    engine: EngineConfig
    config: ServeConfig
    keys: list[str]
    requests: int


@serve.ingress()
class Replica:
    """The whole server but its socket. It takes requests once the model is loaded."""

    async def __init__(self, setup: Setup) -> None:  # type: ignore[misc]  # Ray awaits it
        set_up()
        config = setup.config
        self._service = Service(
            [ModelSource(setup.names, partial(_load, setup))],
            timeout=config.timeout or None,
            queue_timeout=config.queue_timeout or None,
        )
        self._app = assemble(self._service, config, Keys(setup.keys), setup.requests)
        loading = self._service.start()
        assert loading is not None
        await loading
        if self._service.failure is not None:
            raise RuntimeError(str(self._service.failure))

    def __serve_build_asgi_app__(self) -> App:
        return self._app

    async def check_health(self) -> None:
        """Ray restarts a replica that raises here."""
        if self._service.failure is not None:
            raise RuntimeError(str(self._service.failure))

    async def __del__(self) -> None:
        await self._service.close()


def _load(setup: Setup, progress: Progress, budget: Budget) -> LLM:
    llm = LLM(setup.path, progress=progress, **dataclasses.asdict(setup.engine))
    llm.prepare()
    log_notes(llm.notes)
    return llm


def application(setup: Setup, replicas: tuple[int, int], cpus: float, gpus: float) -> serve.Application:
    """The application. replicas: fewest and most; cpus, gpus: of a replica, as Ray counts them."""
    fewest, most = replicas
    scaling: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:  # as many as have a full batch to compute
        target = setup.engine.max_batch
        scaling = {
            "autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": target}
        }
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=setup.requests + IN_PROGRESS,  # what is beyond its limits the replica itself refuses
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=max(0.1, setup.config.drain),
        max_constructor_retry_count=STARTS,
        **scaling,
    )(Replica)
    return deployment.bind(setup)


def run(path: Path, names: tuple[str, ...], engine: EngineConfig, config: ServeConfig, requests: int) -> None:
    """Serve until SIGTERM or Ctrl-C, on the cluster of RAY_ADDRESS, else on one of this machine's.

    RequestError for what the cluster cannot hold, and if Ray Serve runs there already; PowerInferError if no
    replica starts.
    """
    assert config.ray is not None
    keys = checked_keys(config)
    replicas = read_replicas(config.ray)
    open_checkpoint(path, quantize=engine.quantize)  # a file that cannot be run is told before Ray starts
    with listen(config) as free:  # Ray's proxy would try for long
        port = free.getsockname()[1]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    ray.init(logging_level=logging.WARNING, include_dashboard=False, configure_logging=False)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set handlers of its own, which abort
        signal.signal(number, lambda *_: ended.set())
    began = False
    try:
        _check_unused()
        threads, cpus, gpus = _shares(engine, replicas[1])
        engine = dataclasses.replace(engine, threads=threads)
        setup = Setup(str(path.resolve()), names, engine, config, keys, requests)
        http = {"host": config.host, "port": port, "ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        began = True
        serve.start(http_options=http, logging_config={"log_level": "WARNING"})
        try:
            quiet = {"enable_access_log": False, "log_level": "WARNING"}  # the server has a log of its own
            serve.run(application(setup, replicas, cpus, gpus), name=NAME, logging_config=quiet)
        except RuntimeError as error:
            raise PowerInferError(f"no replica started: {_reason() or error}") from None
        scheme = "https" if config.tls_cert else "http"
        log("info", "listening", url=f"{scheme}://{config.host}:{port}", models=names, replicas=config.ray)
        ended.wait()
        log("info", "draining")
    finally:
        with suppress(Exception):  # a cluster that is gone has nothing left to end
            if began:
                _end()
        ray.shutdown()


def _check_unused() -> None:
    """RequestError if Ray Serve runs on the cluster already: its proxies would keep their address and certificate."""
    if {"name": CONTROLLER, "namespace": "serve"} in ray.util.list_named_actors(all_namespaces=True):
        raise RequestError("Ray Serve already runs on this cluster: end it (`serve shutdown`), or unset RAY_ADDRESS")


def _end() -> None:
    """End the application; and Ray Serve, unless others use it by now."""
    serve.delete(NAME)
    if not serve.status().applications.keys() - {NAME}:
        serve.shutdown()


def _shares(engine: EngineConfig, replicas: int) -> tuple[int, float, float]:
    """(threads, CPUs, GPUs) of a replica. RequestError if the cluster has too few CPUs."""
    has = ray.cluster_resources()
    cores = int(has.get("CPU", 0))
    threads = engine.threads or max(1, cores // replicas)
    if threads * replicas > cores:
        raise RequestError(
            f"{replicas} replicas of {threads} threads need more than the {cores} CPUs that Ray has: lower --ray or "
            "--threads"
        )
    gpus = 0.0 if engine.gpu == "none" or engine.vram == 0 else has.get("GPU", 0.0) / replicas
    return threads, float(threads), gpus if gpus < 1 else math.floor(gpus)


def _reason() -> str:
    """The error of the last replica that failed to start."""
    message = serve.status().applications[NAME].deployments[NAME].message
    lines = [line.strip() for line in message.splitlines() if line.strip().startswith("RuntimeError: ")]
    return lines[-1].removeprefix("RuntimeError: ") if lines else ""
