"""The tokenizer against transformers and sentencepiece, on vocabularies trained here; streaming; malformed metadata."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.errors import ModelError, RequestError
from powerinfer.text import bpe
from powerinfer.text.pre_tokenizers import PRE_TOKENIZERS
from powerinfer.text.tokenizer import Tokenizer, ends_of_generation
from powerinfer.text.tokenizer_folder import tokenizer_from_folder
from powerinfer.text.tokenizer_gguf import tokenizer_from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'd've said, isn't it? WE'RE DONE, I'LL SAY!",
    "def add(a: int, b: int) -> int:\n    return a + b  # sum\n\nfor i in range(1234567890):\n\tprint(i, '\\n')\r\n",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Ça va? Où est l'été à Noël, garçon?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Γαζέες καὶ μυρτιὲς δὲν θὰ βρῶ πιά.",
    "いろはにほへと ちりぬるを 我能吞下玻璃而不伤身体。 나는 유리를 먹을 수 있어요. ฉันกินกระจกได้",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית. मैं काँच खा सकता हूँ",
    "3.14159 2,718 1e-10 0xDEADBEEF 192.168.0.1 10% $99.99 (a+b)**2 == c[0] && !d || e->f; /* x */",
    "aaaa bbbb abab aabb the the then there their them hello hello world worlds wording",
] * 3

SPECIALS = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|im_end|>>"]
LITERALS = ["<tool>", "▁▁"]

HARD = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n \t \r\n\x0b\x0c  x",
    "\t\tif x:\n\t\t    y  =  1   \n\n\n",
    "trailing   ",
    "   leading",
    "a  b   c    d     e" + " " * 40 + "f",
    "\u00a0nbsp\u2003em\u200bzero\u3000wide\ufeffbom\x85nel\x1cfs",
    "Hello, y'all! It's I'LL we'Ve 'S 'd'D don't''t",
    "caf\u00e9 cafe\u0301 \ufb01ne \u212b \u1e9b\u0323 \uac00\u1100\u1161 I\u0307 \u017ft's",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇨🇭🇯🇵 ❤️‍🔥 e\u0301\u0302\u0303 🤦🏼‍♂️👍🏿",
    "日本語と中文混排English한국어ไทยالعربيةעברית हिन्दी",
    "Zażółć gęślą jaźń; Ελληνικά; Кириллица; Tiếng Việt rất đẹp; ǅ ʰ ª º ② Ⅷ ٣٤ ½ 𝟘𝟙 𝓗𝓲",
    "1 12 123 1234 12345 123456789012 3.14 1,000 x86_64 v1.2.3",
    "for(int i=0;i<n;++i){a[i]^=~b|(c<<3);}// ok\\n\\t\"'`",
    "https://example.org/a_b-c/?q=1&r=%20#frag <a href='x'>&amp;</a> user@host.tld C:\\dir\\f.txt",
    "<|begin|>hello<|end|> <|im_start|>user\nhi<|im_end|>>\n<|im_end|",
    "<|im_end|><|im_end|>><|im_<|im_end|>end|><tool> <tool>x▁▁y",
    "</s><s><unk><pad><0x0A>▁x",
    "\x00\x01\x7f\ufffd\U0010ffff\ue000\u2028\u2029",
    "lone \ud800 surrogate \udfff and a pair \ud83d\ude00",
    "a" * 3000,
    "ab" * 1500,
    " " * 2000 + "x" + "\n" * 1500,
    "the " * 900,
    "あ" * 1200,
    "👍🏿" * 700,
]

OFFICIAL = {  # as in the tokenizer.json of the models
    "gpt-2": None,
    "smollm": None,
    "falcon": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
OFFICIAL["qwen35"] = OFFICIAL["qwen2"].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
OFFICIAL |= dict.fromkeys(("dbrx", "glm4", "smaug-bpe"), OFFICIAL["llama-bpe"])
OFFICIAL["minimax-m2"] = OFFICIAL["gpt-4o"]
OFFICIAL["seed-coder"] = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Of DeepSeek several patterns, one after the other; digits are then alone in the older ones.
HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛ"
    "ὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
SEQUENCES = {
    "deepseek-llm": ["[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN_AND_HANGUL],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "kimi-k2": [
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
OFFICIAL |= dict.fromkeys(SEQUENCES, "")
# The patterns that llama.cpp has for further names, in the tokenizers' own spelling; digits in threes from the right.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
FURTHER = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "refact": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "olmo": [GPT2],
    "jais-2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
        r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "minicpm5": [r"\p{N}{1,3}", OFFICIAL["llama-bpe"].replace("{1,3}", "+")],
    "hunyuan": [OFFICIAL["qwen2"]],
    "laguna": [r"[^\n]+|[\n]+", OFFICIAL["qwen2"]],
    "ufakzeka": [OFFICIAL["qwen2"].partition("|[^")[2].join(("[^", ""))],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "llama4": [OFFICIAL["gpt-4o"]],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", OFFICIAL["gpt-4o"]],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        OFFICIAL["gpt-4o"].replace(r"\p{N}{1,3}", r"\p{N}"),
    ],
    "spark2_5": [
        *SEQUENCES["deepseek-v3"][:2],
        SEQUENCES["deepseek-v3"][2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
        r"\p{N}",
    ],
    "afmoe": [
        THREES,
        "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟\u0e00-\u0eff"
        "ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        SEQUENCES["deepseek-v3"][2],
    ],
    "bloom": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
}


WHOLE_PIECES = ("llama-bpe", "tekken", "glm4", "minicpm5", "youtu", "kimi-k2")
DIGITS_ALONE = ("smollm", "deepseek-llm", "deepseek-coder")
COMPOSED = ("qwen2", "qwen35", "command-r", "olmo")


@cache
def byte_level_json(pre: str) -> str:
    """tokenizer.json of a byte-level BPE with the pre-tokenizer of a model family, trained on CORPUS."""
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Native
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder

    native = Native(models.BPE(ignore_merges=pre in WHOLE_PIECES))
    pattern = OFFICIAL.get(pre, "")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS_ALONE else []
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    native.pre_tokenizer = pre_tokenizers.Sequence([*digits, *split, level])
    if pre == "falcon":
        punctuation = pre_tokenizers.Punctuation("contiguous")
        triples = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        native.pre_tokenizer = pre_tokenizers.Sequence([punctuation, level, triples])
    patterns = SEQUENCES.get(pre) or FURTHER.get(pre)
    if patterns:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        native.pre_tokenizer = pre_tokenizers.Sequence([*splits, *digits, level])
    if pre in COMPOSED:
        native.normalizer = normalizers.NFC()
    native.decoder = ByteLevelDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    native.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    native.add_tokens([AddedToken(text, special=False, normalized=False) for text in LITERALS])
    if pre == "llama-bpe":
        begin = native.token_to_id("<|begin|>")
        native.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", begin)])
    return native.to_str()


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """The same as the metadata of a GGUF file."""
    data = json.loads(byte_level_json(pre))
    vocab = {**data["model"]["vocab"], **{token["content"]: token["id"] for token in data["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    types = [3 if token in SPECIALS else 4 if token in LITERALS else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|begin|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
    }


def small_metadata(more: list[str], types: list[int], **keys: Any) -> dict[str, Any]:
    """The keys of a GGUF file with the 256 bytes, "he", and more tokens with their types."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*bpe.byte_alphabet(), "he", *more],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": [1] * 257 + types,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


@cache
def oracle(pre: str) -> Any:
    from tokenizers import Tokenizer as Native
    from transformers import PreTrainedTokenizerFast

    native = Native.from_str(byte_level_json(pre))
    return PreTrainedTokenizerFast(tokenizer_object=native, bos_token="<|begin|>", eos_token="<|end|>")


def valid(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_tokens_for_infilling_as_a_file_states_them() -> None:
    stated = {"fim_pre": 5, "prefix": 6, "suffix": 7, "fim_mid": 10**9, "fim_rep": 8}
    keys = {f"tokenizer.ggml.{name}_token_id": value for name, value in stated.items()}
    found = tokenizer_from_gguf(byte_level_metadata("gpt-2") | keys).vocabulary.infill
    assert found == {"prefix": 5, "suffix": 7, "repository": 8}


def native_only(tokenizer: Tokenizer) -> Tokenizer:
    assert tokenizer._engine is not None  # once it is built, short texts go through it too
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("pre", OFFICIAL)
def test_byte_level_ids_are_those_of_transformers(pre: str, special: bool) -> None:
    reference = oracle(pre)
    fresh, built = (
        tokenizer_from_gguf(byte_level_metadata(pre)),
        native_only(tokenizer_from_gguf(byte_level_metadata(pre))),
    )
    for text in HARD:
        expected = reference.encode(valid(text), add_special_tokens=False, split_special_tokens=not special)
        assert built.encode(text, special=special, add_bos=False) == expected, text[:80]
        if text.isascii() and len(text) <= bpe.MAX_CHARS:
            assert fresh.encode(text, special=special, add_bos=False) == expected, text[:80]
            assert "_engine" not in fresh.__dict__, "a short text waited for the native tokenizer"


DIGITS = ["1 12 1234567 12345678, 1234567a a123456 x12_345 1234.56 ½ 12½ ٣٤٣٤ 1234\n12345", "IMGIMGABCDZ <sentinel:12>"]


@pytest.mark.parametrize("pre", FURTHER)
def test_further_pre_tokenizers_split_as_their_patterns_do(pre: str) -> None:
    reference = oracle(pre)
    fresh, built = (
        tokenizer_from_gguf(byte_level_metadata(pre)),
        native_only(tokenizer_from_gguf(byte_level_metadata(pre))),
    )
    for text in [*HARD, *CORPUS[:8], *DIGITS]:
        expected = reference.encode(valid(text), add_special_tokens=False)
        assert built.encode(text, add_bos=False) == expected, text[:80]
        if text.isascii() and len(text) <= bpe.MAX_CHARS:
            assert fresh.encode(text, add_bos=False) == expected, text[:80]
    assert "_engine" not in fresh.__dict__


@pytest.mark.parametrize("pre", ["afmoe", "tiny_aya", "superbpe"])
def test_a_long_run_of_digits_is_split_in_linear_time(pre: str) -> None:
    tokenizer = native_only(tokenizer_from_gguf(byte_level_metadata(pre)))
    times = []
    for length in (10_000, 160_000):
        begin = time.process_time()
        tokenizer.encode("1" * length, add_bos=False)
        times.append(time.process_time() - begin)
    assert times[1] < 64 * times[0] + 0.1  # by the models' own patterns: 256 times


def test_names_of_pre_tokenizers_that_share_a_row() -> None:
    """As llama.cpp lists them: refact is Granite 3's, falcon3 Falcon 3's."""
    for known, names in {
        "smollm": ("refact", "starcoder", "codeshell", "exaone", "minerva-7b", "mellum2"),
        "gpt-2": ("mpt", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"),
        "llama-bpe": ("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        "gpt-4o": ("llama4", "kanana2", "minimax-m2"),
        "deepseek-v3": ("hunyuan-dense", "joyai-llm"),
        "hunyuan": ("megrez", "kormo", "stablelm2", "solar-open", "grok-2"),
        "glm4": ("glm5",),
        "bailingmoe": ("bailingmoe2", "llada-moe"),
        "tiny_aya": ("cohere2moe",),
        "bloom": ("poro-chat", "gpt3-finnish"),
    }.items():
        assert {PRE_TOKENIZERS[name] for name in names} == {PRE_TOKENIZERS[known]}
    begins = {name for name, row in PRE_TOKENIZERS.items() if row.add_bos}
    assert begins == {*PRE_TOKENIZERS} & {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
    }  # fmt: skip
    whole = {name for name, row in PRE_TOKENIZERS.items() if row.ignore_merges}
    assert whole == begins - {"chameleon"} | {"glm4", "glm5", "youtu", "minicpm5", "kimi-k2"}


@pytest.mark.parametrize("pre", OFFICIAL)
def test_a_folder_gives_the_ids_of_transformers(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    oracle(pre).save_pretrained(tmp_path)
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), tokenizer_from_folder(tmp_path)
    for text in HARD:
        begun = tokenizer.add_bos and text.startswith("<|begin|>")  # it gets no second one
        assert tokenizer.encode(text) == reference.encode(valid(text))[begun:], text[:80]
        plain = reference.encode(valid(text), add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text, special=False, add_bos=False) == plain, text[:80]
    assert tokenizer.add_bos == (pre == "llama-bpe")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.vocab_size == len(reference)


def ranked_files(folder: Path, pieces: dict[str, int], **config: Any) -> None:
    """The tokenizer's files of a folder as Moonshot publishes them: pieces in GPT-2's alphabet, and their ranks."""
    raw = {bytes(map(bpe.byte_values().__getitem__, piece)): rank for piece, rank in pieces.items()}
    lines = [base64.b64encode(piece) + b" %d\n" % rank for piece, rank in raw.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer", **config}))


def merged_by_rank(word: str, ranks: dict[str, int]) -> list[int]:
    """Ids of a word, a search for the lowest rank in all pairs at every step."""
    parts = [word] if word in ranks else list(word)
    while joined := [ranks[a + b] for a, b in pairwise(parts) if a + b in ranks]:
        at = next(at for at, pair in enumerate(pairwise(parts)) if ranks.get("".join(pair)) == min(joined))
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [ranks[part] for part in parts]


def test_a_folder_whose_pieces_have_ranks_alone(tmp_path: Path) -> None:
    data = json.loads(byte_level_json("kimi-k2"))
    added = {token["content"] for token in data["added_tokens"]}
    ranks = {piece: at for piece, at in data["model"]["vocab"].items() if piece not in added}
    whole = "qzxj"  # a piece that no merges make
    ranks[whole] = first = len(ranks)
    tokens = {str(first + 2): {"content": "<|end|>", "special": True}, str(first + 7): {"content": "<tool>"}}
    ranked_files(tmp_path, ranks, added_tokens_decoder=tokens, eos_token="<|end|>")
    tokenizer = tokenizer_from_folder(tmp_path)
    cut = oracle("kimi-k2").backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in (text for text in [*CORPUS[:8], *HARD, whole] if len(text) < 500):
        expected = [at for word, _ in cut(valid(text)) for at in merged_by_rank(word, ranks)]
        assert tokenizer.encode(text, special=False) == expected, text[:80]
        assert tokenizer.decode(expected) == valid(text)
    assert tokenizer.encode("a<|end|><tool>") == [ranks["a"], first + 2, first + 7]
    assert tokenizer.encode(f"<|reserved_token_{first + 3}|>") == [first + 3]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.add_bos) == (first + 257, first + 2, False)


def test_malformed_files_of_ranks_are_refused(tmp_path: Path) -> None:
    ranks = {char: at for at, char in enumerate(bpe.byte_alphabet())}
    for pieces, config, says in (
        (ranks, {"tokenizer_class": "X"}, "tokenizer_class 'X'"),
        (dict(list(ranks.items())[:-1]), {}, "no piece for some byte"),
        (ranks | {"ab": 255}, {}, "twice"),
        (ranks | {"ab": 258}, {}, "leaves out a rank"),
        (ranks, {"added_tokens_decoder": {"300": {"content": "a"}}}, "different ids"),
        (ranks, {"added_tokens_decoder": [1]}, "malformed"),
        (ranks, {"added_tokens_decoder": {"300": 1}}, "malformed"),
    ):
        ranked_files(tmp_path, pieces, **config)
        with pytest.raises(ModelError, match=says) as caught:
            tokenizer_from_folder(tmp_path)
        assert_one_line(caught.value)
    for line in (b"YQ==", b"Y 3", b"YQ== x", b"YQ== 1 2"):
        (tmp_path / "tiktoken.model").write_bytes(line)
        with pytest.raises(ModelError, match="in every line") as caught:
            tokenizer_from_folder(tmp_path)
        assert_one_line(caught.value)


ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
ANY_TEXT = st.lists(st.one_of(st.text(max_size=8), ASCII, st.sampled_from(HARD[:22] + SPECIALS)), max_size=6).map(
    "".join
)


@pytest.mark.parametrize("pre", OFFICIAL)
def test_short_texts_in_python_get_the_ids_of_the_native_engine(pre: str) -> None:
    fresh, built = (
        tokenizer_from_gguf(byte_level_metadata(pre)),
        native_only(tokenizer_from_gguf(byte_level_metadata(pre))),
    )

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.one_of(ASCII, st.sampled_from(SPECIALS + CORPUS[:2] + CORPUS[6:8])), max_size=4).map("".join))
    def check(text: str) -> None:
        for special in (True, False):
            assert fresh.encode(text, special=special) == built.encode(text, special=special)

    check()
    assert "_engine" not in fresh.__dict__


def test_the_default_model_encodes_as_transformers_does(smollm2: Path) -> None:
    """SmolLM2's own vocabulary, put together from the parts that its tokenizer.json names."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Native
    from transformers import PreTrainedTokenizerFast

    from powerinfer.formats.gguf import read_gguf

    metadata = read_gguf(smollm2).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    native = Native(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    native.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    reference = PreTrainedTokenizerFast(tokenizer_object=native)

    tokenizer, built = tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))
    for text in [*HARD, *CORPUS]:
        expected = reference.encode(valid(text))
        assert built.encode(text) == tokenizer.encode(text) == expected, text[:80]
    assert tokenizer.eos_ids == {tokens.index(name) for name in ("<|im_end|>", "<|endoftext|>", "<reponame>")}


# ------------------------------------------------------------------------------------------------------- SentencePiece


@cache
def sentencepiece_model(kind: str, prefix: bool) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    unigram = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=650,
        byte_fallback=kind == "bpe",
        add_dummy_prefix=prefix,
        user_defined_symbols=["<tool>", "<tool><tool>"],
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        character_coverage=1.0 if kind == "unigram" else 0.98,
        minloglevel=2,
        **(unigram if kind == "unigram" else llama),
    )
    return model.getvalue()


def sentencepiece_metadata(kind: str, prefix: bool = True) -> dict[str, Any]:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model(kind, prefix))
    return {
        "tokenizer.ggml.model": {"bpe": "llama", "unigram": "t5"}[kind],
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": np.array([piece.score for piece in proto.pieces], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in proto.pieces], dtype=np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(proto.normalizer_spec.precompiled_charsmap, np.uint8),
    }


def processor(kind: str, prefix: bool = True) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind, prefix))


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_bpe_ids_are_those_of_sentencepiece(prefix: bool) -> None:
    reference, metadata = processor("bpe", prefix), sentencepiece_metadata("bpe", prefix)
    fresh, built = tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))
    for text in [*HARD, *CORPUS]:
        if "<tool>" in text:  # a fresh start with its own leading space after such a piece: see the test below
            continue
        expected = reference.encode(valid(text))
        assert built.encode(text, special=False, add_bos=False) == expected, text[:80]
        assert fresh.encode(text, special=False, add_bos=False) == expected, text[:80]
        assert built.decode(expected) == reference.decode(expected), text[:80]
    assert built.encode("x") == [1, *reference.encode("x")], "llama models begin with bos"


def test_scored_bpe_in_python_is_the_native_one() -> None:
    metadata = sentencepiece_metadata("bpe")
    fresh, built = tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))

    @settings(max_examples=300, deadline=None)
    @given(
        st.one_of(ASCII, st.text("ab the", max_size=40), st.sampled_from(CORPUS[:2]), st.just("<s>a <tool><tool>b</s>"))
    )
    def check(text: str) -> None:
        assert fresh.encode(text) == built.encode(text)

    check()
    assert "_engine" not in fresh.__dict__


def test_merges_of_a_scored_vocabulary_are_all_ways_to_cut_its_pieces() -> None:
    """In the order of transformers: by score, then the longer left part, then the longer right one, then the id."""
    random = np.random.default_rng(3)
    drawn = {"".join(random.choice(list("ab▁é👍"), random.integers(1, 9))) for _ in range(3000)}
    vocab = {piece: at for at, piece in enumerate(["", *sorted(drawn)])}
    scores = random.integers(-40, 0, len(vocab)).astype(float).tolist()
    atoms = frozenset(random.choice(list(vocab), 100).tolist())
    cuts = [(piece, piece[:at], piece[at:]) for piece in vocab for at in range(1, len(piece))]
    cuts = [cut for cut in cuts if all(part in vocab and part not in atoms for part in cut)]
    cuts.sort(key=lambda cut: (-scores[vocab[cut[0]]], -len(cut[1]), -len(cut[2]), vocab[cut[0]]))
    merges = bpe.score_merges(vocab, scores, atoms)
    assert len(merges) > 1000 and merges == [(left, right) for _, left, right in cuts]
    assert bpe.score_merges({}, [], frozenset()) == bpe.score_merges({"a": 0}, [0.0], frozenset({"a"})) == []


def test_pieces_of_one_hash_are_refused() -> None:
    """Thue and Morse's words of 4096 letters, whose polynomials are equal modulo 2^64 in every odd number."""
    word = "a"
    while len(word) < 4096:
        word += word.translate({97: 98, 98: 97})
    vocab = {"a": 0, "b": 1, word: 2, word.translate({97: 98, 98: 97}): 3}
    with pytest.raises(ModelError, match="made to be slow"):
        bpe.score_merges(vocab, [0.0] * 4, frozenset())


def test_the_native_engine_can_be_built_ahead() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata("bpe"))
    tokenizer.prepare()
    assert "_engine" in tokenizer.__dict__


def test_text_after_a_special_token_begins_with_a_space_as_in_llama2() -> None:
    """As the tokenizer.json of the Llama 2 family says (the normalizer prepends to every stretch of text)."""
    tokenizer, reference = tokenizer_from_gguf(sentencepiece_metadata("bpe")), processor("bpe")
    expected = [1, *reference.encode("the fox"), 2, *reference.encode("the dog")]
    assert tokenizer.encode("<s>the fox</s>the dog", add_bos=False) == expected
    tool = reference.piece_to_id("<tool>")
    assert tokenizer.encode("<tool>the dog", add_bos=False) == [tool, *reference.encode("the dog")]


def test_unigram_ids_are_those_of_sentencepiece() -> None:
    reference, tokenizer = processor("unigram"), tokenizer_from_gguf(sentencepiece_metadata("unigram"))
    texts = ["", " ", "  two  spaces  ", "ﬁne ½ ＡＢＣ ①", "a" * 500, "the " * 100, "日本語English", "</s> <unk>x</s>"]
    for text in [*CORPUS, *texts]:
        assert tokenizer.encode(text, special=False, add_bos=False) == reference.encode(text), text[:80]
    assert tokenizer.encode("x</s>", special=True)[-2:] == [2, 2], "the text's own, and the one the model wants"


@cache
def merged_model() -> Any:
    """A tokenizer of the kind of Gemma 4: merges of whole texts, with "▁" for a space."""
    from tokenizers import Tokenizer as Native
    from tokenizers import models, normalizers, trainers

    native = Native(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    native.normalizer = normalizers.Replace(" ", "▁")
    first = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [line for text in CORPUS for line in text.splitlines()]
    native.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=first, show_progress=False))
    return native


def merged_metadata() -> dict[str, Any]:
    model = json.loads(merged_model().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def test_merged_bpe_ids_are_those_of_the_tokenizers_library() -> None:
    reference, tokenizer = merged_model(), tokenizer_from_gguf(merged_metadata())
    reference.encode_special_tokens = True
    for text in [*CORPUS, *HARD]:
        text = valid(text)
        if "<0x" in text or "<unk>" in text:  # there special tokens, here bytes and an unknown piece
            continue
        assert tokenizer.encode(text, special=False, add_bos=False) == reference.encode(text).ids, text[:80]
    assert tokenizer.encode("x")[0] == 1, "whatever the file says"
    text = "  two  spaces\n\n\tü 日本 "
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_gemma_4_as_ollama_writes_it() -> None:
    """With the name of scored merges, scores that say nothing, and bytes that are tokens like others."""
    usual = merged_metadata()
    types = [1 if kind == 6 else kind for kind in usual["tokenizer.ggml.token_type"]]
    scores = [float(at) for at in range(len(types))]
    names = {"model": "llama", "pre": "gemma4", "scores": scores, "token_type": types}
    other = tokenizer_from_gguf(usual | {f"tokenizer.ggml.{name}": value for name, value in names.items()})
    tokenizer = tokenizer_from_gguf(usual)
    for text in [*CORPUS, *HARD]:
        text = valid(text)
        if "<0x" not in text:
            assert other.encode(text) == tokenizer.encode(text), text[:80]
    text = "  two  spaces\n\n\tü 日本 "
    assert other.decode(other.encode(text, add_bos=False)) == text


def test_scores_without_ties_merge_by_score() -> None:
    """Worked by hand: "abc" with ab (-1) before bc (-2); then abc is reached by ab + c alone."""
    pieces = ["<unk>", "a", "b", "c", "bc", "ab", "abc", "▁"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        assert tokenizer.encode("abc") == [6]
        assert tokenizer.encode("bcab") == [4, 5]
        assert tokenizer.encode("cbab") == [3, 2, 5]
        assert tokenizer.encode("xxa y") == [0, 1, 7, 0], "without byte pieces a run of unknown characters is one unk"


def test_a_sentencepiece_folder_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    """A Llama 2's tokenizer.json (`legacy`: a space before every stretch) and a newer one (before the first only)."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Native
    from transformers import PreTrainedTokenizerFast

    metadata = sentencepiece_metadata("bpe")
    vocab = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    atoms = frozenset(["<unk>", "<s>", "</s>", "<tool>", "<tool><tool>", *(f"<0x{byte:02X}>" for byte in range(256))])
    merges = bpe.score_merges(vocab, metadata["tokenizer.ggml.scores"].tolist(), atoms)
    for legacy in (True, False):
        native = Native(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if legacy:
            native.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            native.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
        native.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
        native.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
        reference = PreTrainedTokenizerFast(
            tokenizer_object=native, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        folder = tmp_path / str(legacy)
        reference.save_pretrained(folder)
        tokenizer = tokenizer_from_folder(folder)
        for text in [*HARD, *CORPUS, "<s>the fox</s>the dog"]:
            ids = reference.encode(valid(text))
            assert tokenizer.encode(text) == ids, text[:80]
            assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids), text[:80]
        # Masked, the second stretch must not get the space that only the first one has.
        text = "<s>the fox</s>the dog"
        masked = tokenizer.encode_masked(text, [(0, 3)])
        tail = reference.encode(text)[-len(reference.encode("the dog", add_special_tokens=False)) :]
        assert masked[-1] == tail[-1] and 2 in masked and 1 not in masked
        space = native.token_to_id("▁")
        assert (tokenizer.encode_masked("<s></s>c", [(0, 3)])[-2:] == [2, native.token_to_id("c")]) == (not legacy)
        assert space is not None


# ----------------------------------------------------------------------------------------------------- special tokens


def test_special_text_is_plain_where_special_tokens_are_not_wanted() -> None:
    for tokenizer in (
        tokenizer_from_gguf(byte_level_metadata("smollm")),
        native_only(tokenizer_from_gguf(byte_level_metadata("smollm"))),
    ):
        ids = tokenizer.encode("x<|im_end|>y", special=False)
        assert not set(ids) & {tokenizer.encode(text)[0] for text in SPECIALS}
        assert tokenizer.decode(ids) == "x<|im_end|>y"
        (end,) = tokenizer.encode("<|im_end|>")
        assert tokenizer.token_text(end) == "<|im_end|>"
        assert tokenizer.decode([end]) == "" and tokenizer.decode([end], skip_special=False) == "<|im_end|>"


def test_a_special_token_that_is_also_a_word_of_the_vocabulary_stays_out_of_plain_text() -> None:
    """ignore_merges takes a whole word that is a piece: "halt" must not become the control token of that name."""
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "halt"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], np.int32(3))
    halt = len(metadata["tokenizer.ggml.tokens"]) - 1
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        ids = tokenizer.encode("halt! xhalt halt", special=False, add_bos=False)
        assert halt not in ids and tokenizer.decode(ids) == "halt! xhalt halt"
        assert halt in tokenizer.encode("halt", special=True)


def test_bos_and_eos_come_as_the_model_says() -> None:
    metadata = byte_level_metadata("gpt-2")
    begin, end = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    body = tokenizer_from_gguf(metadata).encode("hi")
    assert begin not in body
    assert tokenizer_from_gguf(metadata).encode("hi", add_bos=True) == [begin, *body]
    both = {**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_from_gguf(both).encode("hi") == [begin, *body, end]
    assert tokenizer_from_gguf(both).encode("hi", add_bos=False) == body
    llama3 = byte_level_metadata("llama-bpe")
    assert tokenizer_from_gguf(llama3).encode("hi")[0] == llama3["tokenizer.ggml.bos_token_id"]
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(RequestError):
        tokenizer_from_gguf(metadata).encode("hi", add_bos=True)


def test_every_end_of_generation_token_counts() -> None:
    metadata = byte_level_metadata("qwen2")
    ids = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    metadata["tokenizer.ggml.eot_token_id"] = ids["<|im_start|>"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.eos_ids == {ids["<|end|>"], ids["<|im_start|>"], ids["<|im_end|>"]}
    assert tokenizer.eos_id == ids["<|end|>"]


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
@pytest.mark.parametrize(
    "name", ["<end_of_turn>", "<|eot_id|>", "<turn|>", "</s>", "[e~[", "<|calls|>", "<fim_pad>", "<|file_sep|>"]
)
def test_an_end_token_ends_an_answer_by_its_name_whatever_its_type(name: str, kind: int) -> None:
    tokenizer = tokenizer_from_gguf(small_metadata(["<|stop|>", name], [3, kind], eos_token_id=257))
    assert tokenizer.eos_ids == {257, 258} and tokenizer.decode([72, 258]) == tokenizer.decode([72])
    assert 258 not in tokenizer.encode(name, special=False) and tokenizer.encode(name) == [258]


def test_tokens_for_gaps_end_an_answer_by_their_keys() -> None:
    names = ["<|stop|>", "<|pad it|>", "<|next file|>"]
    metadata = small_metadata(names, [3, 3, 3], eos_token_id=257, fim_pad_token_id=258, fim_sep_token_id=259)
    assert tokenizer_from_gguf(metadata).eos_ids == {257, 258, 259}


def test_ends_by_name() -> None:
    def ends(*names: str, special: tuple[int, ...] = ()) -> set[int]:
        return set(ends_of_generation({name: at for at, name in enumerate(names)}, special).values())

    assert ends("<|end|>", "<|return|>", "<|call|>", "<|im_end|>") == {1, 2, 3}, "messages of gpt-oss end so"
    assert ends("<|end|>", "<|flush|>", "<|calls|>") == {1, 2}, "and Solar's"
    assert ends("<|end|>", "<|return|>") == {0, 1}
    assert ends("</s>", "<b>") == {0} and ends("</s>", "<eos>", special=(0,)) == {0, 1}
    assert ends("</s>", "<eos>", "<end_of_turn>") == {1, 2}, "Gemma's </s> is HTML's"
    assert ends("</s>", "<|im_end|>", "<|endoftext|>") == {1, 2}, "and Qwen's"


@pytest.mark.parametrize("special", [True, False])
def test_an_end_token_of_a_folder_ends_an_answer_by_its_name(special: bool, tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Native

    native = Native.from_str(byte_level_json("gpt-2"))
    native.add_tokens([AddedToken("<end_of_turn>", special=special, normalized=False)])
    native.save(str(tmp_path / "tokenizer.json"))
    tokenizer, end = tokenizer_from_folder(tmp_path), native.token_to_id("<end_of_turn>")
    assert end in tokenizer.eos_ids and tokenizer.decode([end]) == "" and tokenizer.encode("<end_of_turn>") == [end]


def test_a_folder_says_what_ends_a_generation_and_how_to_chat(tmp_path: Path) -> None:
    oracle("qwen2").save_pretrained(tmp_path)
    ids = oracle("qwen2").get_vocab()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|im_start|>"], ids["<tool>"]]}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.eos_ids == {ids[text] for text in ("<|end|>", "<|im_start|>", "<|im_end|>", "<tool>")}
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    assert tokenizer_from_folder(tmp_path).chat_template == {"default": "d", "tool_use": "t"}


NAMED = {"default": "d", "tool_use": "t"}
NAMED_TEMPLATES: dict[str, dict[str, Any]] = {
    "a list": {"tokenizer_config.json": {"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]}},
    "an object": {"tokenizer_config.json": {"chat_template": NAMED}},
    "a processor's": {"chat_template.json": {"chat_template": NAMED}},
    "files": {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"},
    "a file beside the configuration": {
        "tokenizer_config.json": {"chat_template": "d"},
        "additional_chat_templates/tool_use.jinja": "t",
    },
}


@pytest.mark.parametrize("files", NAMED_TEMPLATES.values(), ids=NAMED_TEMPLATES)
def test_named_templates_of_a_folder(files: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json("gpt-2"))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert tokenizer_from_folder(tmp_path).chat_template == NAMED


def test_a_template_that_has_a_name_for_nothing_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json("gpt-2"))
    config = {"chat_template": [{"name": "chatml", "template": "c"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_from_folder(tmp_path).chat_template == "c"


def test_named_templates_of_a_gguf_file() -> None:
    metadata = {
        **byte_level_metadata("gpt-2"),
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template": "d",
        "tokenizer.chat_template.tool_use": "t",
    }
    assert tokenizer_from_gguf(metadata).chat_template == NAMED
    with pytest.raises(ModelError, match=r"chat_template\.rag must be a string"):
        tokenizer_from_gguf({**metadata, "tokenizer.chat_template.rag": 3})


@pytest.mark.parametrize("part", ["text_config", "llm_config", "thinker_config"])
def test_ends_in_the_configuration_of_the_texts_part(part: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json("gpt-2"))
    ids = oracle("gpt-2").get_vocab()
    wanted, named = {ids["<tool>"], ids["<|begin|>"]}, {ids["<|end|>"], ids["<|im_end|>"]}
    (tmp_path / "config.json").write_text(json.dumps({part: {"eos_token_id": sorted(wanted)}, "eos_token_id": None}))
    assert tokenizer_from_folder(tmp_path).eos_ids == wanted | named
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<tool>"]}))
    assert tokenizer_from_folder(tmp_path).eos_ids == {ids["<tool>"]} | named


@pytest.mark.parametrize("prefix, suffix", [((0, 1), ()), ((1, 0), (2,)), ((), (2, 1)), ((0,), (2, 1))])
def test_a_frame_of_several_tokens(prefix: tuple[int, ...], suffix: tuple[int, ...], tmp_path: Path) -> None:
    """GLM-4's [gMASK]<sop> before a text, for one."""
    from tokenizers import Tokenizer as Native
    from tokenizers import processors

    native = Native.from_str(byte_level_json("gpt-2"))
    names = {name: native.token_to_id(name) for name in SPECIALS[:3]}
    frame = [" ".join(SPECIALS[at] for at in part) for part in (prefix, suffix)]
    native.post_processor = processors.TemplateProcessing(f"{frame[0]} $A {frame[1]}".strip(), None, [*names.items()])
    native.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in ("", "a", "hello world", HARD[5]):
        assert tokenizer.encode(text) == native.encode(text).ids
        assert tokenizer.encode(text, add_bos=False) == native.encode(text, add_special_tokens=False).ids


def test_a_text_that_begins_with_bos_gets_no_second_one(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata("llama-bpe")
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        caplog.clear()
        body = tokenizer.encode("hi", add_bos=False)
        assert tokenizer.encode("hi") == [tokenizer.bos_id, *body] and not caplog.records
        for _ in range(2):
            assert tokenizer.encode("<|begin|>hi") == [tokenizer.bos_id, *body]
        assert ["no second one" in record.getMessage() for record in caplog.records] == [True]
        assert tokenizer.encode("<|begin|>hi", special=False).count(tokenizer.bos_id) == 1


@pytest.mark.parametrize("name", ["bos", "eos", "unknown"])
def test_a_character_that_a_file_names_as_a_special_token_stays_in_a_text(name: str) -> None:
    metadata = small_metadata(["<x>"], [3], **{f"{name}_token_id": bpe.byte_alphabet().index("!")})
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        for text in ("he! he!", "!", "!!<x>!"):
            ids = tokenizer.encode(text, special=False, add_bos=False)
            assert tokenizer.decode(ids) == text and 257 not in ids


def test_a_control_token_that_is_spelled_otherwise_than_named_stays_out_of_plain_text() -> None:
    """ignore_merges finds it as a whole word: " halt" is spelled Ġhalt."""
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "Ġhalt"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], np.int32(3))
    halt = len(metadata["tokenizer.ggml.tokens"]) - 1
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        ids = tokenizer.encode("no halt here, halt", special=False, add_bos=False)
        assert halt not in ids and tokenizer.decode(ids) == "no halt here, halt"


def test_empty_tokens_are_told_apart() -> None:
    for metadata in (small_metadata(["", "", "<x>"], [5, 5, 3]), with_empty_tokens(sentencepiece_metadata("bpe"))):
        tokenizer = tokenizer_from_gguf(metadata)
        at = metadata["tokenizer.ggml.tokens"].index("")
        assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"]) and tokenizer.decode([at, at + 1]) == ""
        for _ in range(2):  # in Python, then by the native engine
            assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
            native_only(tokenizer)


def with_empty_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    more = {"tokens": ["", ""], "scores": np.zeros(2, np.float32), "token_type": np.array([5, 5], np.int32)}
    joined = {
        key: value + metadata[key] if isinstance(value, list) else np.append(metadata[key], value)
        for key, value in ((f"tokenizer.ggml.{name}", value) for name, value in more.items())
    }
    joined["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "", ""]
    return metadata | joined


def test_ends_that_a_file_lists() -> None:
    metadata = byte_level_metadata("gpt-2")
    usual = tokenizer_from_gguf(metadata).eos_ids
    listed = tokenizer_from_gguf(metadata | {"tokenizer.ggml.eos_token_ids": [5, 7, 10**9, -1]})
    assert {5, 7} - usual and listed.eos_ids == usual | {5, 7}
    for wrong in ("5", [1.5], [True], ["x"]):
        with pytest.raises(ModelError, match="eos_token_ids is not a list of token ids"):
            tokenizer_from_gguf(metadata | {"tokenizer.ggml.eos_token_ids": wrong})


@pytest.mark.parametrize("value", [2**32 - 1, -1, 258])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "unknown", "fim_pad"])
def test_a_special_id_out_of_range_is_left_out_with_a_note(name: str, value: int) -> None:
    tokenizer = tokenizer_from_gguf(small_metadata(["</s>"], [3], **{f"{name}_token_id": value}))
    assert tokenizer.eos_ids == {257} and tokenizer.bos_id is None and tokenizer.encode("he") == [256]
    assert tokenizer.notes == (f"tokenizer.ggml.{name}_token_id {value} is left out: the model has 258 tokens",)
    begins = small_metadata(["</s>"], [3], **{f"{name}_token_id": value, "add_bos_token": True})
    if name == "bos":
        assert tokenizer_from_gguf(begins).encode("he") == [256]
    else:
        with pytest.raises(ModelError, match="bos_token_id is missing"):
            tokenizer_from_gguf(begins)


PHI3 = ["<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    "architecture, name, strips",
    [
        ("phi3", "", True),
        ("phi3", "Phi 3.5 Mini Instruct", True),
        ("llama", "Phi-3-mini, llamafied", True),
        ("llama", "Mistral", False),
    ],
)
def test_special_tokens_of_phi_3_take_the_white_space_after_them(architecture: str, name: str, strips: bool) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Native

    metadata = sentencepiece_metadata("bpe")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *PHI3]
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], np.zeros(4, np.float32))
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [3, 4, 3, 3])
    metadata |= {"general.architecture": architecture, "general.name": name}
    reference = Native.from_str(tokenizer_from_gguf(sentencepiece_metadata("bpe")).to_json())
    reference.add_special_tokens([AddedToken(text, rstrip=strips, normalized=False) for text in PHI3[:3]])
    reference.add_special_tokens([AddedToken(PHI3[3], normalized=False)])
    for tokenizer in (tokenizer_from_gguf(metadata), native_only(tokenizer_from_gguf(metadata))):
        for text in ("<|user|>\nhello<|end|>\n<|assistant|>\n", "<|end|> \t\n the<|endoftext|>\n the", "<s>\nhello"):
            assert tokenizer.encode(text, add_bos=False) == reference.encode(text, add_special_tokens=False).ids
        assert size in tokenizer.encode("<|user|>\nhello") and size not in tokenizer.encode(PHI3[0], special=False)


# ---------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_decoding_gives_the_text_back(pre: str) -> None:
    tokenizer, reference = tokenizer_from_gguf(byte_level_metadata(pre)), oracle(pre)
    for text in [*HARD, *CORPUS]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids)
        if pre == "smollm":  # qwen2 composes characters first
            assert tokenizer.decode(ids, skip_special=False) == valid(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-3, 760), max_size=40), st.booleans(), st.sampled_from(["gpt-2", "spm", "spm-no-prefix"]))
def test_a_stream_adds_up_to_the_decoded_text(ids: list[int], skip: bool, kind: str) -> None:
    tokenizer = streaming_tokenizer(kind)
    stream = tokenizer.stream(skip)
    for _ in range(2):  # the second time after a flush
        pieces = [stream.push(at) for at in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special=skip)


@cache
def streaming_tokenizer(kind: str) -> Tokenizer:
    if kind == "gpt-2":
        return tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    return tokenizer_from_gguf(sentencepiece_metadata("bpe", prefix=kind == "spm"))


@pytest.mark.parametrize("kind", ["gpt-2", "spm"])
def test_a_stream_never_splits_a_character(kind: str) -> None:
    tokenizer = streaming_tokenizer(kind)
    for text in HARD:
        text = valid(text).replace("\ufffd", "")
        stream = tokenizer.stream(skip_special=False)
        for at in tokenizer.encode(text, special=False, add_bos=False):
            assert "\ufffd" not in stream.push(at)
            assert len(stream._decoder.getstate()[0]) <= 3, "more is held back than a character's first bytes"
        assert stream.flush() == ""


SPACED = ["▁▁", "▁▁▁", "<0xC3>", "<0xA9>", "▁<tag>", "plain"]


@pytest.mark.parametrize("kind", ["replace", "metaspace", "bytes"])
@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_of_a_folder_go_through_its_decoder(kind: str, special: bool, tmp_path: Path) -> None:
    """Gemma's runs of spaces are added tokens: the indentation of code."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Native

    native = Native(models.BPE({"a": 0, "▁": 1, "</s>": 2, "Ġ": 3, "©": 4}, []))
    native.normalizer = normalizers.Replace(" ", "▁")
    native.decoder = {
        "replace": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "never"), decoders.Fuse()]),
        "bytes": decoders.ByteLevel(),
    }[kind]
    native.add_tokens([AddedToken(text, special=special) for text in SPACED])
    native.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    ids = {text: native.token_to_id(text) for text in ("a", "©", *SPACED)}
    random = np.random.default_rng(7)
    character = [ids["<0xC3>"], ids["<0xA9>"]]
    choices = [character, *([ids[text]] for text in ids if not text.startswith("<0x"))]
    sequences = [[ids["a"], ids["▁▁"], ids["a"]]]
    drawn = random.integers(0, len(choices), (20, 9)).tolist()
    sequences += [[token for at in row for token in choices[at]] for row in drawn]
    for sequence in sequences:
        wanted = native.decode(sequence, skip_special_tokens=False)
        assert tokenizer.decode(sequence, skip_special=False) == wanted
        stream = tokenizer.stream(skip_special=False)
        assert "".join(map(stream.push, sequence)) + stream.flush() == wanted
    assert tokenizer.token_bytes(ids["<0xC3>"]) == (b"<0xC3>" if kind == "bytes" else b"\xc3")
    assert (ids["▁▁"] in tokenizer.special_ids) == special and tokenizer.encode("plain") == [ids["plain"]]


@pytest.mark.parametrize("step", [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}, None])
def test_a_decoder_of_another_sign_for_a_space_is_refused(step: dict[str, Any] | None, tmp_path: Path) -> None:
    data = json.loads(byte_level_json("smollm"))
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": False}
    data["decoder"] = {"type": "Sequence", "decoders": [step or metaspace, {"type": "Fuse"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="another sign"):
        tokenizer_from_folder(tmp_path)


def test_random_bytes_decode_as_in_transformers() -> None:
    tokenizer, reference = tokenizer_from_gguf(byte_level_metadata("gpt-2")), oracle("gpt-2")
    random = np.random.default_rng(5)
    for _ in range(50):
        ids = random.integers(0, tokenizer.vocab_size, 30).tolist()
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


# ---------------------------------------------------------------------------------------------------- what it waits for


def test_a_short_prompt_waits_for_no_library() -> None:
    program = (
        "import json, sys; from powerinfer.text.tokenizer_gguf import tokenizer_from_gguf\n"
        "tokenizer = tokenizer_from_gguf(json.load(sys.stdin)); ids = tokenizer.encode('<|im_start|>hello world 12')\n"
        "assert tokenizer.decode(ids) == 'hello world 12'; print('tokenizers' in sys.modules)"
    )
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(metadata),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------------------------------------------ malformed files

G = "tokenizer.ggml."
BYTE_LEVEL_DAMAGE: dict[str, dict[str, Any]] = {
    "no model": {G + "model": None},
    "unknown model": {G + "model": "plamo2"},
    "model of another type": {G + "model": 7},
    "no tokens": {G + "tokens": None},
    "empty tokens": {G + "tokens": []},
    "tokens not a list": {G + "tokens": "abc"},
    "tokens not strings": {G + "tokens": [1, 2, 3]},
    "tokens an array": {G + "tokens": np.arange(4)},
    "no pre-tokenizer": {G + "pre": None},
    "unknown pre-tokenizer": {G + "pre": "made-up"},
    "pre-tokenizer of another type": {G + "pre": 3},
    "no merges": {G + "merges": None},
    "merges not strings": {G + "merges": [["a", "b"]]},
    "a merge without a space": {G + "merges": ["ab"]},
    "a merge with two spaces": {G + "merges": ["a b c"]},
    "types of another length": {G + "token_type": [1, 1, 1]},
    "types of another kind": {G + "token_type": "x"},
    "types of ragged lists": {G + "token_type": [[1], [1, 2]]},
    "eos a string": {G + "eos_token_id": "</s>"},
    "eos a boolean": {G + "eos_token_id": True},
    "add_bos of another type": {G + "add_bos_token": "yes"},
    "add_bos without bos": {G + "add_bos_token": True, G + "bos_token_id": None},
    "template of another type": {"tokenizer.chat_template": 3},
}


def damaged(metadata: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**metadata, **change}.items() if value is not None}


def assert_one_line(error: ModelError) -> None:
    assert len(str(error).splitlines()) == 1 and len(str(error)) < 400


@pytest.mark.parametrize("change", BYTE_LEVEL_DAMAGE.values(), ids=BYTE_LEVEL_DAMAGE)
def test_malformed_byte_level_metadata_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(damaged(byte_level_metadata("llama-bpe"), change))
    assert_one_line(caught.value)


SCORED_DAMAGE: dict[str, dict[str, Any]] = {
    "no scores": {G + "scores": None},
    "scores of another length": {G + "scores": np.zeros(3, np.float32)},
    "scores of another kind": {G + "scores": ["a"] * 650},
    "scores not finite": {G + "scores": np.full(650, np.nan, np.float32)},
    "byte pieces of another spelling": {G + "token_type": np.full(650, 6, np.int32)},
}


@pytest.mark.parametrize("data", [b"x", b"\0" * 40, b"\x40\0\0\0" + b"\0" * 40, b"\x03\0\0\0" + b"\0" * 40])
def test_a_malformed_table_of_replacements_is_refused(data: bytes) -> None:
    metadata = {**sentencepiece_metadata("unigram"), G + "precompiled_charsmap": np.frombuffer(data, np.uint8)}
    with pytest.raises(ModelError, match="charsmap"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("change", SCORED_DAMAGE.values(), ids=SCORED_DAMAGE)
def test_malformed_scored_metadata_is_refused(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(damaged(sentencepiece_metadata(kind), change))
    assert_one_line(caught.value)


def test_duplicate_tokens_are_refused() -> None:
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.ggml.tokens"][400] = metadata["tokenizer.ggml.tokens"][7]
    with pytest.raises(ModelError, match="twice"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("text", ["ab", "ab" * 1000], ids=["python", "native"])
@pytest.mark.parametrize("merge", ["a b", "a  b", " ", "a nowhere"])
def test_a_merge_into_nothing_is_refused_when_it_is_met(merge: str, text: str) -> None:
    metadata = byte_level_metadata("smollm")
    assert "ab" in metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [
        "gone" if token == "ab" else token for token in metadata["tokenizer.ggml.tokens"]
    ]
    metadata["tokenizer.ggml.merges"] = [merge]
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(metadata).encode(text)
        tokenizer_from_gguf(metadata).encode("é" + text)
    assert_one_line(caught.value)


FOLDER_DAMAGE: dict[str, dict[str, Any]] = {
    "no tokenizer.json": {"tokenizer.json": None},
    "empty": {"tokenizer.json": ""},
    "not JSON": {"tokenizer.json": "{"},
    "of another shape": {"tokenizer.json": "[]"},
    "nested": {"tokenizer.json": "[" * 100_000},
    "config not JSON": {"tokenizer_config.json": "\x00"},
    "config not an object": {"tokenizer_config.json": "3"},
    "config nested": {"tokenizer_config.json": "[" * 100_000},
    "added tokens of another shape": {"tokenizer_config.json": '{"added_tokens_decoder": [1]}'},
    "added token without text": {"tokenizer_config.json": '{"added_tokens_decoder": {"3": {}}}'},
    "added token with a text for an id": {"tokenizer_config.json": '{"added_tokens_decoder": {"x": {"content": "y"}}}'},
    "added token with another id": {
        "tokenizer_config.json": '{"added_tokens_decoder": {"9999": {"content": "<new>"}}}'
    },
    "eos of another type": {"generation_config.json": '{"eos_token_id": "x"}'},
    "eos of nested lists": {"generation_config.json": '{"eos_token_id": [[1]]}'},
    "template of another type": {"chat_template.json": '{"chat_template": 3}'},
    "template not text": {"chat_template.jinja": b"\xff"},
}


@pytest.mark.parametrize("change", FOLDER_DAMAGE.values(), ids=FOLDER_DAMAGE)
def test_a_malformed_folder_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    oracle("smollm").save_pretrained(tmp_path)
    for name, content in change.items():
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError) as caught:
        tokenizer_from_folder(tmp_path)
    assert_one_line(caught.value)


def test_a_decoder_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    data = json.loads(byte_level_json("smollm"))
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="WordPiece"):
        tokenizer_from_folder(tmp_path)
