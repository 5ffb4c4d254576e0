"""The native module: packed weights, kernels of every instruction-set level, and programs of fused operators.

Arrays are C-contiguous and of exactly the type written here. Wrong shapes, names and numbers are ValueErrors.
"""

import numpy as np
from numpy.typing import NDArray

PAGE: int
LANES: int
TYPES: list[str]
ACTIVATIONS: list[str]
KV_TYPES: list[str]

def levels() -> list[str]: ...
def find_level(name: str) -> str: ...
def panel_bytes(type: str, k: int) -> int: ...
def kv_page_bytes(type: str, layers: int, kv_heads: int, head_dim: int) -> int: ...

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Arena:
    def __init__(self) -> None: ...

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

def pack(
    pool: Pool,
    arena: Arena,
    type: str,
    rows: int,
    k: int,
    data: NDArray[np.uint8],
    row_map: NDArray[np.int32] | None = None,
) -> Matrix: ...
def matmul(pool: Pool, matrix: Matrix, level: str, x: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...

NEURON_TOKENS: int
GROUP: int

def part_bytes(type: str, k: int) -> int: ...
def shared_bytes(type: str, k: int) -> int: ...
def pack_part(
    pool: Pool,
    type: str,
    kind: str,
    rows: int,
    k: int,
    data: NDArray[np.uint8],
    out: NDArray[np.uint8],
    pitch: int,
    at: int,
) -> None: ...
def unpack_part(
    type: str, kind: str, k: int, data: NDArray[np.uint8], pitch: int, at: int, out: NDArray[np.float32]
) -> None: ...

class Bundles:
    """Keeps `data`, uint8 [groups of bundles, bytes]. `part` adds to out what the listed neurons make of x."""

    def __init__(
        self,
        data: NDArray[np.uint8],
        neurons: int,
        d_model: int,
        gate_type: str | None,
        up_type: str,
        down_type: str,
        pitch: int,
        gate_at: int,
        up_at: int,
        down_at: int,
        activation: str,
        threshold: float,
        gate_bias: NDArray[np.float32] | None = None,
        up_bias: NDArray[np.float32] | None = None,
        counts: NDArray[np.int32] | None = None,
    ) -> None: ...
    @property
    def neurons(self) -> int: ...
    def part(
        self,
        level: str,
        x: NDArray[np.float32],
        index: NDArray[np.int32],
        out: NDArray[np.float32],
        most: float = 0.0,
    ) -> None: ...

class Table:
    def __init__(self, type: str, rows: int, k: int, data: NDArray[np.uint8]) -> None: ...
    def row(self, index: int, out: NDArray[np.float32]) -> None: ...

class Norm:
    def __init__(
        self, weight: NDArray[np.float32], eps: float, bias: NDArray[np.float32] | None = None, layer: bool = False
    ) -> None: ...

class Cache:
    def __init__(self, type: str, layers: int, kv_heads: int, head_dim: int, pages: int) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Watch:
    """What is seen at a program's FFNs: views of its own memory, in which the next FFN's run shows."""

    BINS_PER_OCTAVE: int
    LOWEST_OCTAVE: int
    gate: bool
    silence: bool
    measure: bool
    most: float
    def __init__(self, program: Program) -> None: ...
    def clear(self) -> None: ...
    @property
    def damaged(self) -> bool: ...
    @property
    def counts(self) -> NDArray[np.int64]: ...
    @property
    def magnitudes(self) -> NDArray[np.int64]: ...
    def active(self, tokens: int) -> NDArray[np.uint8]: ...

class Program:
    timed: bool
    def __init__(
        self,
        pool: Pool,
        cache: Cache,
        level: str,
        max_tokens: int,
        d_model: int,
        d_ff: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        embed_dim: int | None = None,
    ) -> None: ...
    def add_rope(self, frequencies: NDArray[np.float32], factor: float) -> int:
        """Add a table of rotary frequencies, radians per position; factor multiplies sine and cosine. Its index."""

    def embed(
        self,
        table: Table,
        positions: Table | None = None,
        offset: int = 0,
        project: Matrix | None = None,
        scale: float = 1.0,
    ) -> None: ...
    def attention_input(
        self,
        layer: int,
        norm: Norm | None,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        q_bias: NDArray[np.float32] | None = None,
        k_bias: NDArray[np.float32] | None = None,
        v_bias: NDArray[np.float32] | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rope: int = -1,
        scale: float | None = None,
    ) -> None:
        """q_norm, k_norm: over each head, or as wide as all heads of q (k) together. rope: an index from `add_rope`,
        -1: q and k are not rotated. scale: of the scores, None: head_dim ** -0.5."""

    def attention(self, layer: int, window: int) -> None: ...
    def project(self, w: Matrix, bias: NDArray[np.float32] | None = None, norm: Norm | None = None) -> None: ...
    def ffn(
        self,
        norm: Norm | None,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        gate_bias: NDArray[np.float32] | None = None,
        up_bias: NDArray[np.float32] | None = None,
        down_bias: NDArray[np.float32] | None = None,
        activation: str = "silu",
        threshold: float = 0.0,
        out_norm: Norm | None = None,
    ) -> None: ...
    def neurons_ffn(
        self,
        norm: Norm | None,
        bundles: Bundles,
        down_bias: NDArray[np.float32] | None = None,
        replace: bool = False,
        most: float = 0.0,
        predictor_in: Matrix | None = None,
        predictor_out: Matrix | None = None,
        predictor_threshold: float = 0.0,
        floor: int = 0,
        out_norm: Norm | None = None,
    ) -> None: ...
    def set_predicts(self, op: int, on: bool) -> None: ...
    def replace_bundles(self, op: int, bundles: Bundles) -> None: ...
    def count_fired(self, op: int, on: bool) -> None: ...
    def fired(self, op: int, out: NDArray[np.int64]) -> None: ...
    def neuron_sum(
        self, op: int, x: NDArray[np.float32], names: NDArray[np.uint8] | None, out: NDArray[np.float32]
    ) -> bool: ...
    def sparsify(
        self,
        op: int,
        bundles: Bundles,
        predictor_in: Matrix | None,
        predictor_out: Matrix | None,
        threshold: float,
        floor: int,
        most: float,
        recall_every: int,
    ) -> None: ...
    def set_ways(self, op: int, ways: list[str]) -> None: ...
    def set_watch(self, watch: Watch | None) -> None: ...
    def residual(self, tokens: int) -> NDArray[np.float32]:
        """x as the operators so far left it, [tokens, d_model]: the program's own memory, which may be written."""

    def set_dense_above(self, op: int, share: float) -> None: ...
    def neuron_stats(self, op: int) -> list[tuple[str, int]]: ...
    def clear_neuron_stats(self, op: int) -> None: ...
    def normalise(self, norm: Norm) -> None: ...
    def head(self, norm: Norm | None, w: Matrix, project: Matrix | None = None) -> None: ...
    @property
    def size(self) -> int: ...
    def take_times(self) -> list[tuple[str, float]]: ...
    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        rows: NDArray[np.int32],
        page_table: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        first: int,
        last: int,
        vocab: int,
    ) -> None: ...
