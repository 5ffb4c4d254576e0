"""Fixtures that more than one test file uses, and how the tests share the cores."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import gzip
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch and numpy are loaded: a worker of pytest-xdist has one core, and even alone, torch's threads and the
# engine's on the same cores wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import gpu_device  # before anything imports Triton, for it says whether kernels are interpreted
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from samples import CHOICES, left_out
from seconds import Seconds

from powerinfer.errors import PowerInferError
from powerinfer.hardware.description import load
from powerinfer.hub import cache_folder, resolve_model
from powerinfer.kernels import cpu
from powerinfer.system import Disturbance, usable_cores

if TYPE_CHECKING:
    from openai import OpenAI

    from powerinfer.runtime.engine import LLM
    from powerinfer.serve.server import Server

# A shell that starts the tests in the background lets them, and every process they start, ignore Ctrl-C; some test it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def own_cache(real: Path) -> Path:
    """A folder for what tests measure of this machine, which other tests disturb; models are where they always are."""
    real = real.resolve()
    (real / "models").mkdir(parents=True, exist_ok=True)
    folder = real / "tests"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "models").symlink_to(real / "models")
    return folder


# A worker has it of the process that started it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["POWERINFER_CACHE"] = str(own_cache(cache_folder()))

# A model that is not told how many threads to take has one: a worker of pytest-xdist has one core, and threads of
# several workers' models would wait for each other. Tests of threads say how many.
cpu.usable_cores = lambda: (1, "a worker has one core")

# A bound on each example's time would measure what else runs on these cores.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core that may be used, each of which takes a gigabyte or two of memory."""
    return min(8, usable_cores()[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and the libraries that they import are no garbage, a million objects: to look for some among
    them takes seconds a worker, and each time again. Nor do tests make so much of it that it need be looked for often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(7000)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """What takes long begins first: at the end a worker would be alone with it."""
    if unused := left_out(items, config.getoption("--cases"), config.args):
        config.hook.pytest_deselected(items=unused)
        names = {item.nodeid for item in unused}
        items[:] = [item for item in items if item.nodeid not in names]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


HANGS = 900
"""Seconds after which a test that hangs ends, with the stacks of all threads; up to REARMED fewer."""
REARMED = 60

_watched = [-float(REARMED)]
"""When that time began to run, last."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What pytest's `faulthandler_timeout` does for every test: it starts a thread, and waits for its end, which takes
    milliseconds where all cores are busy."""
    if time.monotonic() - _watched[0] >= REARMED:
        _watched[0] = time.monotonic()
        faulthandler.dump_traceback_later(HANGS, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])


def pytest_unconfigure(config: pytest.Config) -> None:
    """At the end what tests keep is garbage, too, or nanobind reports its own part of it as leaks."""
    faulthandler.cancel_dump_traceback_later()
    if not config.option.collectonly:
        gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def collectable() -> Iterator[None]:
    """The command line freezes what it loads, for its process ends with one command; here, cycles must be collected.

    Otherwise they keep models in memory, and native objects until the process ends, which nanobind reports as leaks.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def undisturbed() -> Iterator[None]:
    """Tests run side by side, which would count as a disturbance of trials: for them the machine is quiet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disturbance, "_read", staticmethod(lambda: (0.0, 0.0, 0.0, time.monotonic())))
        yield


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """UTF-8 encodes all but surrogates. Hypothesis tries every character, three seconds of each process, unless a file
    says so."""
    with contextlib.suppress(ImportError, AttributeError):  # it is not an interface
        from hypothesis.internal import charmap

        path = charmap.charmap_file("codec-v2-utf-8")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(path, "wt") as file:
                json.dump([[[0, 0xD7FF], [0xE000, sys.maxunicode]], []], file)


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        config.pluginmanager.register(Seconds(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help="write tests/seconds.txt (tests/seconds.py)")
    parser.addoption("--cases", choices=CHOICES, default=CHOICES[0], help="of tests that are marked as sampled")
    parser.addoption(
        "--deferred", type=int, action="append", default=[], metavar="SEED",
        help="run tests of GPU code on the device that works later instead (tests/deferred.py); may be repeated",
    )  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        seeds = [f"deferred {seed}" for seed in metafunc.config.getoption("--deferred")]
        metafunc.parametrize("device", seeds or gpu_device.DEVICES, indirect=True)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for a described machine: to measure this one takes half a minute."""
    monkeypatch.setattr("powerinfer.hardware.measure.measured", lambda *_, **__: load("pc-high"))


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, described: None) -> Iterator[str]:
    """What a test of GPU code runs on, for `gpu_device.device_name`: every device that there is.

    A prompt's products are of float32 there, as the bounds are; tests of narrower types ask for them.
    """
    monkeypatch.setattr("powerinfer.kernels.gpu._NARROW", [])
    name, _, seed = request.param.partition(" ")
    if not seed:
        with gpu_device.used(name):
            yield name
        return
    from deferred import deferred

    with deferred(int(seed)):
        yield name


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    """A server of the module's `llm`."""
    from serving import serving

    with serving(llm) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    """OpenAI's client of the module's `server`."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
        yield api


@pytest.fixture
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """Whatever a test does to a server, its model is idle afterwards."""
    from serving import until
    from toy_model import idle

    yield
    until(lambda: idle(llm))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M's GGUF file, fetched once as a user's `pull smollm2` would fetch it."""
    try:
        return resolve_model("smollm2")
    except PowerInferError as error:
        pytest.fail(f"SmolLM2 could not be had: {error}", pytrace=False)


@pytest.fixture(autouse=True)
def no_handler_is_left() -> Iterator[None]:
    """`serve` in this process logs to the standard error of its test, which is closed afterwards."""
    yield
    logs = sys.modules.get("powerinfer.serve.logs")
    if logs is not None:
        root = logging.getLogger()
        root.handlers = [one for one in root.handlers if not isinstance(one.formatter, logs.JsonLines)]
