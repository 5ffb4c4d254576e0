"""The Triton kernels, compiled for GPUs that need not be there: what the interpreter takes, the compiler may refuse.

In a process of its own, for a kernel is either interpreted or compiled. Nothing is run. What was compiled is kept:
Triton finds it again by the kernel's source, its own version and the options. Of kernels of several types those are
compiled whose code differs most; with POWERINFER_COMPILE=all (`make test-compile`) every type and option is.

`compiled.txt` has what the compiler made of the former. A kernel that it lists by the hash of all that the compiler
reads is not compiled again; `make compiled` writes it anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from powerinfer.hub import cache_folder

SHARED = {86: 99, 89: 99, 90: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""
SPILT = 24
"""Bytes a thread that kernels for several tokens keep in memory at most, since they have no registers left."""
SINE = 32
"""Bytes that the compiler's sine takes, for angles above 100,000."""
SPILT_BY_EXPERTS = 96
"""The same of several tokens of an expert, and of heads with latents."""
UNPACKED = ("Q3_K", "IQ2_XXS")
"""Of the types that are unpacked to words those that are compiled unless all are."""
EVERY = os.environ.get("POWERINFER_COMPILE") == "all"
RECORDS = os.environ.get("POWERINFER_COMPILE") == "record"
CAPABILITIES = ((86,), (89,), (90,), (120,)) if EVERY else ((89, 90),)
"""Of the GPUs, by process."""
RECORD = Path(__file__).with_name("compiled.txt")
KEPT_DAYS = 14
"""As long a compiled kernel is kept: whoever works on kernels makes some 200 MB of them with every change."""
HOLDS = {86: (48, 16, 100), 89: (48, 24, 100), 90: (64, 32, 228), 120: (48, 24, 100)}
"""Warps, programs and KiB of shared memory that a multiprocessor holds; registers: 65536, for four parts of it."""


def used(cubin: bytes) -> dict[int, int]:
    """Registers of a thread (0x2f) and bytes of its stack (0x11), as the file for the GPU states them (ELF)."""
    (sections,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + 64 * i) for i in range(count)]
    found = {}
    for name, _, _, _, begin, size in headers:
        at = headers[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] == b".nv.info":
            place = begin
            while place < begin + size:
                form, attribute, length = struct.unpack_from("<BBH", cubin, place)
                if attribute in (0x2F, 0x11):
                    found[attribute] = struct.unpack_from("<II", cubin, place + 4)[1]
                place += 4 + (length if form == 4 else 0)
    return found


def waits(ptx: str) -> bool:
    """Whether a program waits for the kernel before it: before it reads or writes anything, if it does, and once it let
    the next one be launched and asked for weights, unless it has to read which."""
    at = ptx.find("griddepcontrol.wait")
    others = [ptx.find(one) for one in ("ld.global", "st.global")]
    assert at < 0 or all(at < other for other in others if other >= 0)
    before = ptx.rfind("prefetch.") if "_fused_kernel" not in ptx else -1
    assert at < 0 or before < ptx.find("griddepcontrol.launch_dependents") < at
    return at >= 0


def held(kernel: dict[str, Any], capability: int) -> int:
    """Programs that a multiprocessor holds at a time."""
    warps, programs, shared = HOLDS[capability]
    of_a_warp = 256 * -(-32 * kernel["registers"] // 256)
    by_registers = 4 * (16384 // of_a_warp) // kernel["warps"]
    by_shared = (shared << 10) // (kernel["shared"] + 1024)
    return min(by_registers, by_shared, warps // kernel["warps"], programs)


@dataclass
class Compiled:
    """What the compiler made of a kernel. key: by the hash of all that the compiler reads; shared: bytes of a program;
    registers, stack: of a thread."""

    capability: int
    name: str
    key: str
    warps: int
    registers: int
    stack: int
    shared: int
    waits: bool
    asks: bool

    def line(self) -> str:
        return " ".join(str(int(value) if isinstance(value, bool) else value) for value in astuple(self))

    @classmethod
    def read(cls, line: str) -> Compiled:
        capability, name, key, *numbers, waits, asks = line.split()
        warps, registers, stack, shared = map(int, numbers)
        return cls(int(capability), name, key, warps, registers, stack, shared, waits == "1", asks == "1")


def recorded() -> dict[str, Compiled]:
    """What `compiled.txt` lists, by key."""
    return {one.key: one for one in map(Compiled.read, RECORD.read_text().splitlines())}


def use_record() -> None:
    """Triton's compiler compiles what the record lacks."""
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import JITCallable

    plain, known, plain_init = compiler.compile, {} if EVERY else recorded(), JITCallable.__init__

    def init(self: Any, *given: Any) -> None:
        """A kernel's place in its file is part of its hash, and says nothing of its code."""
        plain_init(self, *given)
        self.starting_line_number = 1

    def compile_unless_recorded(src: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
        backend = compiler.make_backend(target)
        parsed = backend.parse_options({**options, **src.parse_options()})
        key = hashlib.sha256(get_cache_key(src, backend, parsed, {}).encode()).hexdigest()[:24]
        if key not in known:
            kernel = plain(src, target=target, options=options)
            ptx, facts = kernel.asm["ptx"], used(kernel.asm["cubin"])
            assert ptx
            known[key] = Compiled(
                target.arch, src.fn.__name__, key, kernel.metadata.num_warps, facts[0x2F], facts[0x11],
                kernel.metadata.shared, waits(ptx), "prefetch.global.L2" in ptx,
            )  # fmt: skip
        return known[key]

    JITCallable.__init__ = init
    triton.compiler.compile = compile_unless_recorded


def compile_all(capability: int) -> list[dict[str, Any]]:
    """Every launch of a step of one and of some tokens, for a made-up device: name, type, shared memory."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from powerinfer.config import (
        AttentionConfig,
        DeltaNetConfig,
        LatentAttentionConfig,
        Mamba2Config,
        RopeConfig,
        RouterConfig,
        ShortConvConfig,
    )
    from powerinfer.formats.weight_types import FLOAT_TYPES, WEIGHT_TYPES
    from powerinfer.kernels import (
        candidates,
        cpu,
        gpu,
        gpu_candidates,
        gpu_delta,
        gpu_experts,
        gpu_host,
        gpu_latent,
        gpu_mamba,
        gpu_panels,
        gpu_short_conv,
        gpu_states,
        triton_kernels,
    )
    from powerinfer.kernels.gpu_types import CallAnswer, Elsewhere
    from powerinfer.neurons import BundleLayout

    class Device:
        """What the launcher asks of one."""

        def get_current_device(self) -> int:
            return capability  # kernels are found by this number

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    driver.set_active(Device())
    launch, made = JITFunction.run, {}

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **constants: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **constants)
        made[kernel.key] = {
            "name": self.fn.__name__,
            "type": constants.get("TYPE"),
            "tokens": constants.get("T"),
            "together": constants.get("G"),
            "shared rows": constants.get("TILES") if self.fn.__name__ == "_linear_kernel" else None,
            "block": constants.get("BLOCK"),  # of attention, the dimensions of a head
            "turns": constants.get("TURNS", False),
            "prompt": constants.get("HALF", False),
            "shared": kernel.shared,
            "warps": kernel.warps,
            "registers": kernel.registers,
            "stack": kernel.stack,
            "early": "launch_pdl" in constants,
            "waits": kernel.waits,
            "asks": kernel.asks,
            "line": kernel.line(),
        }

    JITFunction.run = compiled
    gpu.force_triton(True)
    gpu._NARROW.append("cpu")  # as a GPU multiplies many tokens
    # For one GPU every kernel with every type that has code of its own in it, and every option of one of them. For the
    # other those of tensor cores, which are programmed in another way and may lack the shared memory for their stages,
    # and some of what multiplies in registers. Every type is unpacked by products alone unless EVERY; those of experts
    # and heads call the same functions, so they have a type of floats and one of codes.
    whole = capability == 90
    compiled_types = [one for one in gpu.GPU_TYPES if EVERY or one not in gpu.UNPACKED or one in UNPACKED]
    types = compiled_types if whole else ("F16", "Q6_K")
    distinct = [kind for kind in types if kind not in ("BF16", "Q4_K")]  # F16's or F32's way, a part of Q5_K's
    multiplied = types if EVERY else distinct if whole else ("Q6_K",)
    several = distinct if EVERY else ("F16", "Q6_K") if whole else ("F16",)
    few_types = ("F32", "F16", "Q4_0", "Q8_0", "Q6_K")[: 5 if whole else 3]
    d_model, d_ff, heads, kv_heads = 512, 1024, 8, 2
    wide, many = 8192, 28672  # as ReGLU-70B: tiles are those of real matrices, whose memory is not touched

    def weight(kind: str, rows: int = d_ff, k: int = d_model) -> gpu.Weight:
        return gpu.empty(kind, rows, k, "cpu")

    def by_neuron(
        kind: str, gate: str | None, activation: str, x: torch.Tensor, slots: int = 4, predictor: str | None = None
    ) -> None:
        selects = None if predictor is None else gpu_experts.ExpertPredictor(weight(predictor, d_ff, 128), 0.5)
        hidden = None if predictor is None else torch.empty(len(x), 128)
        shared = torch.empty(d_ff // 32, d_model, dtype=torch.float16) if kind in gpu.SHARING else None
        parts = None if gate is None else weight(gate), weight(kind), weight(gpu.SHARING.get(kind, kind))
        options = {"by_neuron": True, "shared": shared, "predictor": selects}
        own = gpu_experts.Experts(slots, d_ff // slots, *parts, activation, 0.0, **options)
        places = torch.zeros(len(x), 2, dtype=torch.int32)
        gpu_experts.expert_sum(own, x, places, places.float(), places[0], x.clone(), hidden)

    for kind in gpu.GPU_TYPES if EVERY else few_types:
        gpu.linear(weight(kind, wide, wide), torch.empty(gpu.FEW, wide))
    for kind in ("F16", "Q4_0", "Q6_K") if whole else ():  # few rows, which several programs share
        gpu.linear(weight(kind, 512, wide), torch.empty(gpu.FEW, wide))
    in_registers = ("F16", 1), ("Q4_0", 4), ("Q8_0", 4), ("Q6_K", 1), ("Q8_0", 16), ("Q4_0", 16)
    in_registers += tuple((kind, 1) for kind in gpu.UNPACKED)
    for kind, tokens in () if whole else in_registers if EVERY else in_registers[:2]:
        gpu.linear(weight(kind, wide, wide), torch.empty(tokens, wide))
    for tokens in (1, 4) if whole else (16,):
        x = torch.empty(tokens, d_model)
        named = torch.empty(tokens, d_ff, dtype=torch.uint8)
        for kind in multiplied if EVERY or tokens != 4 else ("F32", "F16", "Q8_0", "Q4_0", "Q6_K"):
            into = torch.empty(tokens, wide) if kind in ("F16", "Q4_0") else None  # with a residual, and without
            gpu.linear(weight(kind, wide, wide), torch.empty(tokens, wide), into=into)
        for kind in ("Q8_0", "Q4_0") if EVERY else ("Q8_0",):  # of others below, as wide as they are
            parts = (weight(kind), weight(kind), weight(kind), None, None)
            gpu.neuron_sum(gpu.Neurons(*parts, None, None, "relu", 0.0), x, named)
        slots, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)
        for kind in several:
            first, down = weight(kind), weight(kind, 4 * d_model, d_ff // 4)
            own = gpu_experts.Experts(4, d_ff // 4, first, first, down, "silu", 0.0)
            gpu_experts.expert_sum(own, x, slots, weights, slots[0], x.clone())
        bundled = ("F16", "F32", "relu"), ("Q8_0", None, "relu2"), ("Q4_0", "Q4_0", "relu2"), ("BF16", "Q8_0", "drelu")
        for kind, gate, activation in bundled[: 1 + 2 * whole + EVERY if EVERY or tokens == 1 else 1]:
            by_neuron(kind, gate, activation, x)
        by_neuron("Q8_0", None, "relu2", x, predictor="Q8_0")
        if whole and (EVERY or tokens == 1):
            by_neuron("F16", "F16", "drelu", x, predictor="F16")
        if not whole:
            continue
        bias = torch.empty(d_ff)
        plain = (None, weight("F16"), weight("F16"), None, None, None, bias)
        if tokens == 1:
            gpu.neuron_sum(gpu.Neurons(*plain, "silu", 0.0), x, None, 0.1)
            gpu.neuron_sum(gpu.Neurons(*plain, "fatrelu", 0.0, bias), x, None)
        else:
            gpu.neuron_sum(gpu.Neurons(*plain, "gelu_tanh", 0.0), x, None, 0.1)
            gpu.neuron_sum(gpu.Neurons(*plain, "xielu", (0.7, 1.1, 0.5, -1e-6)), x, None)
            gpu.neuron_sum(gpu.Neurons(weight("F16"), *plain[1:], "cats", 0.0, bias, bias), x, None)
        low, high = weight("Q8_0", 64), weight("Q8_0", d_ff, 64)
        # Beside a CPU: what it gets is written into the host's memory, and its call answered.
        answer = CallAnswer(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 8)
        elsewhere, sent = Elsewhere(slots[0], answer), (slots, weights)
        for floor in (0, 8):
            gpu.predict(low, high, torch.empty(d_ff).int(), x, 0.5, floor, (named[:, :8], named[:, 8:]), answer)
        gpu.norm(x, x[0], x[0], 1e-5, True)
        gpu.norm(torch.empty(tokens, wide), torch.empty(wide), None, 1e-5, False, for_codes=True, sent=x)
        gpu_host.put(x, x)
        gpu_host.take(x, answer)
        gpu_host.add(x, x, answer)
        for activation in ("silu", "swiglu_oai"):
            gpu.activate(activation, torch.empty(tokens, many), torch.empty(tokens, many), for_codes=True)
        gpu.activate("xielu", torch.empty(tokens, many), None, (0.7, 1.1, 0.5, -1e-6), for_codes=True)
        about = RouterConfig(2, "sigmoid", groups=4, top_groups=2, group_best=2)
        gpu_experts.route(torch.empty(tokens, 32), about, torch.empty(32), slots, weights, sent, elsewhere)
        about = RouterConfig(2, "sparsemixer", normalise=False, nearness=0.01)
        gpu_experts.route(torch.empty(tokens, 32), about, None, slots, weights)
        records = torch.empty(tokens, candidates.WORDS, dtype=torch.int32)
        gpu_candidates.select(torch.empty(tokens, 151936), torch.empty(tokens), records)
        if tokens == 1:
            counter = torch.zeros(1, dtype=torch.int32)
            for settings, of_cpu in ((RouterConfig(8), (sent, elsewhere)), (about, ())):
                router = gpu_experts.Router(settings, weight("F32", 128, 4 * d_model), None, None, counter)
                gpu_experts.select(router, torch.empty(1, 4 * d_model), slots, weights, *of_cpu)
    for kind in types if whole else ():
        if kind not in FLOAT_TYPES:
            triton_kernels.values(weight(kind), 0, 8, None, None)
        if kind == "Q4_0":
            scales = torch.empty(1, d_model, dtype=torch.float16)
            triton_kernels.values(weight("Q4_0X32"), 0, 8, scales, torch.empty(8, dtype=torch.int32))
    numbers_of_tokens = (1, 8, gpu.FEW) if EVERY else (1, gpu.FEW)
    for tokens, gate in itertools.product(numbers_of_tokens, (True, False)) if whole else ((gpu.FEW, True),):
        for kind, down in (("F16", "F16"), ("Q4_0", "Q4_0X32")) if gate else (("F16", "F16"),):
            shared = torch.empty(many // 32, wide, dtype=torch.float16) if down == "Q4_0X32" else None
            group = torch.empty(many, dtype=torch.int32) if down == "Q4_0X32" else None
            parts = (weight(kind, many, wide) if gate else None, weight(kind, many, wide), weight(down, many, wide))
            x, chosen = torch.empty(tokens, wide), torch.empty(tokens, many, dtype=torch.uint8)
            gpu.neuron_sum(gpu.Neurons(*parts, shared, group, None, None, "relu", 0.0), x, chosen)
    for kind in ("Q4_0X32", "Q8_0", "Q4_0") if EVERY else ("Q4_0X32", "Q8_0"):  # all rows of down, with and without
        shared = torch.empty(many // 32, wide, dtype=torch.float16) if kind == "Q4_0X32" else None  # a selection
        parts = (None, weight("F16", many, wide), weight(kind, many, wide), shared, None, None, None, "relu", 0.0)
        for tokens, named in ((gpu.FEW, torch.empty(gpu.FEW, many, dtype=torch.uint8)), (gpu.FEW // 2, None)):
            if EVERY or whole or named is not None:
                gpu.neuron_sum(gpu.Neurons(*parts), torch.empty(tokens, wide), named, dense=True)
    # Wide rows, and some that take fewer warps; the second without gates.
    fused = (("F16", "F16", 1), ("F16", "F16", 1), ("Q4_0", "Q4_0", 1), ("Q4_0", "Q4_0X32", 1), ("Q8_0", "Q8_0", 4))
    for i, (kind, down, narrower) in enumerate(fused):
        n, k = many // narrower, wide // narrower
        shared = torch.empty(n // 32, k, dtype=torch.float16) if down == "Q4_0X32" else None
        group = torch.empty(n, dtype=torch.int32) if down == "Q4_0X32" else None
        parts = (None if i == 1 else weight(kind, n, k), weight(kind, n, k), weight(down, n, k), shared, group)
        given = None if i % 2 else torch.empty(1, n, dtype=torch.uint8)
        own = gpu.Neurons(*parts, None, None, "relu" if i == 1 else "drelu", 0.0)
        if i == 3 or (whole and (EVERY or i < 2)) or (EVERY and i == 0):
            gpu.neuron_sum(own, torch.empty(1, k), given, fused=True)
    # As many tokens of an expert as a tile has columns; so many that all its neurons are multiplied.
    largest = (("F16", gpu.FEW), ("Q4_0", gpu.FEW), ("F16", 200), ("Q4_0", 200))
    for kind, tokens in largest if whole and EVERY else largest[1:3]:
        by_neuron(kind, kind, "relu", torch.empty(tokens, d_model), slots=1)
    # Prompts, whose experts stream; as many tokens of each as a tile has columns.
    in_prompts = ("F16", "Q4_0", "Q8_0", "Q6_K") if whole else ("Q4_0", "Q6_K")
    for kind in [*several, "BF16", "MXFP4"] if EVERY else in_prompts:
        own = gpu_experts.Experts(4, 512, *[weight(kind, 2048, 512) for _ in range(3)], "silu", 0.0)
        table = torch.zeros(8, dtype=torch.int32)
        routed = gpu_experts.Routed(torch.empty(512, d_model), torch.zeros(512, 2).int(), torch.empty(512, 2), 8)
        gpu_experts.add_some([(own, table, table[:4])], routed, torch.empty(512, d_model))
    for kind in gpu_panels.SAME_BITS if EVERY else ("F16", "Q5_0", "Q5_K", "Q6_K") if whole else ("Q4_0", "Q4_K"):
        panel_bytes = (WEIGHT_TYPES[kind].codes + WEIGHT_TYPES[kind].panel_scales) * 16
        panels = torch.empty((2, d_model // WEIGHT_TYPES[kind].block * panel_bytes), dtype=torch.uint8)
        gpu_panels.put(weight(gpu_panels.device_type(kind), 48), 16, kind, d_model, panels)
    bundles = (("F16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_0", "Q4_0X32"))
    for kind, down in bundles if whole else ():
        gate_bytes, (down_bytes, shared_bytes) = (
            cpu.bundle_row_bytes(kind, d_model)[0],
            cpu.bundle_row_bytes(down, d_model),
        )
        layout = BundleLayout(d_model, True, kind, down, gate_bytes, down_bytes, shared_bytes)
        shared = torch.empty(1, d_model, dtype=torch.float16) if shared_bytes else None
        weights = (weight(kind, 32), weight(kind, 32), weight(down, 32))
        room = gpu.Neurons(*weights, shared, None, None, None, "relu", 0.0)
        rows, at = torch.empty(layout.group_bytes, dtype=torch.uint8), torch.empty(32, dtype=torch.int32)
        gpu.unpack(layout, rows, at, None, at[:1], room)
    nets = DeltaNetConfig(16, 128, 32, 128, 4, tiled=True), DeltaNetConfig(2, 16, 6, 48, 3)
    for about in nets if whole and EVERY else nets[:1]:
        (states,) = gpu_states.new_states([about], 2, "cpu")
        taps, vector = torch.empty(about.taps, about.channels), torch.empty(about.n_value_heads)
        net = gpu_delta.DeltaNet(about, taps, vector, vector, torch.empty(about.value_dim), 1e-6)
        for tokens in (4, 64) if whole else (64,):
            x = torch.empty(tokens, about.channels + about.width + 2 * about.n_value_heads)
            runs, rows = torch.empty(2, 4, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32)
            gpu_delta.delta_net(net, x, states, runs, rows)
    # Nemotron 3 Nano's; of the largest states; of the widest norm
    mambas = (64, 64, 8, 128, "gated", 8), (32, 128, 2, 256, "none", 1), (128, 64, 1, 128, "before", 1)
    for heads, dim, groups, state, norm, parts in mambas if whole and EVERY else mambas[:1]:
        mixer = Mamba2Config(heads, dim, groups, state, 4, norm=norm, norm_groups=parts)
        (states,) = gpu_states.new_states([mixer], 2, "cpu")
        vectors = [torch.empty(4, mixer.channels), torch.empty(mixer.channels), *(torch.empty(heads) for _ in range(3))]
        own_norm = None if norm == "none" else torch.empty(mixer.width)
        for tokens in (4, 64) if whole else (64,):
            x = torch.empty(tokens, mixer.width + mixer.channels + heads)
            runs, rows = torch.empty(2, 4, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32)
            gpu_mamba.mamba(gpu_mamba.Mamba(mixer, *vectors, own_norm, 1e-6), x, states, runs, rows)
    short = ShortConvConfig(2048, 3)
    (states,) = gpu_states.new_states([short], 2, "cpu")
    for tokens in (4, 64) if whole else ():
        conv = gpu_short_conv.ShortConv(short, torch.empty(3, short.size), None)
        runs, rows = torch.empty(2, 4, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32)
        gpu_short_conv.short_conv(conv, torch.empty(tokens, 3 * short.size), states, runs, rows)
    steps = (  # of a few tokens and of a prompt, with norms of the heads or without, with sinks where there are none
        (64, "f16", 64, False), (64, "f32", 64, True), (64, "f16", 256, False), (4, "q8_0", 64, True),
        (4, "f16", 64, True), (64, "q8_0", 64, False), (4, "f16", 256, True),
    )  # fmt: skip
    first = (7 if EVERY else 4) if whole else (6 if EVERY else 3)
    triton_kernels.is_hopper = lambda _: whole
    for tokens, kv_type, dim, normed in steps[:first]:
        q, k = torch.empty(tokens, heads, dim), torch.empty(tokens, kv_heads, dim)
        cache = gpu.new_cache(kv_type, 64, kv_heads, dim, "cpu")
        numbers = torch.empty(tokens, dtype=torch.int32)
        if whole:
            rotation = torch.empty(dim // 2), 1.0
            gpu.rotate(q, numbers, *rotation)
            gpu.store_kv(cache, cache, k, k, numbers.long())
            norms = gpu.HeadNorms(q[0, 0], k[0, 0], 1e-6) if normed else None
            gpu.rotate_and_store(q, k, k, numbers, rotation, (cache, cache), numbers.long(), norms)
        sinks = None if normed else torch.empty(q.shape[1])
        contexts = gpu.Contexts(torch.empty(4, 64, dtype=torch.int32), numbers, numbers)
        growth = {"query_growth": 0.1, "query_interval": 8192} if normed else {}
        settings = AttentionConfig(heads, kv_heads, dim, scale=0.1, **growth)
        gpu.attention(q, (cache, cache), contexts, settings, sinks, for_codes=True)
        if tokens == 4 and whole:
            own = gpu.NewHeads(k[:1], k[:1], numbers[:1].long(), rotation, norms)
            of_one = gpu.Contexts(contexts.pages[:1], numbers[:1], numbers[:1])
            for pages in (1, 4):
                few = of_one._replace(pages=contexts.pages[:1, :pages])
                gpu.attend(q[:1], own, (cache, cache), few, settings, sinks, True, torch.zeros(64, dtype=torch.int32))
            gpu.attend(q[:1], own, (cache, cache), of_one, settings, sinks, True)
    heads, latents, n, plain = 16, 512, 64, 128  # DeepSeek-V2-Lite's
    of_latent = LatentAttentionConfig(heads, latents, plain, n, plain, RopeConfig(dim=n), 0.1)
    of_latents = (4, "f16"), (4, "f32"), (4, "q8_0"), (1, "f16"), (64, "f16")
    for tokens, kv_type in of_latents if whole else of_latents[: 3 if EVERY else 2]:
        q, kv = torch.empty(tokens, heads, plain + n), torch.empty(tokens, latents + n)
        cache = gpu.new_cache(kv_type, 64, 1, latents + n, "cpu")
        numbers = torch.empty(tokens, dtype=torch.int32)
        if whole:
            norm, rotation = (kv[0, :latents], 1e-6), (torch.empty(n // 2), 1.0)
            gpu_latent.place(q[..., plain:], kv, norm, numbers, rotation, cache, numbers.long())
        contexts = gpu.Contexts(torch.empty(4, 64, dtype=torch.int32), numbers, numbers)
        gpu_latent.attention(torch.empty(heads, tokens, latents), q[..., plain:], cache, contexts, of_latent)
        for kind in several if tokens < gpu.FEW and kv_type == "f16" else ():
            gpu_latent.per_head(weight(kind, heads * latents, plain), q[..., :plain].transpose(0, 1))
    JITFunction.run = launch
    return list(made.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("capabilities", CAPABILITIES)
def test_every_kernel_compiles(capabilities: tuple[int, ...]) -> None:
    compiled = cache_folder() / "triton"
    compiled.mkdir(exist_ok=True)
    for entry in compiled.iterdir():
        if time.time() - entry.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(entry, ignore_errors=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(compiled), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, __file__, *map(str, capabilities)],
        capture_output=True, text=True, env=environment, timeout=850,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    made = dict(zip(capabilities, json.loads(run.stdout), strict=True))
    for capability in capabilities:
        check(capability, made[capability])
    if RECORDS:
        RECORD.write_text("".join(sorted(kernel["line"] + "\n" for kernels in made.values() for kernel in kernels)))


def check(capability: int, made: list[dict[str, Any]]) -> None:
    """A GPU's kernels wait, ask, and take what they may."""
    from powerinfer.kernels import triton_fused, triton_kernels, triton_latent, triton_neurons, triton_row_sums

    names = 61 if capability == 90 else 35
    assert len({kernel["name"] for kernel in made}) == names
    for kernel in made:  # what may be launched before the last kernel has ended waits for it, and nothing else does
        assert kernel["waits"] == (kernel["early"] and capability >= 90), kernel
        asks = ("_linear_kernel", "_outer_kernel", "_router_kernel", "_fused_kernel")
        wanted = kernel["name"] in asks and kernel["shared rows"] is None
        assert kernel["asks"] == (wanted and capability >= 90), kernel
    assert sum(kernel["shared rows"] is not None for kernel in made) == (3 if capability == 90 else 0)
    most = max(made, key=lambda kernel: kernel["shared"])
    assert most["shared"] <= SHARED[capability] << 10, most
    neurons = ("_linear_kernel", "_products_kernel", "_add_kernel", "_outer_kernel", "_list_kernel", "_fused_kernel")
    scans = ("_convolve_kernel", "_convolve_few_kernel", "_scan_kernel", "_pairs_kernel", "_chunked_scan_kernel")
    prompts = ("_prompt_hidden_kernel", "_prompt_down_kernel", "_narrow_kernel", "_narrow_pairs_kernel")
    prompts += ("_panel_rows_kernel", "_row_sums_kernel")
    experts = ("_grouped_hidden_kernel", "_grouped_down_kernel", "_per_head_kernel")
    choosing = ("_maxima_kernel", "_candidates_kernel")
    for kernel in made:  # attention of few tokens with heads of 256 dimensions spills more (docs/decisions/gpu.md)
        if kernel["name"] in neurons or (
            kernel["name"] == "_attention_kernel" and (kernel["block"] <= 128 or kernel["prompt"])
        ):
            alone = kernel["name"] in neurons and not kernel["tokens"]
            assert kernel["stack"] <= (0 if alone else SPILT + SINE * kernel["turns"]), kernel
        assert kernel["name"] not in scans or not kernel["stack"], kernel
        assert kernel["name"] not in (*prompts, *choosing) or not kernel["stack"], kernel
        if kernel["name"] in experts and capability == 90:
            assert kernel["stack"] <= SPILT_BY_EXPERTS, kernel
    for kernel in made:  # as many as the launches are made for
        name, kind, several = kernel["name"], kernel["type"], kernel["tokens"]
        several = several or 0
        # for 32 tokens some make a second wave: tiles are those that are fastest for 8
        memory = HOLDS[capability][2] << 10
        add = triton_neurons.HELD_ONE if not several else triton_neurons.HELD_SEVERAL if several <= 16 else {}
        fewest = {
            "_outer_kernel": triton_kernels.LEAST_SEVERAL if several <= 16 else None,
            "_linear_kernel": triton_kernels.LEAST_SEVERAL if several <= 16 else None,
            "_add_kernel": add.get(kind),
            "_row_sums_kernel": triton_row_sums.PROGRAMS,
            "_products_kernel": None if several else triton_neurons.HELD_PRODUCTS // kernel["warps"],
            "_attention_kernel": 1 if kernel["prompt"] else triton_kernels.held(kernel["block"] or 0, memory),
            "_latent_kernel": triton_latent.HELD,
            "_fused_kernel": triton_fused.WARPS_HELD // kernel["warps"],
        }.get(name)
        found = held(kernel, capability)
        assert fewest is None or found >= fewest, (kernel, found)
        if name in ("_outer_kernel", "_linear_kernel") and several in (0, 1):
            counted = (triton_kernels.HELD_TOGETHER if several else triton_kernels.HELD)[kind]
            taken = min(counted // kernel["warps"], triton_kernels.PROGRAMS)
            # the compiler takes more registers for sm_120 than for the GPUs whose numbers are counted
            assert found >= (0.75 if several or capability == 120 else 1) * taken, (kernel, found, taken)
            ratio = found * kernel["warps"] / counted
            narrow = several and kernel["warps"] < 4  # of short rows, which no table counts
            assert narrow or ratio <= 1.25 or capability != 90, (kernel, ratio)


if __name__ == "__main__":
    use_record()
    print(json.dumps([compile_all(int(capability)) for capability in sys.argv[1:]]))
