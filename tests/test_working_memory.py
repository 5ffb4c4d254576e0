"""What steps take of a GPU beside weights and caches: counted from shapes, and given way where it is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_device import torch_device  # noqa: E402

from powerinfer.devices import torch_device as devices  # noqa: E402
from powerinfer.devices.link import Link, selection_bytes  # noqa: E402
from powerinfer.devices.streams import free_workspaces  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.kernels.gpu_types import PIECE, PIECE_TOKENS, piece_elements  # noqa: E402
from powerinfer.placement.shapes import find_shape  # noqa: E402
from powerinfer.placement.working_memory import GPU_MARGIN, working_memory  # noqa: E402

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "tokens", "most"),
    [
        # MiB beside what does not depend on shapes. When all operators were added up it was 228 and 647, 310 and 912,
        # and 1576.
        ("qwen3-30b-a3b", 512, 110),
        ("qwen3-30b-a3b", 2048, 310),
        ("llama-7b", 512, 200),
        ("llama-7b", 2048, 520),
        ("llama-3.3-70b", 2048, 1180),
    ],
)
def test_what_the_largest_steps_take(name: str, tokens: int, most: int) -> None:
    """Of published shapes, computed: each part, and all of them."""
    config = find_shape(name).config
    parts = working_memory(config, tokens, 1, config.n_layers)
    d, many = config.d_model, tokens + gpu.FEW
    assert parts["rows"] == 3 * 4 * many * d + 2 * selection_bytes(tokens, config)
    assert parts["pieces"] <= 2 * piece_elements(tokens) <= 64 * MIB
    assert parts["logits"] == 8 * config.vocab_size
    layers = parts["allocator"] - working_memory(config, tokens, 1, 0)["allocator"]
    by_shape = sum(parts.values()) - GPU_MARGIN - layers
    assert by_shape == sum(parts[name] for name in ("rows", "operators", "pieces", "logits"))
    assert by_shape <= most * MIB
    twice = working_memory(config, 2 * tokens + gpu.FEW, 1, config.n_layers)
    assert twice["rows"] > 1.9 * parts["rows"] and twice["operators"] > parts["operators"]


def test_more_tokens_are_multiplied_with_less_of_a_matrix() -> None:
    """So a product with a piece takes no more memory, but for the longest steps."""
    assert [piece_elements(n) for n in (1, PIECE_TOKENS)] == [PIECE] * 2
    for tokens in (2 * PIECE_TOKENS, 3 * PIECE_TOKENS, 4 * PIECE_TOKENS):
        assert PIECE * PIECE_TOKENS - tokens < piece_elements(tokens) * tokens <= PIECE * PIECE_TOKENS
    assert piece_elements(16 * PIECE_TOKENS) == piece_elements(4 * PIECE_TOKENS)
    assert [end - begin for begin, end in gpu.pieces(10, PIECE // 4, tokens=2 * PIECE_TOKENS)] == [2] * 5
    assert [end - begin for begin, end in gpu.pieces(10, PIECE // 4)] == [4, 4, 2]


@pytest.mark.usefixtures("device")
def test_the_buffers_between_the_devices_on_a_gpu() -> None:
    for name in ("bamboo-7b", "qwen3-30b-a3b"):
        config = find_shape(name).config
        for tokens in (3, 40, 2048):
            link = Link(torch_device(), tokens, config)
            assert link.gpu_bytes == 4 * tokens * config.d_model + 2 * selection_bytes(tokens, config)


def test_torch_holds_more_than_tensors_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free segments, and what tensors were rounded up by; a torch that does not tell counts free ones alone."""
    stats = {"requested_bytes.all.current": 70}
    fake = SimpleNamespace(
        memory_stats=lambda _: stats, memory_reserved=lambda _: 100, memory_allocated=lambda _: 80,
        max_memory_reserved=lambda _: 110,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", fake)
    assert devices.held_beside_tensors(torch.device("cpu")) == 30
    assert devices.held_beside_tensors(torch.device("cpu"), most=True) == 40
    stats.clear()
    assert devices.held_beside_tensors(torch.device("cpu")) == 20


def test_cublas_gives_back_what_it_works_in(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append(True), raising=False)
    free_workspaces()
    assert freed == [True]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    free_workspaces()


def test_weights_get_one_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch keeps once it is free; where there is none, or no GPU, nothing is lost."""
    told, cuda = list[Any](), SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("free"))
    monkeypatch.setattr(torch, "empty", lambda *given, **how: told.append((given, how["device"])))
    devices.make_room(torch.device("cpu"), 100)
    assert not told
    devices.make_room(cuda, 3200)  # type: ignore[arg-type]
    assert told == ["free", ((3100,), cuda)]

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    devices.make_room(cuda, 100)  # type: ignore[arg-type]
