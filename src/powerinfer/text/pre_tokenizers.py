"""Rules that split text into words before byte-level merges, by the name that a GGUF file has for them.

The names are llama.cpp's (`tokenizer.ggml.pre`). A name means what the model's own tokenizer does; where that is not
known, what llama.cpp does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Rules that split text into words before byte-level merges: the meaning of `tokenizer.ggml.pre`.

    patterns: Unicode regular expressions (classes inside brackets, for `bpe.ascii_words`). What the first one matches
    is split off, then what the next one matches in the pieces that are left, and so on.
    """

    patterns: tuple[str, ...]
    digits_alone: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a piece is not split
    add_bos: bool = False  # the default of files that do not state it


_GPT2 = PreTokenizer((r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|[\s]+(?![^\s])|[\s]+",))
_SMOLLM = PreTokenizer(_GPT2.patterns, digits_alone=True)
# Symbols that the tokenizers library counts as punctuation beside Unicode's.
_FALCON = PreTokenizer((r"[\p{P}$+<=>^`|~]+", *_GPT2.patterns, "[0-9][0-9][0-9]"))
_LLAMA3 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer((_LLAMA3.patterns[0].replace("{1,3}", ""),), nfc=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    nfc=True,
)
_TEKKEN = PreTokenizer(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|[\p{N}]| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_GPT4O = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
        r"|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_SEED = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_LETTERS = (  # those that have cases, as the first DeepSeek models count them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"[\s]?[{_LETTERS}]+",
        "[\\s]?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"[\s]+$",
        _HAN_AND_HANGUL,
        r"[\p{N}]",
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"[\s]?[\p{L}]+", r"[\s]?[\p{P}]+", _HAN_AND_HANGUL, r"[\p{N}]"))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"[\p{N}]{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_NO_HAN = r"(?:(?![\p{Han}])"
_KIMI_K2 = PreTokenizer(
    (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}])*"
        rf"{_NO_HAN}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}])+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}])+"
        rf"{_NO_HAN}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}])*{_CONTRACTIONS}?"
        r"|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    ignore_merges=True,
)
_MAIN = (  # a mark of punctuation goes with the letters after it
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
# Digits in threes from the right: what is left over goes first. Runs of digits are split off before, so that the end of
# a run is looked for once.
_THREES = (r"\A[\p{N}]{1,2}(?=(?:[\p{N}]{3})+\Z)", r"[\p{N}]{3}")
_DEFAULT = PreTokenizer((r"[\p{P}$+<=>^|~]+", *_GPT2.patterns, r"[\p{N}]+", "[0-9][0-9][0-9]"))
_BLOOM = PreTokenizer((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_CHAMELEON = PreTokenizer(
    (
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"[\p{N}]",
        r"[\p{P}!-/:-@\[-`{-~]",
        *_GPT2.patterns,
    ),
    add_bos=True,
)
_JAIS2 = PreTokenizer(
    (
        _LLAMA3.patterns[0].removesuffix(_SPACES)
        + r"[\s]*[\r\n]+"
        + "".join(rf"|[\s]{{{count}}}(?![^\s])" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|[\s]{1,2}(?![^\s])|[\s]",
    )
)
_YOUTU = PreTokenizer(
    (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _GPT4O.patterns[0].replace("{1,3}", ""),
    ),
    ignore_merges=True,
)
_SPARK = PreTokenizer((*_DEEPSEEK_V3.patterns[:2], rf"{_MAIN}|[\r\n]|[\s]+(?![^\s])|[\s]+", r"[\p{N}]"))
_AFMOE = PreTokenizer(
    (
        r"[\p{N}]+",
        *_THREES,
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK_V3.patterns[2],
    )
)
_TINY_AYA = PreTokenizer(
    (
        # a run of digits with which a word ends
        r"(?<![\p{Nd}])[\p{Nd}]+(?![\p{Nd}\p{L}\p{M}\p{Pc}])",
        *(pattern.replace(r"\p{N}", r"\p{Nd}") for pattern in _THREES),
        *_GPT4O.patterns,
    )
)
_BAILING = PreTokenizer((_QWEN2.patterns[0].replace(r"|[\s]*[\r\n]+|", r"|[\s]*[\r\n]|"),))
_EXAONE_MOE = PreTokenizer(
    (
        # words of one piece may have spaces in them
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}](?:[\p{{L}}\p{{M}}]| [\p{{L}}])*|[\p{{N}}]"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|[\s]*[\r\n]|[\s]+(?![^\s])|[\s]+",
    )
)
_MINICPM5 = PreTokenizer((r"[\p{N}]{1,3}", _LLAMA3.patterns[0].replace("{1,3}", "+")), ignore_merges=True)

_ROWS: tuple[tuple[PreTokenizer, str], ...] = (
    (_DEFAULT, "default"),
    (_GPT2, "gpt-2 gpt2 phi-2 mpt gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling"),
    (replace(_GPT2, nfc=True), "olmo"),  # GPT-NeoX's
    # refact: Granite 3
    (_SMOLLM, "smollm refact starcoder codeshell exaone minerva-7b mellum2"),
    (replace(_SMOLLM, nfc=True), "command-r"),
    (_FALCON, "falcon"),
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (PreTokenizer(_LLAMA3.patterns), "dbrx smaug-bpe chatglm-bpe"),  # dbrx: OLMo 2 and 3, Phi-4; smaug-bpe: SmolLM3
    (PreTokenizer(_LLAMA3.patterns, ignore_merges=True), "glm4 glm5"),
    (_JAIS2, "jais-2"),
    (_MINICPM5, "minicpm5"),
    (_QWEN2, "qwen2 deepseek-r1-qwen f2llmv2"),
    (replace(_QWEN2, nfc=False), "megrez kormo stablelm2 hunyuan solar-open grok-2"),
    (PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.patterns)), "laguna"),
    (PreTokenizer((_QWEN2.patterns[0].removeprefix(f"{_CONTRACTIONS}|"),)), "ufakzeka"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (_EXAONE_MOE, "exaone-moe"),
    (_QWEN35, "qwen35"),
    (_TEKKEN, "tekken"),
    (_GPT4O, "gpt-4o minimax-m2 llama4 kanana2 talkie"),  # the first is Phi-4-mini's, too
    (_TINY_AYA, "tiny_aya cohere2moe"),
    (_YOUTU, "youtu"),
    (_SEED, "seed-coder"),
    (_DEEPSEEK_LLM, "deepseek-llm"),  # DeepSeek-V2 too
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_SPARK, "spark2_5"),
    (_AFMOE, "afmoe"),
    (_KIMI_K2, "kimi-k2"),
    (_BLOOM, "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((*_BLOOM.patterns, r"[\p{N}]")), "viking"),
    (_CHAMELEON, "chameleon"),
    (PreTokenizer((r"[\p{N}]+", *_THREES)), "superbpe"),
)
PRE_TOKENIZERS = {name: row for row, names in _ROWS for name in names.split()}


def byte_level(vocab: dict[str, int], merges: Any, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """The library's tokenizer of byte-level merges: pieces by id in `vocab`, pairs of pieces in `merges`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    engine = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits_alone else []
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*digits, *splits, level])
    if pre.nfc:
        engine.normalizer = normalizers.NFC()
    return engine
