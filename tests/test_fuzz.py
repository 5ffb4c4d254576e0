"""Structure-aware fuzzing: thousands of damaged models, each either works or is refused with a ModelError.

A case is made from its number alone, so a failure is repeated with that number. Every case is bounded in CPU time; all
together run under a limit on address space, which turns an absurd allocation into a MemoryError, and so into a failure.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import (
    as_stored,
    conv_gguf,
    delta_gguf,
    experts_gguf,
    family_gguf,
    gemma4_gguf,
    latent_gguf,
    llama4_gguf,
    mamba_gguf,
    plain_config,
    plain_folder,
    safetensors_bytes,
    tiny_config,
    tiny_folder,
    tiny_gguf,
    weights,
)

from benchmarks.models.gguf_writer import (
    ARRAY,
    BOOL,
    CODES,
    F32,
    F64,
    STRING,
    U32,
    U64,
    Array,
    Builder,
    Raw,
    Tensor,
    text,
)
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.quant import quantize
from powerinfer.text.model_text import chat_template_of, tokenizer_of

GGUF_CASES, RAW_CASES, SAFETENSORS_CASES, CONFIG_CASES, INDEX_CASES, TOKENIZER_CASES = (
    6000,
    4000,
    2500,
    3000,
    1000,
    1000,
)
SHARE = 1 if os.environ.get("POWERINFER_FUZZ") == "all" else 4
"""Of so many cases one is run: all by `make fuzz`."""
HEADROOM = 1 << 30  # bytes of address space above what the process has
CPU_SECONDS = 1.0  # of one case

INTEGERS = [0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1023, 1 << 15, (1 << 16) - 1, 1 << 20]
INTEGERS += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 42) + 1, 1 << 53, (1 << 61) + 1, 1 << 62]
INTEGERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 33, (1 << 64) - 8, (1 << 64) - 1, -1, -2, -32, -(1 << 31), -(1 << 63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "",
    "a",
    "llama",
    "qwen2",
    "qwen3",
    "falcon",
    "opt",
    "bamboo",
    "relu",
    "fatrelu",
    "gpt2",
    "llama-bpe",
    "none",
    "linear",
    "yarn",
    "\0",
    "\n",
    "ü",
    "😀",
    "x" * 5000,
]
TEXTS += [
    "<|im_start|>",
    "<0x41>",
    "<0x-1>",
    "<0xZZ>",
    "▁",
    "Ġ",
    "a b",
    " ",
    "{{ x }}",
    "{% for %}",
    "../../x",
    "\u202e",
]


def test_enough_cases() -> None:
    sizes = [GGUF_CASES, RAW_CASES, SAFETENSORS_CASES, CONFIG_CASES, INDEX_CASES, TOKENIZER_CASES]
    assert sum(sizes) >= 10_000


# --- running a case


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Absurd allocations fail instead of succeeding slowly, where the system can say how much is used."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    import resource

    used = int(sizes.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def use(path: Path, rng: random.Random, text: bool = True) -> None:
    """Everything that happens to a model before its first token; text: with its tokenizer."""
    try:
        checkpoint = open_checkpoint(path, quantize="q8_0" if rng.random() < 0.1 and path.is_dir() else None)
    except RequestError as error:
        assert "is quantised already" in str(error) and path.is_dir()
        checkpoint = open_checkpoint(path)
    assert len(repr(checkpoint.config)) < 5000
    # what is stored, and what a model of that configuration is made of
    for name in {**dict.fromkeys(checkpoint.names()), **dict(layout.shapes(checkpoint.config))}:
        tensor = checkpoint.take(name)
        assert tensor.data.nbytes == tensor.rows().nbytes
        if len(tensor.shape) == 1:
            assert tensor.float32().shape == tensor.shape
    checkpoint.finish()
    assert checkpoint.fingerprint and checkpoint.main_type
    if text and (path.is_file() or (path / "tokenizer.json").exists()):
        tokenizer = tokenizer_of(checkpoint)
        ids = tokenizer.encode("ab abc <|x1|>\nü", special=rng.random() < 0.5)
        assert isinstance(tokenizer.decode(ids), str)
        chat_template_of(checkpoint)


def run(cases: int, make: Callable[[random.Random], Path], worked_at_most: float, text: bool = True) -> None:
    """Make and use each case; some must still work and some must be refused, or the damage would test nothing."""
    results: Counter[str] = Counter()
    for case in range(cases // SHARE):
        rng = random.Random(case)
        path = make(rng)
        start = time.process_time()
        try:
            use(path, rng, text)
            results["worked"] += 1
        except ModelError as error:
            results["refused"] += 1
            assert "\n" not in str(error) and str(error).isprintable(), f"case {case}: {error!r}"
        except BaseException as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        took = time.process_time() - start
        assert took < CPU_SECONDS, f"case {case} took {took:.1f} s"
    assert results["worked"] > 0 and results["refused"] > 0
    assert results["worked"] <= worked_at_most * (cases // SHARE), results


def rewrite(path: Path, raw: bytes) -> Path:
    """A new file: cutting an old one short makes some file systems flush it, which takes longer than the case."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    return path


# --- damage


def damage(raw: bytes, rng: random.Random, reach: int) -> bytes:
    """One to four changes of bytes, most of them in the first `reach`, where the header is."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        limit = len(data) if rng.random() < 0.1 else min(reach, len(data))
        at = rng.randrange(limit)
        change = rng.randrange(8)
        if change == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at] = rng.randrange(256)
        elif change in (2, 3):
            size = 4 if change == 2 else 8
            data[at : at + size] = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif change == 4:
            del data[at : at + rng.randint(1, 40)]
        elif change == 5:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif change == 6:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        elif rng.random() < 0.3:
            del data[at:]
        else:
            other = rng.randrange(limit)
            data[at], data[other] = data[other], data[at]
    return bytes(data)


def odd(rng: random.Random, like: Any = None) -> Any:
    """A JSON value: often of the kind of `like`, sometimes of any other."""
    choice = rng.random()
    if choice < 0.5 and isinstance(like, int) and not isinstance(like, bool):
        return rng.choice([*INTEGERS, like + 1, like - 1, like * 2, 10**400])
    if choice < 0.5 and isinstance(like, str):
        return rng.choice(TEXTS)
    plain = [None, True, False, rng.choice(INTEGERS), rng.choice(FLOATS[:8]), rng.choice(TEXTS)]
    return rng.choice([*plain, [], {}, [rng.choice(plain)], {"a": rng.choice(plain)}, [[]] * 3])


def damage_json(value: Any, rng: random.Random, changes: int) -> Any:
    """A copy with some values, keys or list elements changed, dropped, repeated or added."""
    value = copy.deepcopy(value)
    for _ in range(changes):
        spots = [(holder, key) for holder, key in walk(value)]
        if not spots:
            break
        holder, key = rng.choice(spots)
        change = rng.random()
        if change < 0.6:
            holder[key] = odd(rng, holder[key])
        elif change < 0.8:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, rng.choice([holder[key], odd(rng)]))
        else:
            holder[rng.choice([*TEXTS, key + "_", "factor", "rope_type", "type", "bias"])] = odd(rng, holder[key])
    return value


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from walk(inner)


# --- GGUF


def in_q4_0(builder: Builder) -> Builder:
    """With a chat template, and the matrices in Q4_0, so that a case is 40 kB."""
    builder.add("tokenizer.chat_template", STRING, "{{ messages[0].content }}")
    for tensor in builder.tensors:
        if len(tensor.dims) > 1 and tensor.dims[0] % 32 == 0:  # not the taps of convolutions
            values = np.frombuffer(tensor.data, np.float32).reshape(-1, tensor.dims[0])
            tensor.type_id, tensor.data = 2, quantize(values, "Q4_0").tobytes()
    return builder


GGUF_BASES = [in_q4_0(tiny_gguf("llama", True)), in_q4_0(tiny_gguf("llama", False, "qkv o ffn"))]
GGUF_BASES += [in_q4_0(tiny_gguf("qwen3", True)), in_q4_0(family_gguf("nemotron"))]
GGUF_BASES += [in_q4_0(family_gguf(name, published=True)) for name in ("llama", "falcon", "opt")]
GGUF_BASES += [in_q4_0(experts_gguf()), delta_gguf(), in_q4_0(latent_gguf(True)), latent_gguf(False), mamba_gguf()]
GGUF_BASES += [in_q4_0(conv_gguf()), *(in_q4_0(gemma4_gguf(experts)) for experts in (False, True))]
GGUF_BASES += [in_q4_0(llama4_gguf())]
GGUF_KEYS = ["general.alignment", "general.type", "split.no", "split.count", "split.tensors.count", "powerinfer.x"]
GGUF_KEYS += ["powerinfer.sparse_threshold", "llama.hidden_act", "llama.hidden_act_param", "falcon.hidden_act"]
GGUF_KEYS += [f"llama.{key}" for key in ("attention.key_length", "rope.scaling.type", "rope.scaling.factor", "new")]
GGUF_KEYS += [
    f"llama.{key}" for key in ("attention.sliding_window", "attention.sliding_window_pattern", "expert_count")
]
GGUF_KEYS += [f"llama.expert_{key}" for key in ("used_count", "feed_forward_length", "gating_func", "weights_scale")]
GGUF_KEYS += [f"llama.expert_{key}" for key in ("group_count", "group_used_count", "weights_norm", "shared_count")]
GGUF_KEYS += [f"qwen35.ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank")]
GGUF_KEYS += [f"qwen35.{key}" for key in ("ssm.inner_size", "full_attention_interval", "attention.recurrent_layers")]
GGUF_KEYS += ["lfm2.shortconv.l_cache", "lfm2.attention.head_count_kv"]
GGUF_KEYS += [f"gemma4.attention.{key}" for key in ("shared_kv_layers", "key_length_swa", "sliding_window_pattern")]
GGUF_KEYS += ["gemma4.embedding_length_per_layer_input", "gemma4.feed_forward_length", "gemma4.expert_count"]
GGUF_KEYS += [f"llama4.{key}" for key in ("attention.chunk_size", "use_qk_norm", "interleave_moe_layer_step")]
GGUF_KEYS += [f"deepseek2.attention.{key}" for key in ("q_lora_rank", "kv_lora_rank", "key_length_mla", "value_length")]
GGUF_KEYS += [f"tokenizer.ggml.{key}" for key in ("scores", "bos_token_id", "eot_token_id", "add_bos_token", "tokens")]


def odd_value(rng: random.Random, kind: int, like: Any) -> Any:
    if isinstance(like, Raw) or rng.random() < 0.03:
        return Raw(bytes(rng.randrange(256) for _ in range(rng.randrange(20))))
    if kind == STRING:
        length = None if rng.random() < 0.7 else abs(rng.choice(INTEGERS)) % (1 << 64)
        word = rng.choice(TEXTS).encode() if rng.random() < 0.9 else bytes([0xC3, 0x28])
        return Raw(text(word, length))
    if kind == ARRAY:
        return odd_array(rng, like if isinstance(like, Array) else Array(U32, [1, 2]))
    if kind in (F32, F64):
        value = rng.choice(FLOATS)
        return value if kind == F64 or not 1e30 < abs(value) < 1e301 else 1e30
    bits = 8 * {"B": 1, "b": 1, "H": 2, "h": 2, "I": 4, "i": 4, "Q": 8, "q": 8}[CODES[kind]]
    return Raw((rng.choice(INTEGERS) % (1 << bits)).to_bytes(bits // 8, "little"))


def odd_array(rng: random.Random, array: Array) -> Array:
    items, count = list(array.items), None
    for _ in range(rng.randint(1, 3)):
        change = rng.randrange(6)
        at = rng.randrange(len(items)) if items else 0
        if change == 0 and items:
            items[at] = odd_value(rng, array.kind, items[at])
        elif change == 1 and items:
            del items[at : at + rng.choice([1, 1, 10, 1000])]
        elif change == 2 and items:
            items.insert(at, items[rng.randrange(len(items))])
        elif change == 3:
            count = abs(rng.choice(INTEGERS)) % (1 << 64)
        elif change == 4 and items:
            other = rng.randrange(len(items))
            items[at], items[other] = items[other], items[at]
        elif change == 5:
            return rng.choice(
                [Array(ARRAY, [array]), Array(rng.randrange(20), [], 3), Array(STRING, []), Array(U64, [7])]
            )
    return Array(array.kind, items, count)


def odd_entry(rng: random.Random, builder: Builder) -> None:
    at = rng.randrange(len(builder.entries))
    key, kind, value = builder.entries[at]
    change = rng.randrange(6)
    if change <= 2:
        builder.entries[at] = (key, kind, odd_value(rng, kind, value))
    elif change == 3:
        new = rng.choice([U32, F32, BOOL, STRING, ARRAY, U64])
        builder.entries[at] = (key, new, odd_value(rng, new, None))
    elif change == 4:
        del builder.entries[at]
    else:
        new = rng.choice([U32, F32, BOOL, STRING, ARRAY])
        builder.entries.insert(at, (rng.choice([*GGUF_KEYS, key]), new, odd_value(rng, new, None)))


def odd_tensor(rng: random.Random, builder: Builder) -> None:
    at = rng.randrange(len(builder.tensors))
    tensor = builder.tensors[at]
    number = abs(rng.choice(INTEGERS)) % (1 << 64)
    change = rng.randrange(9)
    if change == 0:
        tensor.type_id = rng.choice([*range(42), (1 << 32) - 1])
    elif change == 1:
        tensor.offset = number
    elif change == 2:
        tensor.offset = 32 * rng.randrange(2000)
    elif change == 3:
        tensor.dims[rng.randrange(len(tensor.dims))] = number
    elif change == 4:
        tensor.dims = [number for _ in range(rng.randrange(6))]
    elif change == 5:
        tensor.n_dims = number % (1 << 32)
    elif change == 6:
        tensor.name = rng.choice([*TEXTS, "rope_freqs.weight", builder.tensors[0].name])
    elif change == 7:
        del builder.tensors[at]
    else:
        builder.tensors.append(
            Tensor(rng.choice([*TEXTS, "blk.0.attn_q.bias", "rope_freqs.weight"]), 0, [8], bytes(32))
        )


def damaged_gguf(rng: random.Random, bases: Sequence[Builder] = GGUF_BASES) -> bytes:
    base = rng.choice(bases)
    tensors = [replace(tensor, dims=list(tensor.dims)) for tensor in base.tensors]
    builder = replace(base, entries=list(base.entries), tensors=tensors)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        what = rng.random()
        if what < 0.55 and builder.entries:
            odd_entry(rng, builder)
        elif what < 0.95 and builder.tensors:
            odd_tensor(rng, builder)
        else:
            field = rng.choice(["n_tensors", "n_entries"])
            setattr(builder, field, abs(rng.choice(INTEGERS)) % (1 << 64))
    return builder.encode()


@pytest.mark.parametrize("base", range(len(GGUF_BASES)))
def test_models_without_damage_work(tmp_path: Path, base: int) -> None:
    use(GGUF_BASES[base].write(tmp_path / "m.gguf"), random.Random(0))


def test_damaged_gguf_structures(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def make(rng: random.Random) -> Path:
        return rewrite(path, damaged_gguf(rng))

    run(GGUF_CASES, make, worked_at_most=0.4)


def test_damaged_gguf_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    bases = [base.encode() for base in GGUF_BASES]
    reach = len(GGUF_BASES[0].header())

    def make(rng: random.Random) -> Path:
        return rewrite(path, damage(rng.choice(bases), rng, reach))

    run(RAW_CASES, make, worked_at_most=0.5)


# --- Hugging Face folders


def test_damaged_safetensors(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", dtype="F16")
    stored = as_stored(weights("llama"), "F16")
    whole = safetensors_bytes(stored)
    reach = 8 + int.from_bytes(whole[:8], "little")

    def edit(rng: random.Random) -> dict[str, Any]:
        def change(header: dict[str, Any]) -> None:
            damaged = damage_json(header, rng, rng.choice([1, 1, 2, 5]))
            header.clear()
            header.update(damaged)

        changes: dict[str, Any] = {"header": change}
        if rng.random() < 0.1:
            changes["length"] = abs(rng.choice(INTEGERS)) % (1 << 64)
        return changes

    def make(rng: random.Random) -> Path:
        raw = damage(whole, rng, reach) if rng.random() < 0.4 else safetensors_bytes(stored, **edit(rng))
        rewrite(folder / "model.safetensors", raw)
        return folder

    run(SAFETENSORS_CASES, make, worked_at_most=0.3)


ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
]


def test_damaged_configurations(tmp_path: Path) -> None:
    kinds = ("llama", "mistral", "qwen2", "qwen3")
    plain = ("opt", "falcon", "nemotron")
    folders = {kind: tiny_folder(tmp_path / kind, kind, dtype="F16") for kind in kinds}
    folders |= {kind: plain_folder(tmp_path / kind, kind) for kind in plain}
    windows = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

    for kind in kinds + plain:
        use(folders[kind], random.Random(0))

    def make(rng: random.Random) -> Path:
        kind = rng.choice(kinds + plain)
        extra = {} if kind == "opt" else rng.choice(ROPES)
        if kind in plain:
            config = plain_config(kind) | extra
        else:
            config = tiny_config(kind, **extra, **(windows if kind.startswith("qwen") else {}))
        raw = json.dumps(damage_json(config, rng, rng.choice([1, 1, 2, 4]))).encode()
        raw = damage(raw, rng, len(raw)) if rng.random() < 0.2 else raw
        rewrite(folders[kind] / "config.json", raw)
        return folders[kind]

    run(CONFIG_CASES, make, worked_at_most=0.7)  # many keys change nothing, or something harmless


def test_damaged_indexes(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", dtype="F16")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    stored = list(as_stored(weights("llama"), "F16").items())
    for part, name in enumerate(names):
        (folder / name).write_bytes(safetensors_bytes(dict(stored[part::2])))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": {t: names[i % 2] for i, (t, _) in enumerate(stored)}}

    def make(rng: random.Random) -> Path:
        raw = json.dumps(damage_json(index, rng, rng.choice([1, 2]))).encode()
        raw = damage(raw, rng, len(raw)) if rng.random() < 0.3 else raw
        rewrite(folder / "model.safetensors.index.json", raw)
        return folder

    run(INDEX_CASES, make, worked_at_most=0.3)


# --- tokenizer files of a folder


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "abc": 5, "Ġ": 6, "Ġa": 7},
        "merges": [["a", "b"], ["ab", "c"], ["Ġ", "a"]],
    },
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<|endoftext|>",
    "eos_token": {"content": "<|endoftext|>", "special": True},
    "add_bos_token": False,
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    "chat_template": "{{ messages[0].content }}",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_tokenizer_files(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", dtype="F16")
    files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    files["generation_config.json"] = {"eos_token_id": [0, 5], "bos_token_id": 0}

    def make(rng: random.Random) -> Path:
        chosen = rng.choice(list(files))
        for name, value in files.items():
            raw = json.dumps(damage_json(value, rng, rng.choice([1, 2])) if name == chosen else value).encode()
            rewrite(folder / name, damage(raw, rng, len(raw)) if name == chosen and rng.random() < 0.2 else raw)
        return folder

    run(TOKENIZER_CASES, make, worked_at_most=0.9)
