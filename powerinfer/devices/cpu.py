"""The CPU executor: packed weights, paged cache and the list of native operators that a step runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.batch import Batch
from powerinfer.errors import RequestError
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu

Floats = NDArray[np.float32]


class CpuExecutor:
    """A model on the CPU. `models` wires it with the methods from `embed` to `head`; then `forward` runs it.

    A token's logits have the same bits whatever the batch, the chunk, the cache page and the number of threads.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, frequencies: Floats, rope_factor: float) -> None:
        """frequencies: float32 [rotated pairs], radians per position; rope_factor multiplies sine and cosine.

        RequestError for options that cannot be met.
        """
        isa, isa_reason = cpu.choose_isa(engine.isa)
        threads, threads_reason = cpu.choose_threads(engine.threads)
        context = engine.context or config.context_length
        pages, pages_reason = choose_pages(config, engine, context)
        self.page_size = cpu.PAGE
        self.n_pages = pages
        self.max_tokens = max(engine.prefill_chunk, engine.max_batch)
        self.vocab_size = config.vocab_size
        self.bytes_per_token = 0
        self._config = config
        self._pool = _native.Pool(threads)
        self._arena = _native.Arena()
        cache = _native.Cache(engine.kv_type, config.n_layers, config.n_kv_heads, config.head_dim, pages)
        self.choices = {
            "isa": f"{isa} ({isa_reason})",
            "threads": f"{threads} ({threads_reason})",
            "kv_cache": f"{pages} pages of {cpu.PAGE} tokens, {engine.kv_type}, "
            f"{cache.nbytes >> 20} MiB ({pages_reason})",
        }
        self._program = _native.Program(
            self._pool,
            cache,
            isa,
            self.max_tokens,
            config.d_model,
            config.d_ff,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            np.ascontiguousarray(frequencies, np.float32),
            rope_factor,
            config.embed_dim or config.d_model,
        )
        self._logits = np.empty((0, cpu.round_up(config.vocab_size, cpu.LANES)), np.float32)

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> _native.Matrix:
        """Pack a matrix [out, in]. row_map: packed row r is row row_map[r] of the tensor, zeros where it is -1."""
        rows, cols = tensor.shape
        packed = _native.pack(self._pool, self._arena, tensor.type, rows, cols, tensor.data, row_map)
        self.bytes_per_token += packed.nbytes
        return packed

    def head_rows(self, heads: int, interleaved: bool) -> NDArray[np.int32] | None:
        """The row map of a matrix whose rows are heads: padded to whole lanes, rotary pairs brought to (i, i + dim/2).

        None where the rows are right as they are.
        """
        dim = self._config.head_dim
        padded = cpu.round_up(dim, cpu.LANES)
        if padded == dim and not interleaved:
            return None
        within = np.full(padded, -1, np.int64)
        within[:dim] = np.arange(dim).reshape(-1, 2).T.reshape(-1) if interleaved else np.arange(dim)
        rows = np.arange(heads)[:, None] * dim + within
        return np.where(within < 0, -1, rows).reshape(-1).astype(np.int32)

    def norm(self, weight: Floats, bias: Floats | None = None) -> _native.Norm:
        """A norm of the model's kind over rows of d_model."""
        return _native.Norm(weight, self._config.norm_eps, bias, self._config.norm == "layer")

    def embed(
        self, tensor: RawTensor, positions: RawTensor | None = None, projection: _native.Matrix | None = None
    ) -> None:
        """x = projection . row of the embedding + row of positions; rows are looked up in the model file's own type."""
        table = self._table(tensor)
        rows = self._table(positions) if positions is not None else None
        self._program.embed(table, rows, self._config.position_offset, projection)

    def _table(self, tensor: RawTensor) -> _native.Table:
        rows, cols = tensor.shape
        self.bytes_per_token += tensor.data.nbytes // rows
        return _native.Table(tensor.type, rows, cols, tensor.data)

    def attention(
        self,
        layer: int,
        norm: _native.Norm | None,
        qkv: Sequence[_native.Matrix],
        *,
        biases: Sequence[Floats | None] = (None, None, None),
        q_norm: Floats | None = None,
        k_norm: Floats | None = None,
        window: int | None = None,
    ) -> None:
        """attended = attention(norm(x)): projections, rotary embedding, cache store, softmax over the pages."""
        (q, k, v), (q_bias, k_bias, v_bias) = qkv, biases
        of_q, of_k = (_native.Norm(w, self._config.norm_eps) if w is not None else None for w in (q_norm, k_norm))
        self._program.attention_input(layer, norm, q, k, v, q_bias, k_bias, v_bias, of_q, of_k)
        self._program.attention(layer, window or 0)

    def project(self, matrix: _native.Matrix, bias: Floats | None = None) -> None:
        """x += matrix . attended."""
        self._program.project(matrix, bias)

    def ffn(
        self,
        norm: _native.Norm | None,
        gate: _native.Matrix | None,
        up: _native.Matrix,
        down: _native.Matrix,
        biases: Sequence[Floats | None] = (None, None, None),
    ) -> None:
        """x += down . (act(gate . n) * (up . n)) with n = norm(x), or down . act(up . n) without a gate.

        biases: of gate, up and down.
        """
        gate_bias, up_bias, down_bias = biases
        activation, threshold = self._config.activation, self._config.activation_threshold
        self._program.ffn(norm, gate, up, down, gate_bias, up_bias, down_bias, activation, threshold)

    def normalise(self, norm: _native.Norm) -> None:
        """x = norm(x)."""
        self._program.normalise(norm)

    def head(self, norm: _native.Norm | None, matrix: _native.Matrix, projection: _native.Matrix | None = None) -> None:
        """logits = matrix . projection . norm(x)."""
        self._program.head(norm, matrix, projection)

    def forward(self, batch: Batch) -> Floats:
        rows = len(batch.logit_rows)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        self._program.run(
            batch.tokens,
            batch.positions,
            batch.rows,
            batch.page_table,
            batch.logit_rows,
            self._logits,
            0,
            self._program.size,
            self.vocab_size,
        )
        return self._logits[:rows, : self.vocab_size]

    def time_operators(self, on: bool) -> dict[str, float]:
        """Switch timing on or off; seconds spent in each kind of operator since the last call."""
        self._program.timed = on
        return dict(self._program.take_times())

    def close(self) -> None:
        for name in ("_program", "_arena", "_pool"):
            self.__dict__.pop(name, None)


def available_memory() -> int:
    """Bytes that can be taken without swapping, 0 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def choose_pages(config: ModelConfig, engine: EngineConfig, context: int) -> tuple[int, str]:
    """(pages, reason): room for `max_batch` whole contexts, as far as a quarter of the free memory goes.

    RequestError when not even one context fits the memory.
    """
    page = _native.kv_page_bytes(engine.kv_type, config.n_layers, config.n_kv_heads, config.head_dim)
    one = -(-context // cpu.PAGE)
    memory = available_memory() or 1 << 62
    if one * page > memory:
        raise RequestError(
            f"a context of {context} tokens needs a KV cache of {one * page >> 20} MiB and {memory >> 20} MiB are "
            "free: lower --context or choose --kv-type q8_0"
        )
    wanted = one * max(1, engine.max_batch)
    most = max(one, memory // 4 // page)
    if wanted <= most:
        return wanted, f"{engine.max_batch} contexts of {context}"
    return most, "a quarter of the free memory" if most > one else "one context"
