"""Make a GGUF file of a published shape with random weights, by classes of `transformers` and llama.cpp's converter.

    python -m benchmarks.models.family_models OUT.gguf --name lfm2-1.2b --llama-cpp SOURCES --quantize LLAMA_QUANTIZE

SOURCES is a folder with llama.cpp's sources, LLAMA_QUANTIZE its program. Shapes with experts are cut in layers and
experts, so that they fit small machines: what a token reads is that of as many layers of the real model. Needs the
`test` extra (torch, transformers).

Random weights say nothing about quality; the work they make is that of real ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.models.vocabulary import vocabulary, write_tokenizer_files

VOCAB = 20_000
"""Tokens in the table: the head of a model of few layers would be most of its bytes."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-1.2b": ("lfm2", {
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
    }),
    "gemma-4-26b-a4b": ("gemma4_text", {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 32, "top_k_experts": 8,
        "moe_intermediate_size": 704, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    }),
    "llama-4-scout": ("llama4_text", {
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 4,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    }),
}  # fmt: skip
"""Name -> `model_type`, and the sizes that differ from the defaults of its class."""


def write_folder(name: str, folder: Path) -> None:
    """A model of random weights, BF16, as `transformers` makes and saves it."""
    import torch
    import transformers

    model_type, sizes = SHAPES[name]
    torch.manual_seed(20261129)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB, **special, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer_files(folder, VOCAB)


def convert(folder: Path, file: Path, sources: Path) -> None:
    """The folder's GGUF file, BF16, with the tokenizer of random models."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import torch
    from conversion import base, get_model_class  # type: ignore[import-not-found]

    def set_vocab(model: Any) -> None:
        tokens, types, merges = vocabulary(VOCAB)
        writer = model.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)

    settings = base.ModelBase.load_hparams(folder, False)
    chosen = get_model_class(base.get_model_architecture(settings, base.ModelType.TEXT))
    for kind in (chosen, *(inner for inner in vars(chosen).values() if isinstance(inner, type))):
        kind.set_vocab = set_vocab
    with torch.inference_mode():
        chosen(folder, base.gguf.LlamaFileType.MOSTLY_BF16, file).write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--name", required=True, choices=tuple(SHAPES))
    parser.add_argument("--type", default="q4_0", help="of llama-quantize; default: %(default)s")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="SOURCES")
    parser.add_argument("--quantize", type=Path, required=True, metavar="PROGRAM", help="llama-quantize")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
        model, whole = Path(folder) / "model", Path(folder) / "model.gguf"
        write_folder(arguments.name, model)
        convert(model, whole, arguments.llama_cpp)
        subprocess.run([arguments.quantize, whole, arguments.out, arguments.type.upper()], check=True)


if __name__ == "__main__":
    main()
