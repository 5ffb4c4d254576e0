"""llama.cpp's GBNF as a Lark grammar for llguidance, whose converter knows neither tokens nor all escapes.

A token is written <[1000]>, by its id, or <think>, by its text; !<[1000]> is any other token that ends no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from powerinfer.errors import RequestError
from powerinfer.text.grammar import MAX_RULES

_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(?s:.))")
_TOKEN = re.compile(
    r'(?s:"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|#[^\r\n]*'  # a text, a set of characters, a comment
    r"|(?P<other>!?)<(?:\[(?P<id>[0-9]{1,9})\]|(?P<name>[^\[\]\s<>][^<>\r\n]{0,255}))>"
)


def lark_of_gbnf(text: str, token_of: Callable[[str], int | None], size: int, ends: Collection[int]) -> str:
    """The same grammar in Lark. RequestError for a malformed grammar and for a token that the model does not have.

    token_of: the one token of a text. size: how many tokens the model has. ends: those that end an answer.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    prefix = "token-ref" + max(re.findall("token-ref(x*)", text), default="") + "x"
    names: dict[str, str] = {}  # of rules, by what they stand for in Lark

    def rule(match: re.Match[str]) -> str:
        if match["other"] is None:
            return match[0]
        token = token_of(f"<{match['name']}>") if match["id"] is None else int(match["id"])
        if token is None or token >= size:
            raise RequestError(f"{match[0].removeprefix('!')} is not one token of this model")
        tokens = sorted({token, *ends})
        meaning = f"<[^{','.join(map(str, tokens))}]>" if match["other"] else f"<[{token}]>"
        if token in ends and not match["other"]:
            meaning = '""'  # where the answer may end, its end is allowed
        return names.setdefault(meaning, f"{prefix}-{len(names)}")

    converted = _TOKEN.sub(rule, text)
    if len(names) > MAX_RULES:
        raise RequestError(f"it names more than {MAX_RULES} tokens")
    # A rule that refers to itself is none of those that the converter joins to one regular expression.
    rules = "".join(f"\n{name} ::= {name}" for name in names.values())
    lark = gbnf_to_lark(_ESCAPE.sub(_unescaped, converted + rules))
    for meaning, name in names.items():
        lark_name = name.replace("-", "_")
        lark = lark.replace(f"\n{lark_name}: {lark_name}\n", f"\n{lark_name}: {meaning}\n")
    return lark


def _unescaped(escape: re.Match[str]) -> str:
    """An escape of GBNF for a character beyond ASCII as that character: the converter does not know all of them."""
    code = int(escape[1] or escape[2] or escape[3] or "0", 16)
    if code < 0x80:
        return f"\\x{code:02x}" if code else escape[0]
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise RequestError(f"{escape[0]} is no character")
    return chr(code)
