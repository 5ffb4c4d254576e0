"""Grammars: every answer that ends by itself matches; vocabularies of both kinds; schemas that mean harm."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from jsonschema import Draft202012Validator
from test_cli import error_line, powerinfer
from test_tokenizer import byte_level_metadata, oracle, sentencepiece_metadata
from toy_model import BOS, EOS, VOCAB, ToyExecutor, ToyTokenizer, toy_llm

from powerinfer.errors import PowerInferError, QueueFullError, RequestError
from powerinfer.runtime import grammar as module
from powerinfer.runtime.async_llm import MAX_COMPILING, AsyncLLM
from powerinfer.runtime.gbnf import lark_of_gbnf
from powerinfer.runtime.grammar import CompiledGrammar, GrammarMask, Grammars
from powerinfer.runtime.params import SamplingParams
from powerinfer.text.grammar import MAX_RULES, MAX_SOURCE, Grammar, response_format
from powerinfer.text.tokenizer import Tokenizer
from powerinfer.text.tokenizer_folder import tokenizer_from_folder
from powerinfer.text.tokenizer_gguf import tokenizer_from_gguf


def bits(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)


def random_tokens(mask: GrammarMask, tokenizer: Any, rng: np.random.Generator, limit: int) -> tuple[list[int], bool]:
    """Tokens at random among those allowed, the ends of strings and answers more often; and whether it ended."""
    ends = [at for at in range(tokenizer.vocab_size) if tokenizer.token_bytes(at) in (b'"', b"}", b"]")]
    tokens: list[int] = []
    for _ in range(limit):
        logits = rng.normal(0, 3, tokenizer.vocab_size)
        logits[[*tokenizer.eos_ids, *ends]] += 4
        logits[~bits(mask.allowed(), tokenizer.vocab_size)] = -np.inf
        assert np.isfinite(logits).any()
        tokens.append(
            int(rng.choice(len(logits), p=np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()))
        )
        if mask.accept(tokens[-1]):
            return tokens, True
    return tokens, False


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ToyTokenizer())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ schemas

TYPICAL: list[Any] = [
    {"type": "object"},
    {"type": "array"},
    True,
    {},
    {"const": {"a": [1, None, "é\n"]}},
    {"enum": ["red", "green", 3, None, [1], {"x": "y"}]},
    {"type": ["string", "null", "integer"], "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}$"},
    {"type": "string", "pattern": "ab"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 17},
    {"type": "number", "minimum": 0.25, "maximum": 1.5},
    {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"a": {"minimum": 3, "maximum": 40}}}]},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {"oneOf": [{"type": "object", "properties": {"t": {"const": t}}, "additionalProperties": False, "required": ["t"]}
               for t in "ab"]},
    {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [
        {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}},
     "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0},
     "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}},
     "required": ["name", "age"], "additionalProperties": False},
]  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the keywords that can be enforced, with constraints that leave something to choose."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": rng.choice(["null", "boolean"])},
        lambda: {"type": "integer", **_limits(rng, lambda: rng.randint(-1000, 1000))},
        lambda: {"type": "number", **_limits(rng, lambda: round(rng.uniform(-99, 99), 2))},
        lambda: {"enum": [rng.choice(["a", 'q"\\', 1, -2.5, None, False, "€", ["x"]]) for _ in range(3)]},
        lambda: {"const": rng.choice(["k", 0, 12.75, True, None, {"z": []}])},
        lambda: {"type": "string", "minLength": (least := rng.randint(0, 3)), "maxLength": least + rng.randint(0, 5)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-c]+$", "^\\w{1,4}$", "x|yy", "^(\\d\\d){1,3}$", "^.$"])},
    ]
    if depth:
        kinds += [
            lambda: random_object(rng, depth - 1),
            lambda: {"type": "array", "items": random_schema(rng, depth - 1), "minItems": (least := rng.randint(0, 2)),
                     "maxItems": least + rng.randint(0, 2)},
            lambda: {"type": "array", "prefixItems": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))],
                     "items": rng.choice([False, {"type": "boolean"}]), "maxItems": 4},
            lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]},
        ]  # fmt: skip
    return rng.choice(kinds)()


def _limits(rng: random.Random, number: Callable[[], float]) -> dict[str, float]:
    low, high = sorted((number(), number()))
    names = (rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"]))
    return {name: value for name, value in zip(names, (low, high + 2), strict=True) if rng.random() < 0.7}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b", "long name", 'quo"te', "ünï", "x_1", "$ref2"], rng.randint(0, 4))
    more = rng.choice([False, False, {"type": "integer"}])
    schema = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    return {**schema, "required": [name for name in names if rng.random() < 0.6], "additionalProperties": more}


def test_every_answer_that_ends_is_valid(grammars: Grammars) -> None:
    """Random weights make hard cases: what a trained model would hardly write is as likely as the rest."""
    source, rng = random.Random(7), np.random.default_rng(7)
    schemas = TYPICAL + [random_schema(source) for _ in range(230)]
    endings = 0
    for schema in schemas:
        compiled, check = grammars.compile(Grammar.json_schema(schema)), Draft202012Validator(schema)
        tokens, ended = random_tokens(compiled.mask(), ToyTokenizer(), rng, 60)
        if ended:
            endings += 1
            check.validate(json.loads(bytes(token for token in tokens if token < 256)))
    assert endings > 100


def test_answers_of_an_engine_are_valid() -> None:
    source = random.Random(8)
    schemas = TYPICAL + [random_schema(source) for _ in range(60)]
    with toy_llm(ToyExecutor(n_pages=512)) as llm:
        params = [SamplingParams(120, temperature=1, seed=at, json_schema=one) for at, one in enumerate(schemas)]
        answers = llm.generate(["Say JSON"] * len(schemas), params)
    ended = [(schema, one.text) for schema, one in zip(schemas, answers, strict=True) if one.finish_reason == "stop"]
    for schema, text in ended:
        Draft202012Validator(schema).validate(json.loads(text))
    assert len(ended) > 20


def test_what_a_mask_has_is_allowed_token_by_token(grammars: Grammars) -> None:
    """And more only where the mask has nothing but the tokens that the model expects."""
    rng = np.random.default_rng(2)
    for schema in TYPICAL:
        mask = grammars.compile(Grammar.json_schema(schema)).mask()
        for _ in range(12):
            allowed = bits(mask.allowed(), VOCAB)
            assert [mask.allows(token) for token in range(VOCAB)] == allowed.tolist()
            if mask.accept(int(rng.choice(np.flatnonzero(allowed)))):
                break


def test_what_is_valid_is_allowed(grammars: Grammars) -> None:
    person = Grammar.json_schema(TYPICAL[-1])
    texts = ['{"name":"Ada","age":36}', '{\n  "name": "A\\ta\\n", "age": 0, "tags": ["x", "y"]\n}']
    wrong = ['{"age":36,"name":"Ada"}', '{"name":"Ada","age":-1}', '{"name":"Ada","age":3,"b":1}', '{"name":"Ada" }']
    for text in texts + wrong:
        mask = grammars.compile(person).mask()
        assert (mask.accept_bytes(text.encode()) and mask.complete) == (text in texts), text


UNSUPPORTED = {
    "not": {"not": {"type": "string"}},
    "if, then": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "file:///etc/passwd": {"$ref": "file:///etc/passwd"},
    "http://localhost/x.json": {"$ref": "http://localhost/x.json"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "schema is false": {"$ref": "#/$defs/a", "$defs": {"a": False}},
    "matches no text": {"$ref": "#"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_enforced_is_refused_by_name(grammars: Grammars, name: str) -> None:
    schema = UNSUPPORTED[name]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=re.escape(name)) as caught:
            grammars.compile(Grammar.json_schema(schema))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_schema_cannot_switch_its_own_enforcement_off(grammars: Grammars) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        grammars.compile(Grammar.json_schema(schema))


# ------------------------------------------------------------------------------------------------------- vocabularies


def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    oracle("qwen2").save_pretrained(folder)
    return {
        "byte-level": tokenizer_from_gguf(byte_level_metadata("llama-bpe")),
        "folder": tokenizer_from_folder(folder),
        "scored": tokenizer_from_gguf(sentencepiece_metadata("bpe")),
        "scored, no prefix": tokenizer_from_gguf(sentencepiece_metadata("bpe", prefix=False)),
    }


GBNF = r"""
root  ::= greet " " name ("!" | "?"){1,2}
greet ::= "Hello" | "Salut" | [\u00e9-\u00eb]+
name  ::= [A-Z] [a-z]*
"""
TEXTS: dict[str, tuple[Grammar, str]] = {
    "regex": (Grammar.regex(r"[a-h]{2,4} (the|then)\n[0-9]+"), r"[a-h]{2,4} (the|then)\n[0-9]+"),
    "leading space": (Grammar.regex(" the|  x| "), " the|  x| "),
    "space or not": (Grammar.regex(" ?the"), " ?the"),
    "characters of several bytes": (Grammar.regex("[あ-ん👍ß]{1,5}"), "[あ-ん👍ß]{1,5}"),
    "choice": (Grammar.choice(["the fox", "them", 'a "b"\\', "é\n"]), r'the fox|them|a "b"\\|é\n'),
    "gbnf": (Grammar.gbnf(GBNF), "(Hello|Salut|[é-ë]+) [A-Z][a-z]*[!?]{1,2}"),
    "lark": (Grammar.gbnf("%llguidance {}\nstart: A{2,3} | \"b\"\nA: /ab?/"), "(ab?){2,3}|b"),
    "json": (Grammar.json_schema({"type": "array", "items": {"enum": ["a", "the"]}, "maxItems": 2}), ".*"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["byte-level", "folder", "scored", "scored, no prefix"])
def test_texts_match_in_every_vocabulary(kind: str, tmp_path: Path) -> None:
    """Also the space that SentencePiece's decoding drops is taken into account."""
    tokenizer = tokenizers(tmp_path)[kind]
    grammars, rng = Grammars(tokenizer, tokenizer.vocab_size + 40), np.random.default_rng(1)
    for name, (grammar, pattern) in TEXTS.items():
        endings = set()
        for _ in range(8):
            mask = grammars.compile(grammar).mask()
            assert len(mask.allowed()) == -(-(tokenizer.vocab_size + 40) // 32)
            assert not bits(mask.allowed(), tokenizer.vocab_size + 40)[tokenizer.vocab_size :].any()
            tokens, ended = random_tokens(mask, tokenizer, rng, 60)
            assert not (tokenizer.special_ids - tokenizer.eos_ids).intersection(tokens)
            if ended:
                text = tokenizer.decode(tokens)
                stream = tokenizer.stream()
                assert text == "".join(map(stream.push, tokens)) + stream.flush()
                assert re.fullmatch(pattern, text, re.DOTALL), (name, text)
                endings.add(text)
                if name == "json":
                    Draft202012Validator(json.loads(grammar.text)).validate(json.loads(text))
        assert endings, name


TOKENS: dict[str, tuple[str, list[str], list[str]]] = {
    # a grammar, where 64 is the token a; tokens that fit, and tokens that do not
    "an id": ('root ::= <[64]> "e"', ["a e"], ["b e", "a a"]),
    "a text": ("root ::= <|begin|> [a-z]+ <tool>", ["<|begin|> a b <tool>"], ["a", "<|begin|> <tool>"]),
    "others": ("root ::= <tool> x* <tool>\nx ::= !<tool>", ["<tool> a <|begin|> 1 <tool>", "<tool> <tool>"], ["a"]),
    "no end": ("root ::= !<tool>+ <tool>", ["a <|begin|> <tool>"], ["<|end|>", "a <|im_end|>", "<tool>"]),
    "other than an id": ('root ::= !<[64]>{2} "x"', ["b c x", "b <|begin|> x"], ["a b x", "b a x", "b b b"]),
    "either": ("root ::= (<[64]> | <tool> # <b>\n)+ [<>]", ["a <tool> a <", "<tool> >"], ["<", "a b"]),
    "no tokens": ('root ::= "<[64]>" [^<a>] # <tool>', ["< [ 6 4 ] > b"], ["a b", "< [ 6 4 ] > a"]),
    "a name like ours": ("root ::= token-ref-0 <tool>\ntoken-ref-0 ::= [a]", ["a <tool>"], ["<tool>", "a a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_in_gbnf(name: str) -> None:
    source, fit, unfit = TOKENS[name]
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    compiled = Grammars(tokenizer)

    def fits(tokens: str) -> bool:
        mask = compiled.mask(Grammar.gbnf(source))
        for text in tokens.split():
            (token,) = tokenizer.encode(text)
            if not bits(mask.allowed(), tokenizer.vocab_size)[token]:
                return False
            assert mask.allows(token)
            mask.accept(token)
        return True

    assert tokenizer.encode("a") == [64]
    assert [fits(tokens) for tokens in fit] == [True] * len(fit)
    assert [fits(tokens) for tokens in unfit] == [False] * len(unfit)


def test_names_like_ours_in_gbnf_take_no_time() -> None:
    begin = time.process_time()
    lark_of_gbnf('root ::= "a" <think> # token-ref' + "x" * 100_000, lambda text: 5, 100, [1])
    assert time.process_time() - begin < 3.0


def test_an_end_token_in_gbnf_is_where_the_answer_may_end() -> None:
    compiled = Grammars(tokenizer := tokenizer_from_gguf(byte_level_metadata("gpt-2")))
    mask = compiled.mask(Grammar.gbnf("root ::= [a] <|im_end|> | [b] [c]*"))
    assert mask.accept(tokenizer.encode("a")[0]), "nothing may follow"
    mask = compiled.mask(Grammar.gbnf("root ::= [b] ([c] | <|im_end|>)*"))
    assert not mask.accept(tokenizer.encode("b")[0])
    assert set(bits(mask.allowed(), tokenizer.vocab_size).nonzero()[0]) == {*tokenizer.eos_ids, *tokenizer.encode("c")}


@pytest.mark.parametrize("token", ["<[99999]>", "!<[707]>", "<nothing like it>", "<tool"])
def test_tokens_in_gbnf_that_the_model_does_not_have(token: str) -> None:
    compiled = Grammars(tokenizer_from_gguf(byte_level_metadata("gpt-2")))
    message = "is not one token of this model" if ">" in token else "not supported"
    with pytest.raises(RequestError, match=message) as caught:
        compiled.compile(Grammar.gbnf(f"root ::= {token}"))
    assert len(str(caught.value).splitlines()) == 1


def test_the_first_token_may_have_the_space_that_decoding_drops() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata("bpe"))
    grammars = Grammars(tokenizer)
    spaced, the = tokenizer.encode("the", add_bos=False), grammars.compile(Grammar.regex("the|quick"))
    assert tokenizer.token_bytes(spaced[0]) == b" the"
    mask = the.mask()
    assert bits(mask.allowed(), tokenizer.vocab_size)[spaced[0]]
    mask.accept(spaced[0])
    assert mask.complete
    mask = grammars.compile(Grammar.regex("a the| the")).mask()
    assert not bits(mask.allowed(), tokenizer.vocab_size)[spaced[0]]
    assert not mask.accept(tokenizer.encode("a", add_bos=False)[0])
    assert bits(mask.allowed(), tokenizer.vocab_size)[spaced[0]]
    with pytest.raises(RequestError, match="does not fit the grammar"):
        mask.accept(tokenizer.encode("dog", add_bos=False)[0])


def test_a_vocabulary_that_cannot_spell_every_text_is_refused() -> None:
    grammars = Grammars(tokenizer_from_gguf(sentencepiece_metadata("unigram")))
    with pytest.raises(RequestError, match="cannot spell every text"):
        grammars.compile(Grammar.json_object())


def test_a_vocabulary_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are not looked at again for every request."""
    grammars, prepare = Grammars(tokenizer_from_gguf(sentencepiece_metadata("unigram"))), module._Vocabulary
    prepared: list[Any] = []

    def counted(*args: Any) -> Any:
        prepared.append(args)
        return prepare(*args)

    monkeypatch.setattr(module, "_Vocabulary", counted)
    for text in "abc":
        with pytest.raises(RequestError, match="cannot spell every text"):
            grammars.compile(Grammar.regex(text))
    assert len(prepared) == 1


@pytest.mark.parametrize("size", [288, 300, 320])
def test_a_model_without_an_end_token_ends_where_the_grammar_does(size: int) -> None:
    """Its mask has no bit for the end, also where the vocabulary fills the mask's last word."""
    tokenizer = ToyTokenizer()
    tokenizer.eos_ids = frozenset()
    grammars = Grammars(tokenizer, size)  # type: ignore[arg-type]
    mask = grammars.compile(Grammar.regex("ab?")).mask()
    assert np.flatnonzero(bits(mask.allowed(), 320)).tolist() == [ord("a")] and len(mask.allowed()) == -(-size // 32)
    assert not mask.accept(ord("a"))
    assert np.flatnonzero(bits(mask.allowed(), 320)).tolist() == [ord("b")] and len(mask.allowed()) == -(-size // 32)
    assert mask.accept(ord("b"))
    with pytest.raises(RequestError, match="matches no text"):
        grammars.compile(Grammar.regex("(|)"))


def test_a_failure_of_the_compiler_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(grammar: Grammar) -> str:
        raise ValueError("Invalid\nbuffer")

    grammars = Grammars(ToyTokenizer())  # type: ignore[arg-type]
    monkeypatch.setattr(CompiledGrammar, "fill", lambda *args: fails(args[0]))
    with pytest.raises(PowerInferError, match="regular expression cannot be compiled: ValueError: Invalid buffer"):
        grammars.compile(Grammar.regex("a"))
    monkeypatch.undo()
    assert grammars.compile(Grammar.regex("a")).mask().accept_bytes(b"a"), "the failure was not kept"


def test_a_special_token_without_a_text_is_not_allowed_with_another(grammars: Grammars) -> None:
    mask = grammars.compile(Grammar.lark(f'start: "a" (<[{BOS}]> "a")*')).mask()
    assert not mask.accept(ord("a"))
    assert np.flatnonzero(bits(mask.allowed(), VOCAB)).tolist() == [BOS, EOS]
    mask = grammars.compile(Grammar.lark(f'start: "a" (<[{EOS}]> "a")* "."')).mask()
    assert not mask.accept(ord("a"))
    assert np.flatnonzero(bits(mask.allowed(), VOCAB)).tolist() == [ord("."), EOS]


def test_the_end_is_allowed_where_the_text_matches(grammars: Grammars) -> None:
    mask = grammars.compile(Grammar.regex("a+")).mask()
    assert not bits(mask.allowed(), VOCAB)[EOS]
    assert not mask.accept(ord("a"))
    assert bits(mask.allowed(), VOCAB)[EOS] and bits(mask.allowed(), VOCAB)[ord("a")]
    assert mask.accept(EOS)


# -------------------------------------------------------------------------------------------------------------- limits


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(keyword: str, depth: int) -> dict[str, Any]:
    """A schema that names 2^depth others."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for at in range(1, depth + 1):
        one = {"$ref": f"#/$defs/d{at - 1}"}
        defs[f"d{at}"] = {"properties": {"a": one, "b": one}} if keyword == "properties" else {keyword: [one, one]}
    return {"$defs": defs, "$ref": f"#/$defs/d{depth}"}


options = {"anyOf": [{"type": "object", "properties": {f"k{at}": {"const": at}}} for at in range(40)]}
BOMBS: dict[str, Callable[[], Grammar]] = {
    "deep nesting": lambda: Grammar.json_schema(nested(65)),
    "deeper nesting": lambda: Grammar.json_schema('{"items":' * 100_000 + "{}" + "}" * 100_000),
    "long source": lambda: Grammar.regex("a" * (MAX_SOURCE + 1)),
    "many values": lambda: Grammar.json_schema({"enum": [f"v{at}" for at in range(12_000)]}),
    "many properties": lambda: Grammar.json_schema({"properties": {f"p{at}": {"minLength": at} for at in range(5000)}}),
    "doubling allOf": lambda: Grammar.json_schema(doubling("allOf", 20)),
    "doubling anyOf": lambda: Grammar.json_schema(doubling("anyOf", 20)),
    "doubling properties": lambda: Grammar.json_schema(doubling("properties", 20)),
    "products": lambda: Grammar.json_schema({"allOf": [options] * 6}),
    "multipleOf": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 999_999_937}),
    "counts": lambda: Grammar.json_schema({"type": "array", "minItems": 10**9, "items": nested(3)}),
    "huge counts": lambda: Grammar.json_schema({"type": "string", "minLength": 10**18}),
    "nested counts": lambda: Grammar.regex("((a{1,1000}){1,1000}){1,1000}"),
    "alternatives": lambda: Grammar.regex("(" + "|".join(f"a{{{at}}}b" for at in range(1, 3000)) + ")*"),
    "unbalanced": lambda: Grammar.regex("(" * 50_000),
    "deep groups": lambda: Grammar.regex("(" * 5000 + "a" + ")" * 5000),
    "endless rule": lambda: Grammar.lark("start: start"),
    "ambiguous": lambda: Grammar.lark('start: x x x x x x x x\nx: x x | "a"? | y\ny: x y? | '),
    "deep gbnf": lambda: Grammar.gbnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "many rules": lambda: Grammar.gbnf("\n".join(f"r{at} ::= r{at + 1}" for at in range(MAX_RULES + 1))),
    "rules in bad order": lambda: Grammar.gbnf(
        "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(498)) + '\nr498 ::= "a"'
    ),
    "not JSON": lambda: Grammar.json_schema("{"),
    "not a schema": lambda: Grammar.json_schema([]),
    "infinity": lambda: Grammar.json_schema({"const": float("inf")}),
    "keys that are no text": lambda: Grammar.json_schema({"const": {(1, 2): 3}}),
    "no choice": lambda: Grammar.choice([]),
    "empty": lambda: Grammar.regex(" "),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_compiled_quickly_or_refused_in_one_line(grammars: Grammars, name: str) -> None:
    begin = time.thread_time()
    try:
        tokens, _ = random_tokens(grammars.compile(BOMBS[name]()).mask(), ToyTokenizer(), np.random.default_rng(0), 40)
    except RequestError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert tokens
    assert time.thread_time() - begin < module.COMPILE_SECONDS
    # the next one does not wait behind it
    assert grammars.compile(Grammar.regex("a|" + name)).mask().accept_bytes(b"a")


def test_thousands_of_schemas_take_bounded_memory() -> None:
    limit = 2 << 20
    grammars = Grammars(ToyTokenizer(), cache_bytes=limit)  # type: ignore[arg-type]
    begin = 0
    for at in range(2_500):
        # as `compile` does, but without the change of threads, which takes longer than the rest
        compiled = grammars._build(grammars._vocabulary, Grammar.json_schema({"const": at}))
        assert isinstance(compiled, CompiledGrammar) and grammars.nbytes <= limit
        assert compiled.mask().accept_bytes(str(at).encode())
        if at == 200:
            begin = psutil.Process().memory_info().rss
    assert psutil.Process().memory_info().rss - begin < 4 * limit
    assert 2 < len(grammars._cache._entries) < 10
    for at in range(300):  # an error is kept too, so that its schema is not compiled again
        assert isinstance(grammars._build(grammars._vocabulary, Grammar.json_schema({"not": {"const": at}})), str)
    assert grammars.nbytes <= limit


def test_the_estimate_of_a_grammar_is_from_above() -> None:
    """What 150 grammars of three kinds take, in a process that has compiled before, is less than is counted."""
    kept: list[CompiledGrammar] = []
    grammars = Grammars(ToyTokenizer(), cache_bytes=1 << 30)  # type: ignore[arg-type]
    kinds: list[Callable[[int], Any]] = [
        lambda at: {"properties": {f"a{at}_{n}": {"pattern": f"^[a-z]{{{n},50}}$"} for n in range(1, 30)}},
        lambda at: {"enum": [f"v{at}_{n}" for n in range(300)]},
        lambda at: {"anyOf": [{"type": "number", "minimum": at + n, "maximum": at + n * 10.5} for n in range(20)]},
    ]
    for kind in kinds:
        grammars.compile(Grammar.json_schema(kind(1000)))
        begin, counted = psutil.Process().memory_info().rss, grammars.nbytes
        for at in range(50):
            kept.append(grammars.compile(Grammar.json_schema(kind(at))))
            random_tokens(kept[-1].mask(), ToyTokenizer(), np.random.default_rng(at), 10)
        assert psutil.Process().memory_info().rss - begin < grammars.nbytes - counted


def test_states_that_multiply_end_the_request_and_not_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 2000)
    multiplying = Grammar.regex("(a|b)*a(a|b){20}c")  # its states are the last 21 letters
    first = grammars.compile(multiplying)
    mask, rng = first.mask(), random.Random(1)
    with pytest.raises(RequestError, match="too complex"):
        for _ in range(20_000):
            mask.allowed()
            mask.accept(rng.choice(b"ab"))
    assert first.nbytes > module.GRAMMAR_BYTES + module.BYTES_PER_CHARACTER * len(multiplying.text)
    again = grammars.compile(multiplying)
    assert again is not first and again.mask().allowed().any()


def test_compiling_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(ToyTokenizer())  # type: ignore[arg-type]
    grammars.compile(Grammar.regex("warm"))
    build, slow, late = grammars._build, Grammar.regex("slow"), threading.Event()

    def sleepy(vocabulary: Any, grammar: Grammar) -> Any:
        if grammar == slow:
            late.wait(60)
        return build(vocabulary, grammar)

    monkeypatch.setattr(grammars, "_build", sleepy)
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"regular expression takes longer than 0\.05 s to compile: simplify it"):
        grammars.compile(slow)
    with pytest.raises(RequestError, match="too many others"):
        grammars.compile(Grammar.regex("behind it"))
    late.set()
    monkeypatch.setattr(module, "COMPILE_SECONDS", 30)
    assert grammars.compile(Grammar.regex("behind it")) is grammars.compile(Grammar.regex("behind it"))
    assert grammars.compile(slow).mask().accept_bytes(b"slow"), "its result was kept"


# ---------------------------------------------------------------------------------------------------------- the engine


def test_an_answer_matches_and_ends_where_nothing_may_follow() -> None:
    with toy_llm() as llm:
        assert llm.generate("x", SamplingParams(choice=["yes", "no"], temperature=0)).finish_reason == "stop"
        for seed in range(5):
            params = SamplingParams(64, regex="(ab|c){3}d", seed=seed, temperature=1.5, ignore_eos=True)
            answer = llm.generate("x", params)
            assert re.fullmatch("(ab|c){3}d", answer.text) and answer.finish_reason == "stop"
            assert answer.text == "".join(event.text for event in llm.stream("x", params))
        gbnf = 'root ::= item ("," item)*\nitem ::= [0-9]'
        assert re.fullmatch("[0-9](,[0-9])*,?", llm.generate("x", SamplingParams(9, grammar=gbnf, seed=1)).text)
        cut = llm.generate("x", SamplingParams(3, regex="[a-c]{9}"))
        assert cut.finish_reason == "length" and re.fullmatch("[a-c]{3}", cut.text)


def test_constrained_and_free_answers_share_a_batch() -> None:
    free = SamplingParams(20, temperature=0)
    with toy_llm() as llm:
        alone = llm.generate("Hello", free).text
        batch = llm.generate(
            ["Hello", "Hello", "Hello"], [free, SamplingParams(20, json_schema={"type": "array"}), free]
        )
    assert batch[0].text == batch[2].text == alone and batch[1].text.startswith("[")


def test_asyncio_waits_for_a_grammar_without_holding_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> str:
        async with AsyncLLM.from_llm(toy_llm()) as llm:
            grammars = llm.llm._runner._grammars
            build, ticks, ticked = grammars._build, 0, threading.Event()
            # it is not compiled before the loop has run on
            grammars._build = lambda *args: (ticked.wait(60), build(*args))[1]  # type: ignore[method-assign]
            monkeypatch.setattr(module, "COMPILE_SECONDS", 60)
            task = asyncio.create_task(llm.generate("x", SamplingParams(regex="ab")))
            while not task.done():
                await asyncio.sleep(0.01)
                ticks += 1
                if ticks > 3:
                    ticked.set()
            with pytest.raises(RequestError, match="not supported: not"):
                await llm.generate("x", SamplingParams(json_schema={"not": {}}))
            assert ticked.is_set()
            return (await task).text

    assert asyncio.run(ask()) == "ab"


def test_slow_grammars_hold_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads asyncio has; and those that may wait are bounded."""
    monkeypatch.setattr(module, "COMPILE_SECONDS", 60)
    free = threading.Event()

    async def ask() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with AsyncLLM.from_llm(toy_llm()) as llm:
            grammars = llm.llm._runner._grammars
            build = grammars._build
            grammars._build = lambda *args: (free.wait(60), build(*args))[1]  # type: ignore[method-assign]
            slow = [
                asyncio.create_task(llm.generate("x", SamplingParams(regex=f"a{{{1 + at}}}")))
                for at in range(MAX_COMPILING + 1)
            ]
            try:
                await asyncio.wait_for(llm.generate("x", SamplingParams(2)), 30)
            finally:
                free.set()
            return await asyncio.gather(*slow, return_exceptions=True)

    *answers, last = asyncio.run(ask())
    assert [answer.text for answer in answers] == ["a" * (1 + at) for at in range(MAX_COMPILING)]
    assert isinstance(last, QueueFullError)


def test_a_state_that_multiplies_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 300)
    with toy_llm(ToyExecutor(n_pages=128), context=2048) as llm:
        long = SamplingParams(1500, regex="(a|b)*a(a|b){20}c", temperature=5, logit_bias={ord("c"): -100.0})
        with pytest.raises(RequestError, match="too complex"):
            llm.generate("x", long)
        assert llm.generate("x", SamplingParams(regex="a")).text == "a"


def test_parameters() -> None:
    schema = {"type": "integer"}
    given = SamplingParams(json_schema=schema)
    assert given.grammar == Grammar.json_schema('{"type":"integer"}') == replace(given, seed=1).grammar
    assert SamplingParams(grammar="root ::= [a]").grammar == Grammar("gbnf", "root ::= [a]")
    assert SamplingParams(grammar="%llguidance {}\nstart: /a/").grammar.kind == "lark"  # type: ignore[union-attr]

    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return schema

    assert SamplingParams(json_schema=Model).grammar == given.grammar
    for wrong in (
        {"json_schema": schema, "regex": "a"},
        {"grammar": 3},
        {"regex": ""},
        {"choice": "ab"},
        {"choice": [1]},
    ):
        with pytest.raises(RequestError):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    with toy_llm() as llm, pytest.raises(RequestError, match="give one"):
        next(llm.stream("x", given, mask=llm._runner._grammars.mask(given.grammar)))  # type: ignore[arg-type]


@pytest.mark.model
def test_run_with_a_schema(smollm2: Path, tmp_path: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}
    schema = {"type": "object", "properties": {"hues": schema}, "required": ["hues"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "bad.gbnf").write_text("root ::= (")
    for given in (str(tmp_path / "schema.json"), json.dumps(schema)):
        done = powerinfer("run", "Colours?", "-m", str(smollm2), "--json", "--json-schema", given, "--seed", "1")
        assert done.returncode == 0, done.stderr
        Draft202012Validator(schema).validate(json.loads(json.loads(done.stdout)["text"]))
    done = powerinfer("run", "x", "-m", str(smollm2), "--raw", "--regex", "[a-c]{5}")
    assert re.fullmatch("[a-c]{5}\n", done.stdout), done
    bad = powerinfer("run", "x", "-m", str(smollm2), "--grammar", str(tmp_path / "bad.gbnf"))
    assert "the GBNF grammar is not supported" in error_line(bad)
    assert "cannot read" in error_line(powerinfer("run", "x", "--grammar", str(tmp_path / "none")))
    assert "give one of" in error_line(powerinfer("run", "x", "--regex", "a", "--json-schema", "{}"))


# ----------------------------------------------------------------------------------------------------- response_format


def test_response_format() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
    wrapped = {"name": "x", "schema": schema, "strict": True, "description": "d"}
    assert response_format(None) is None and response_format({"type": "text"}) is None
    assert response_format({"type": "json_object"}) == Grammar.json_object()
    expected = Grammar("json_schema", json.dumps(schema, separators=(",", ":")))  # the order of keys is kept
    assert response_format({"type": "json_schema", "json_schema": wrapped}) == expected
    assert response_format({"type": "json_object", "schema": schema}) == expected


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("json", "must be an object"),
        ({}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "xml"}, "'xml'"),
        ({"type": "text", "schema": {}}, "response_format.schema is not supported"),
        ({"type": "json_schema"}, "with a schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "must be an object, not int"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "lenient": True}}, "lenient is not supported"),
    ],
)
def test_response_formats_that_are_refused(document: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        response_format(document)


def test_a_prepared_vocabulary_is_that_of_the_first_grammar() -> None:
    grammars = Grammars(ToyTokenizer())  # type: ignore[arg-type]
    grammars.prepare()
    known = grammars._prepared
    assert known is not None and grammars.compile(Grammar.json_object()).vocabulary is known
    grammars.close()
