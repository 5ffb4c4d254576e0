"""Sampling against Hugging Face's processors, brute force and hand-computed numbers; stop strings."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from powerinfer.errors import PowerInferError, RequestError
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.sampling import Sampler, largest, token_logprob
from powerinfer.runtime.text import TextStream

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def random_logits(size: int, spread: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def hugging_face_probabilities(logits: np.ndarray, params: SamplingParams, prompt: list[int]) -> np.ndarray:
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    scores = steps(torch.tensor([prompt]), torch.tensor(logits[None], dtype=torch.float64))
    return torch.softmax(scores[0], -1).numpy()


@pytest.mark.sampled
@pytest.mark.parametrize("size", [50, 6000], ids=["small", "large"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
        {"top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.8, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0.8},  # a large nucleus: the path by rejection
        {"temperature": 5.0, "top_p": 0.8, "min_p": 0.3},
    ],
    ids=str,
)
def test_draws_follow_hugging_face(size: int, options: dict[str, float]) -> None:
    logits = random_logits(size, 3.0)
    prompt = [int(token) for token in logits.argsort()[-4:]]  # the likeliest: their penalties matter
    params = SamplingParams(**{**OFF, "seed": 3, **options})
    expected = hugging_face_probabilities(logits, params, prompt)
    sampler = Sampler(params, size, prompt)
    if params.repetition_penalty != 1.0:
        sampler._edits.count = lambda token: None  # type: ignore[union-attr,method-assign]  # every draw is a first one
    draws = 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=size)
    assert not counts[expected == 0].any()
    # 5 sigma of a binomial count, and 5 for counts too small to be normal
    sigma = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 5 * sigma + 5).all()


def test_the_support_is_exact() -> None:
    """top_p keeps the token that crosses the share; of equal logits the lowest ids stay."""
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.1, 0.1], np.float32))
    cases = [
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.75}, {1, 2, 0}),
        ({"top_k": 3}, {1, 2, 0}),
        ({"min_p": 0.5}, {1, 2}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # of what top_k leaves, token 1 has 4/7
    ]
    for options, support in cases:
        sampler = Sampler(SamplingParams(**{**OFF, "seed": 1, **options}), 5)
        assert {sampler.sample(logits) for _ in range(300)} == support, options
    flat = Sampler(SamplingParams(**{**OFF, "seed": 1, "top_p": 0.5}), 2000)
    drawn = [flat.sample(np.zeros(2000, np.float32)) for _ in range(1000)]
    # 1000 draws from 1000 ids: none in the upper half of them has a chance of 2 ** -1000
    assert 500 < max(drawn) < 1000


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 6000), st.booleans())
def test_largest(seed: int, count: int, size: int, ties: bool) -> None:
    logits = random_logits(size, 2.0, seed)
    if ties:
        logits = np.round(logits)
    count = min(count, size)
    expected = sorted(range(size), key=lambda i: (-logits[i], i))[:count]
    assert largest(logits, count).tolist() == expected


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(5000, 3.0)
    assert Sampler(SamplingParams(temperature=0), 5000).sample(logits) == int(logits.argmax())


def test_penalties_and_bias_by_hand() -> None:
    logits = np.array([2.0, -1.0, 1.0, 0.5], np.float32)
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={3: 1.0}
    )
    sampler = Sampler(params, 4, prompt=[0, 1])
    edits = sampler._edits
    assert edits is not None
    # prompt tokens: 2 / 2 and -1 * 2; bias on token 3
    assert edits.apply(logits).tolist() == [1.0, -2.0, 1.0, 1.5]
    assert sampler.sample(logits) == 3
    # the bias comes before the penalty: (0.5 + 1) / 2 - 0.5 - 0.25
    assert edits.apply(logits).tolist() == [1.0, -2.0, 1.0, 0.0]
    assert sampler.sample(logits) == 0
    assert edits.apply(logits).tolist() == [1.0 - 0.75, -2.0, 1.0, 0.0]
    edits.count(0)
    assert edits.apply(logits)[0] == 1.0 - 2 * 0.5 - 0.25
    assert logits.tolist() == [2.0, -1.0, 1.0, 0.5], "the model's logits are not changed"


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.filterwarnings("error")
def test_a_repetition_penalty_beyond_all_reason(penalty: float) -> None:
    """Numbers stay finite: a token that was seen is taken for ever, or only when every other one was seen, too."""
    logits = np.array([2.0, -1.0, 0.0, 0.5, 3.0], np.float32)

    def sampled(temperature: float) -> list[int]:
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=1)
        sampler = Sampler(params, 5, prompt=[0, 1, 2])
        return [sampler.sample(logits) for _ in range(50)]

    if penalty < 1:
        assert sampled(0.0) == sampled(1e-3) == sampled(1.0) == [0] * 50
    else:
        assert sampled(0.0)[:3] == [4, 3, 4] and sampled(1e-3)[:2] == [4, 3]
        assert 1 not in {*sampled(0.0), *sampled(1e-3), *sampled(1.0)}, "its logit is as low as can be"


def test_penalties_remember_many_tokens() -> None:
    size = 3000
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=2.0), size)
    logits = np.linspace(1, 2, size).astype(np.float32)  # each token is penalised below all others
    assert [sampler.sample(logits) for _ in range(size)] == list(range(size - 1, -1, -1))


def test_forbidden_and_damaged_logits() -> None:
    logits = np.array([1.0, 0.0], np.float32)
    for temperature in (0.0, 1.0):
        forbid = SamplingParams(temperature=temperature, logit_bias={0: -math.inf})
        assert Sampler(forbid, 2).sample(logits) == 1
        with pytest.raises(RequestError, match="forbids every token"):
            everything = {0: -math.inf, 1: -math.inf}
            Sampler(SamplingParams(temperature=temperature, logit_bias=everything), 2).sample(logits)
        for broken in (np.nan, np.inf):
            with pytest.raises(PowerInferError, match="weights may be damaged"):
                Sampler(SamplingParams(temperature=temperature), 2).sample(np.array([0.0, broken], np.float32))


def test_a_largest_logit_that_is_no_number_is_named_alike() -> None:
    """By devices that return its token, and by those that return logits."""
    sampler = Sampler(SamplingParams(temperature=0), 2)
    for number, value in ((-1, np.nan), (-2, np.inf), (-3, -np.inf)):
        messages = []
        for run in (lambda n=number: sampler.take(n), lambda v=value: sampler.sample(np.full(2, v, np.float32))):
            with pytest.raises(PowerInferError, match=f"computed {value} instead") as told:
                run()
            messages.append(str(told.value))
        assert messages[0] == messages[1]
    assert sampler.take(1) == 1


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = random_logits(4000, 1.0)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=2.0), 4000)
        return [sampler.sample(logits) for _ in range(50)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


def test_logprobs() -> None:
    logits = random_logits(5000, 3.0)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)

    def spell(token: int) -> bytes:
        return b"%d" % token

    got = token_logprob(logits, 17, 4, spell)
    assert (got.token_id, got.bytes, got.text) == (17, b"17", "17")
    assert [one.bytes for one in got.top] == [b"%d" % one.token_id for one in got.top]
    # float32 exponentials: an error of an ulp or two each, in a logarithm
    assert got.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    values, ids = expected.topk(4)
    assert [one.token_id for one in got.top] == ids.tolist()
    assert [one.logprob for one in got.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert token_logprob(logits, 17, 0, spell).top == ()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 1e9}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_parameters_are_normalised() -> None:
    params = SamplingParams(stop="end", logit_bias={"7": 2})  # type: ignore[dict-item]
    assert params.stop == ("end",) and params.logit_bias == {7: 2.0}
    with pytest.raises(RequestError, match="logit_bias has token 7, but the model has 7 tokens"):
        Sampler(params, 7)


class Pieces:
    """A decoder whose token i is the i-th of some texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def push(self, token: int) -> str:
        return self.texts[token]

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["one", " two"], [], ["one", " two", ""]),
        (["a", "b", "c", "d"], ["bc"], ["a", "", ""]),  # across tokens
        (["a", "b", "x", "d"], ["bc"], ["a", "", "bx", "d", ""]),  # held back, then let go
        (["ab", "ac", "d"], ["abacus"], ["", "", "abacd", ""]),
        (["aab"], ["ab"], ["a"]),
        (["aa", "b"], ["ab"], ["a", ""]),  # the held end is the shortest that can still match
        (["xENDy"], ["END", "Dy"], ["x"]),  # the earliest match counts
        (["12", "3"], ["3", "23"], ["1", ""]),
        (["hello E", "N"], ["END"], ["hello ", "", "EN"]),  # nothing follows: what was held is text
        (["\n", "\n", "x"], ["\n\n\n"], ["", "", "\n\nx", ""]),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], shown: list[str]) -> None:
    stream = TextStream(Pieces(pieces), stop)
    got = []
    for token in range(len(pieces)):
        got.append(stream.push(token))
        if stream.stopped:
            break
    else:
        got.append(stream.flush())
    assert got == shown
    assert stream.stopped == any(text in "".join(pieces) for text in stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_any_stream_at_the_first_match(pieces: list[str], stop: list[str]) -> None:
    stream = TextStream(Pieces(pieces), stop)
    shown, whole = "", ""
    for token, piece in enumerate(pieces):
        shown += stream.push(token)
        whole += piece
        if stream.stopped:
            break
        # no more is held back than the longest stop string needs
        assert len(whole) - len(shown) <= max(map(len, stop), default=1) - 1
    else:
        shown += stream.flush()
    found = [at for at in map(whole.find, stop) if at >= 0]
    assert stream.stopped == bool(found)
    assert shown == whole[: min(found, default=len(whole))]


def test_a_stop_string_may_appear_in_the_flush() -> None:
    class Late(Pieces):
        def flush(self) -> str:
            return "�!"

    stream = TextStream(Late(["a"]), ["�"])
    assert stream.push(0) + stream.flush() == "a" and stream.stopped


def test_stop_strings_of_several_byte_characters() -> None:
    """The stop string test above must also hold where a character comes in several tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    class Bytes:
        def push(self, token: int) -> str:
            return decoder.decode(bytes([token]))

        def flush(self) -> str:
            return decoder.decode(b"", final=True)

    stream = TextStream(Bytes(), ["né"])
    shown = ""
    for token in "café née".encode():
        shown += stream.push(token)
        if stream.stopped:
            break
    assert shown == "café " and stream.stopped


class Fixed:
    """A mask of fixed tokens that ends the answer at `last`."""

    def __init__(self, tokens: Sequence[int] | None, vocab: int, last: int = -1) -> None:
        self.words = None if tokens is None else np.zeros(-(-vocab // 32), np.uint32)
        for token in tokens or ():
            self.words[token // 32] |= np.uint32(1 << token % 32)  # type: ignore[index]
        self.last = last
        self.seen: list[int] = []

    def allows(self, token: int) -> bool:
        return self.words is None or bool(self.words[token // 32] >> np.uint32(token % 32) & 1)

    def allowed(self) -> np.ndarray | None:
        return self.words

    def accept(self, token: int) -> bool:
        self.seen.append(token)
        return token == self.last


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [70, 5000])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.3, 0.9])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(seed=1, temperature=3.0, min_p=0.0, top_p=1.0, top_k=0),
        SamplingParams(seed=2, temperature=3.0, min_p=0.0, top_p=0.97, top_k=0),
        SamplingParams(seed=3, temperature=5.0, min_p=0.0, top_k=40, presence_penalty=0.5),
        SamplingParams(seed=4, temperature=9.0, min_p=0.0, top_p=1.0, top_k=4000),
    ],
)
def test_a_masked_token_is_never_sampled(vocab: int, share: float, params: SamplingParams) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(5):
        tokens = sorted(rng.choice(vocab, max(1, int(share * vocab)), replace=False).tolist())
        sampler = Sampler(params, vocab, mask=Fixed(tokens, vocab))
        for _ in range(40):
            logits = rng.normal(0, 2, vocab).astype(np.float32)
            kept = logits.copy()
            token = sampler.sample(logits)
            assert token in tokens and np.array_equal(logits, kept)
            if params == SamplingParams(temperature=0):
                assert token == max(tokens, key=lambda one: logits[one])


def test_a_masked_draw_is_the_draw_from_the_allowed_tokens() -> None:
    """Few tokens or many: the frequencies are those of the model among the allowed tokens."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, 64).astype(np.float32)
    for tokens in (list(range(3, 12)), list(range(0, 64, 2))):
        params = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        sampler = Sampler(params, 64, mask=Fixed(tokens, 64))
        drawn = np.bincount([sampler.sample(logits) for _ in range(20000)], minlength=64) / 20000
        exact = np.zeros(64)
        exact[tokens] = np.exp(logits[tokens].astype(np.float64))
        exact /= exact.sum()
        # five standard deviations of each share
        assert (np.abs(drawn - exact) <= 5 * np.sqrt(exact * (1 - exact) / 20000)).all()


def test_a_mask_of_everything_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=5), SamplingParams(seed=5, top_k=0)):
        plain = Sampler(params, 300)
        others = [Sampler(params, 300, mask=Fixed(tokens, 300)) for tokens in (None, list(range(300)))]
        for _ in range(50):
            logits = rng.normal(0, 3, 300).astype(np.float32)
            token = plain.sample(logits)
            assert [one.sample(logits) for one in others] == [token, token]


def test_a_mask_that_fails_is_an_error_of_its_request() -> None:
    class Broken:
        def allows(self, token: int) -> bool:
            return False

        def allowed(self) -> np.ndarray:
            return np.zeros(3, np.int64)

        def accept(self, token: int) -> bool:
            raise ZeroDivisionError("no")

    sampler = Sampler(SamplingParams(), 300, mask=Broken())  # type: ignore[arg-type]
    with pytest.raises(
        PowerInferError, match=r"the token mask failed, ValueError: it must be uint32 \[10\], not int64"
    ):
        sampler.sample(np.zeros(300, np.float32))
    with pytest.raises(PowerInferError, match="the token mask failed, ZeroDivisionError: no"):
        sampler.ends_with(3)
    with pytest.raises(PowerInferError, match="the mask forbids every token"):
        Sampler(SamplingParams(), 300, mask=Fixed([], 300)).sample(np.zeros(300, np.float32))
