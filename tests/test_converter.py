"""llama.cpp's own converter: its file of every family computes what `transformers` computes from the folder.

The converter is in the source package of llama-cpp-python, which is fetched once, by its hash. `make test-converter`
runs this; `make test` does not.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if "POWERINFER_CONVERTER" not in os.environ:
    pytest.skip("make test-converter runs this", allow_module_level=True)
families = pytest.importorskip("families")

from families import (  # noqa: E402
    CASES,
    GROWN,
    PHIMOE_ROPE,
    TOKENS,
    YARN,
    Case,
    case_named,
    open_executor,
    run_chunks,
    scattered_pages,
)
from safetensors.torch import load_file, save_file  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402

VERSION = "0.3.36"
HASH = "sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
NEEDED = ("conversion", "gguf-py", "LICENSE")
REFUSED = {
    **dict.fromkeys(("prosparse", "turbosparse", "opt", "opt-no-biases"), "not supported"),
    **dict.fromkeys(("qwen3-moe-some", "qwen3-next-some", "bitnet-silu"), "Can not map tensor"),
    "stablelm-12b": "Unprocessed norms",  # whose norms of heads it loses
    "falcon-heads": "invalid for input", "falcon-in-turn": "invalid for input",
}  # fmt: skip
"""Cases that the converter does not convert, with a part of what it says."""
LEFT_OUT = (
    "nemotron-biases",  # rotates hidden_size / num_attention_heads / 2 dimensions, whatever head_dim is
    *("nemotron-h", "nemotron-h-biases"),  # takes each for one with experts, whose keys transformers gives to all
    "mistral4",  # does not say how queries grow
    "hunyuan",  # knows the angles of contexts of 32 K and 256 K alone
    "hunyuan-moe",  # asks for keys that transformers does not write
    "gemma3n",  # gives tokens that the table of layers' inputs lacks zeros, not its first row
    *("phimoe", "phimoe-mini"),  # asks for the first context, which goes with LongRoPE alone
    "ernie-moe",  # takes intermediate_size / num_key_value_heads for the size of the shared experts
)


class Job(NamedTuple):
    case: Case
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return "-".join([self.case.name, *self.options])


GAIN = math.sqrt(1 + math.log(2) / math.log(64))
"""Factor of sine and cosine by which the converter takes LongRoPE from 64 to 128 tokens."""
MORE = [
    Case("qwen3-attention-factor", "qwen3", {"rope_parameters": YARN | {"attention_factor": 1.5}}, {}),
    Case("olmo2-attention-factor", "olmo2", {"rope_parameters": YARN | {"attention_factor": 1.1386294361}}, {}),
    Case("mistral4-even", "mistral4", {"rope_parameters": GROWN | {"llama_4_scaling_beta": 0.0}}, {}),
    Case("hunyuan-plain", "hunyuan_v1_dense", {}, {}),
    Case(
        "hunyuan-moe-as-published",
        "hunyuan_v1_moe",
        {"moe_topk": [3] * 3, "moe_intermediate_size": [40] * 3, "num_shared_expert": [1] * 3},
        {},
    ),
    Case("gemma3n-even", "gemma3n_text", {"vocab_size_per_layer_input": 101}, {}, ("folder", "gguf")),
    Case(
        "phimoe-as-published",
        "phimoe",
        {
            "rope_parameters": PHIMOE_ROPE | dict.fromkeys(("short_mscale", "long_mscale"), GAIN),
            "attention_bias": True, "lm_head_bias": True, "original_max_position_embeddings": 64,
        },
        {},
    ),
    Case("ernie-moe-as-published", "ernie4_5_moe", {"intermediate_size": 160}, {}),
]
JOBS = [
    Job(case, {})
    for case in (*CASES, *MORE)
    if "gguf" in case.layouts and "hidden_act" not in case.metadata and case.name not in (*REFUSED, *LEFT_OUT)
]
JOBS += [Job(case_named(name), {"fuse_gate_up_exps": True}) for name in ("qwen3-next", "qwen35-moe")]
JOBS += [Job(case_named(name), {"fuse_qkv": True}) for name in ("llama-gqa", "qwen2", "qwen3-moe")]


def converter() -> Path:
    """The folder of the converter, fetched on the first call."""
    folder = Path(os.environ["POWERINFER_CACHE"]) / f"llama.cpp-{VERSION}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    wanted = part / "requirements.txt"
    wanted.write_text(f"llama-cpp-python=={VERSION} --hash={HASH}\n")
    flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "-r", str(wanted)]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(part), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(part.glob("*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"the source package of llama-cpp-python could not be had: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if name.split("/")[0] in NEEDED:
                archive.extract(member.replace(name=name), part, filter="data")
    for file in (wanted, *archives):
        file.unlink()
    part.rename(folder)
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str | None]]:
    """Of each job the file, and why there is none."""
    root, jobs = tmp_path_factory.mktemp("converted"), {}
    for job in [*JOBS, *(Job(case_named(name), {}) for name in REFUSED)]:
        folder = root / job.name
        folder.mkdir()
        # transformers takes the base of OLMo 3's windows from no config.json of version 4.
        layout = "folder-v4" if "folder-v4" in job.case.layouts and job.case.kind != "olmo3" else "folder"
        jobs[job.name] = [str(published(Truth(job.case).save(layout, folder))), str(folder / "m.gguf"), job.options]
    script = Path(__file__).parent / "converter" / "convert.py"
    done = subprocess.run(
        [sys.executable, script, converter()], input=json.dumps([*jobs.values()]), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: (Path(jobs[name][1]), why) for name, why in zip(jobs, json.loads(done.stdout), strict=True)}


KINDS = "full_attention", "linear_attention"


def rename(folder: Path, old: str, new: str) -> None:
    """Change a part of the names of tensors."""
    names: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = {name.replace(old, new): tensor for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, {"format": "pt"})
        names |= dict.fromkeys(tensors, shard.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def published(folder: Path) -> Path:
    """With the keys that published folders have and `transformers` does not write."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "minimax_m2":
        share = config.get("partial_rotary_factor") or config.get("rope_parameters", {}).get("partial_rotary_factor", 1)
        config["rotary_dim"] = int(config["head_dim"] * share)
    if config["model_type"] == "falcon" and config["multi_query"] and not config["new_decoder_architecture"]:
        config.pop("num_kv_heads", None)
    if config["model_type"] == "granitemoehybrid":
        types = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [types[kind] for kind in config["layer_types"]]
    if config["model_type"] in ("granite_swa", "granitemoe_swa"):
        config["no_rope_layers"] = [int(theta != 0) for theta in config["layer_rope_theta"]]
    if config["model_type"] == "kimi_linear":
        config |= {"head_dim": config["hidden_size"] // config["num_attention_heads"], "mla_use_nope": True}
        numbers = {kind: [at for at, one in enumerate(config["layer_types"], 1) if one == kind] for kind in KINDS}
        config["linear_attn_config"] = dict(zip(("full_attn_layers", "kda_layers"), numbers.values(), strict=True)) | {
            "head_dim": config["linear_head_dim"], "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }  # fmt: skip
        config["first_k_dense_replace"] = dense = config["mlp_layer_types"].index("sparse")
        for layer in range(dense):  # to whose FFN transformers gives the name of experts
            rename(folder, f"layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp.")
    if config["model_type"] == "phimoe":
        config["architectures"] = ["PhiMoEForCausalLM"]
    if config["model_type"] == "cohere2":
        config["rotary_pct"] = 1.0
    if config["model_type"] == "falcon_h1":
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] in ("ministral3", "mistral4"):  # parts of models that read pictures
        del config["architectures"]
        whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        config = whole | {"text_config": config, "vocab_size": config["vocab_size"]}
    path.write_text(json.dumps(config))
    size = config.get("text_config", config)["vocab_size"]
    tokens = {"model": {"vocab": {str(at): at for at in range(size)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))  # of which Gemma's counts the tokens
    return folder


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_converted_files(job: Job, said: dict[str, tuple[Path, str | None]]) -> None:
    file, why = said[job.name]
    assert why is None
    truth = Truth(job.case)
    executor = open_executor(file)
    try:
        ours = run_chunks(executor, truth.texts[0], [TOKENS], scattered_pages(executor, 1)[0])
    finally:
        executor.close()
    truth.check(ours, texts=1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_converted(name: str, said: dict[str, tuple[Path, str | None]]) -> None:
    """Lest a case is left out that could be converted."""
    _, why = said[name]
    assert why is not None and REFUSED[name] in why


def test_what_is_done_with_a_factor_of_attention_is_said(said: dict[str, tuple[Path, str | None]]) -> None:
    (note,) = open_checkpoint(said["qwen3-attention-factor"][0]).notes
    assert note.startswith("yarn_attn_factor 1.5 replaces YaRN's 1.139")
    assert open_checkpoint(said["olmo2-attention-factor"][0]).notes == []
