"""Launches find what Triton has compiled by keys of their own. In a process of its own, for a kernel is either
interpreted or compiled; nothing is compiled or run, on a made-up device."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CALLS = 60
"""Of each kernel, with arguments of random kinds."""


def arguments_of(kernel: Any, rng: Any, tensors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of a kernel, and its options."""
    numbers = [1, 7, 16, 0, -16, 1 << 31, 1 << 33, (1 << 33) + 1, -(1 << 40), 1 << 63]
    others = [None, True, False, 0.5]
    constants = [1, True, 1.0, "Q4_0", None, 16]
    positional, named = [], {}
    for param in kernel.params:
        if param.is_constexpr:
            named[param.name] = rng.choice(constants)
        else:
            positional.append(rng.choice(rng.choice([tensors, tensors, numbers, others])))
    return positional, named | rng.choice([{}, {"num_warps": 2}, {"num_warps": 2, "launch_pdl": True}])


def checked() -> dict[str, float]:
    """Every kernel's launches, and microseconds of one by keys and by Triton's binder alone."""
    import random
    from importlib import import_module

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, compute_cache_key

    from powerinfer import kernels
    from powerinfer.kernels.triton_launch import Launcher

    class Device:
        def get_current_device(self) -> int:
            return 90

        def get_current_stream(self, device: int) -> int:
            return 11

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    class Compiled:
        packed_metadata = 5

        def __init__(self, key: str) -> None:
            self.function = key

        def run(self, *given: Any) -> None:
            launches.append(given)

    driver.set_active(Device())
    launches: list[Any] = []
    asked: list[str] = []

    def own_key(kernel: Any, *args: Any, **named: Any) -> str:
        _, keys, _, _, binder = kernel.device_caches[90]
        _, specialization, options = binder(*args, **named)
        found: str = compute_cache_key(keys, specialization, options)
        return found

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Compiled:
        asked.append(own_key(self, *args, **named))
        return Compiled(asked[-1])

    JITFunction.run = run
    memory = torch.zeros(256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    kinds = torch.float32, torch.float16, torch.int32, torch.uint8
    tensors = [memory[at : at + 64].view(kind) for kind in kinds for at in (0, 4, 16, 40)]
    rng, seconds, own_seconds, found = random.Random(1), 0.0, 0.0, 0
    for file in sorted(Path(kernels.__path__[0]).glob("triton_*.py")):
        module = import_module(f"powerinfer.kernels.{file.stem}")
        for launcher in [one for one in vars(module).values() if isinstance(one, Launcher)]:
            found += 1
            for _ in range(CALLS):
                positional, named = arguments_of(launcher.kernel, rng, tensors)
                before, wanted = len(asked), own_key(launcher.kernel, *positional, **named)
                for grid in ((3,), (3, 4), (3, 4, 5)):
                    launcher[grid](*positional, **named)
                    if len(asked) > before:
                        assert asked.pop() == wanted
                        continue
                    *whole, stream, function, packed, nothing, enter, leave = launches[-1][:9]
                    assert tuple(whole) == (*grid, 1, 1)[:3] and (stream, function, packed) == (11, wanted, 5)
                    assert nothing is enter is leave is None
                    values = iter(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in positional)
                    params = launcher.kernel.params
                    in_order = [named[one.name] if one.is_constexpr else next(values) for one in params]
                    assert list(map(repr, launches[-1][9:])) == list(map(repr, in_order))
            plain = [tensors[0] if not param.is_constexpr else 16 for param in launcher.kernel.params]
            count = 200
            for _ in range(2):
                begin = time.thread_time()
                for _ in range(count):
                    launcher[(3, 4)](*plain, num_warps=4)
                middle = time.thread_time()
                for _ in range(count):
                    own_key(launcher.kernel, *plain, num_warps=4)
            seconds, own_seconds = seconds + middle - begin, own_seconds + time.thread_time() - middle
    each = 1e6 / count / found
    return {"kernels": found, "launches": len(launches), "us": seconds * each, "binder_us": own_seconds * each}


def decorators_of(function: ast.FunctionDef) -> set[str]:
    """Names of a function's decorators, without their arguments."""
    calls = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return {ast.unparse(one) for one in calls}


def wrongly_decorated(sources: dict[str, str]) -> list[str]:
    """Jit functions that are launched and are not `launched`, or are and are called inside another: by Triton, which
    knows no `Launcher`."""
    jit, launched, called = dict[str, bool](), set[str](), set[str]()
    for name, text in sources.items():
        tree = ast.parse(text)
        real = {one.asname: one.name for one in ast.walk(tree) if isinstance(one, ast.alias) and one.asname}
        for part in tree.body:
            inside = isinstance(part, ast.FunctionDef) and "triton.jit" in decorators_of(part)
            if isinstance(part, ast.FunctionDef) and inside:
                jit[f"{name}: {part.name}"] = "launched" in decorators_of(part)
            for call in (node.func for node in ast.walk(part) if isinstance(node, ast.Call)):
                if isinstance(call, ast.Name) and inside:
                    called.add(real.get(call.id, call.id))
                elif isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name):
                    launched.add(real.get(call.value.id, call.value.id))
    names = {at: at.split()[-1] for at in jit}
    return [at for at, decorated in jit.items() if names[at] in (called if decorated else launched)]


def test_launched_is_what_is_launched() -> None:
    """And nothing else: the interpreter computes both, and only a GPU would tell."""
    folder = Path(__file__).parents[1] / "src" / "powerinfer" / "kernels"
    sources = {file.stem: file.read_text() for file in sorted(folder.glob("triton_*.py"))}
    assert len(sources) > 9 and wrongly_decorated(sources) == []
    kernels = sources["triton_prompt_experts"]
    kernel = "@launched\n@triton.jit\ndef _prompt_hidden_kernel"
    assert kernel in kernels
    sources["triton_prompt_experts"] = kernels.replace(kernel, kernel.removeprefix("@launched\n"))
    assert wrongly_decorated(sources) == ["triton_prompt_experts: _prompt_hidden_kernel"]
    sources["triton_prompt_experts"] = kernels
    helper = "@triton.jit\ndef rows_of"
    assert helper in sources["triton_experts"]
    sources["triton_experts"] = sources["triton_experts"].replace(helper, f"@launched\n{helper}")
    assert wrongly_decorated(sources) == ["triton_experts: rows_of"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_launches_find_the_kernel_that_triton_would() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout)
    assert told["kernels"] > 45 and told["launches"] > 100 * told["kernels"]
    assert told["us"] < told["binder_us"], told


if __name__ == "__main__":
    print(json.dumps(checked()))
