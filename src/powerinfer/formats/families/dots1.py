"""dots.llm1."""

from __future__ import annotations

from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, LLAMA_DEFAULTS, SIGMOIDS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_deepseek_experts, read_layer_types, read_window
from powerinfer.formats.folder_rope import GLOBAL, LOCAL


def _read_windows(fields: Fields, n_layers: int) -> list[int | None]:
    """The window of `max_window_layers` and those behind it, or of those that `layer_types` names."""
    first = fields.integer("max_window_layers", 0, layout.MAX_CONTEXT, 62)
    kinds = read_layer_types(fields, n_layers, default=[LOCAL if at >= first else GLOBAL for at in range(n_layers)])
    windows = zip(read_window(fields, n_layers), kinds, strict=True)
    return [window if kind == LOCAL else None for window, kind in windows]


FOLDERS = (
    Folder(
        "dots1", ("Dots1ForCausalLM",),
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "first_k_dense_replace": 0,
            "max_position_embeddings": 2048, "sliding_window": 4096,
        },
        qk_norm="head", windows=_read_windows, ffns=read_deepseek_experts, names=EXPERTS_NAMES.extended(GLM_EXPERTS),
    ),
)  # fmt: skip
GGUFS = (Gguf("dots1", "silu", qk_norm="head", experts=SIGMOIDS),)
