"""Access to the native module: what suits this CPU, with reasons, and sizes of what it stores."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import AttentionKind, EngineConfig
from powerinfer.errors import RequestError
from powerinfer.formats.quant import Bytes
from powerinfer.neurons import BundleLayout
from powerinfer.system import MOST_THREADS, usable_cores

PAGE = _native.PAGE
"""Tokens of a page of the KV cache."""

LANES = _native.LANES
"""Rows of a panel: widths of native buffers are multiples of it."""

NEURON_TOKENS = _native.NEURON_TOKENS
"""Maximum number of tokens of a sparse step."""

READ_COPIES = _native.READ_COPIES
"""Bytes of memory from which small reads past the system's cache are copied, at most."""

ISA_VARIABLE = "POWERINFER_ISA"

_DRIVER_CORES = 2
_FEW_CORES = 4  # fewer are always all used: leaving one out costs more than it can gain


class ExpertPanels(NamedTuple):
    """A matrix [rows, k] of each of some experts, in panels: uint8 [experts, bytes of one]."""

    type: str
    rows: int
    k: int
    data: Bytes


def choose_isa(requested: str | None) -> tuple[str, str]:
    """(level, reason). RequestError when `requested` cannot run here."""
    name = requested or os.environ.get(ISA_VARIABLE)
    try:
        level = _native.find_level(name or "")
    except ValueError as error:
        raise RequestError(str(error)) from None
    if requested:
        return level, "asked for"
    if name:
        return level, f"asked for by {ISA_VARIABLE}"
    best = _native.cpu_levels()[0]
    if level != best:
        return level, f"the best of this build; `make install` or `pip install .` builds {best}, too"
    return level, "the best this CPU runs"


def choose_threads(requested: int) -> tuple[int, str]:
    """(threads, reason). RequestError when `requested` is out of range; 0: automatic."""
    if not 0 <= requested <= MOST_THREADS:
        raise RequestError(f"threads must be between 0 (automatic) and {MOST_THREADS}, not {requested}")
    return (requested, "asked for") if requested else usable_cores()


def thread_counts(requested: int) -> dict[int, str]:
    """Numbers of threads that may be the fastest, each with what it stands for; first comes that of `choose_threads`,
    alone where a number is requested, or all cores are equal."""
    threads, reason = choose_threads(requested)
    if requested or threads < _FEW_CORES:
        return {threads: reason}
    from powerinfer.topology import read_topology

    return read_topology().thread_counts(threads, reason)


def spared_cores(requested: int, gpu: str | None) -> int:
    """Cores that automatic threads leave to that GPU's driver, which calls the CPU from threads of its own: two, but of
    few cores a fourth. With one thread on each of 16 cores a step with calls took 1.7 times as long as with 14
    (docs/hybrid.md). torch's CPU device has no driver."""
    if requested or gpu is None or gpu.startswith("cpu"):
        return 0
    return min(_DRIVER_CORES, usable_cores()[0] // 4)


def beside_gpu(engine: EngineConfig, gpu: str | None) -> EngineConfig:
    """The engine with the threads that it has beside a GPU."""
    spared = spared_cores(engine.threads, gpu)
    return replace(engine, threads=choose_threads(engine.threads)[0] - spared) if spared else engine


def build() -> str:
    """A value that changes whenever the native module is rebuilt."""
    status = os.stat(_native.__file__)
    return f"{status.st_size} {status.st_mtime_ns}"


def round_up(n: int, to: int) -> int:
    """The smallest multiple of `to` that is not below n."""
    return -(-n // to) * to


def matrix_bytes(type_name: str, rows: int, k: int) -> int:
    """Bytes of a matrix [rows, k] of one of `NATIVE_TYPES` once it is packed into panels."""
    return round_up(rows, LANES) // LANES * _native.panel_bytes(type_name, k)


def kv_page_bytes(kv_type: str, attention: AttentionKind) -> int:
    """Bytes of one layer in a page of the KV cache, `PAGE` tokens; kv_type: "f16", "q8_0" or "f32"."""
    return _native.kv_page_bytes(kv_type, attention.cached_heads, attention.head_dim, attention.latents)


def bundle_row_bytes(type_name: str, k: int) -> tuple[int, int]:
    """Bytes of a bundle's row of k elements: (of one neuron's row, of the scales that a group shares), multiples of 64.

    type_name: F16, BF16, Q8_0, Q4_0, Q4_1 (of gate and up), Q4_0X32 or Q4_1X32; ValueError for others.
    """
    return _native.bundle_row_bytes(type_name, k), _native.shared_bytes(type_name, k)


def pack_bundle_rows(
    layout: BundleLayout, matrix: str, rows: int, data: NDArray[np.uint8], out: NDArray[np.uint8], threads: int
) -> None:
    """Write the rows [rows, d_model] of a matrix, "gate", "up" or "down", into bundles.

    data: the rows as a model file stores them, uint8 1-D; for Q4_0X32 group by group d_model blocks of Q4_0, each
    across the group's neurons. out: the bundles, uint8 [groups, bytes of a group].
    """
    at = layout.gate_at if matrix == "gate" else layout.up_at if matrix == "up" else layout.down_at
    kind, type_name = ("add", layout.down_type) if matrix == "down" else ("dot", layout.gate_type)
    pool = _native.Pool(threads)
    _native.pack_bundle_rows(pool, type_name, kind, rows, layout.d_model, data, out, layout.pitch, at)


def pack_down(
    layout: BundleLayout, neurons: int, data: NDArray[np.uint8], out: NDArray[np.uint8], threads: int
) -> None:
    """Write down of experts of so many neurons into bundles of a type across neurons.

    data: their matrices [d_model, neurons] as a model file stores them, one after another, uint8 1-D; out: as of
    `pack_bundle_rows`.
    """
    pool = _native.Pool(threads)
    sizes = layout.d_model, neurons
    _native.pack_down(pool, layout.down_type, *sizes, data, out, layout.pitch, layout.down_at)


def code_bytes(type_name: str, k: int) -> int:
    """Bytes of the codes of a bundle's row of k elements. Its own scales (Q8_0, Q4_0: float16 per 32) follow them."""
    return _native.code_bytes(type_name, k)


def bundle_row_order(type_name: str, kind: str, k: int) -> NDArray[np.int32]:
    """The byte of a bundle's row at which each of its k elements lies, int32 [k]; of F16, BF16 the first.

    kind: "dot" for gate and up, "add" for down. Two codes of 4 bits share a byte: those of elements 32 b + j and 32 b +
    16 + j, j < 16.
    """
    return _native.bundle_row_order(type_name, kind, k)
