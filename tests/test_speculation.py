"""Speculation on the toy model: the same answers whatever is drafted, fewer steps where drafts are right, and none
where they are not; prompt lookup; a smaller model as the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_next_step import AheadExecutor
from toy_model import D_MODEL, VOCAB, ToyExecutor, ToyTokenizer, ask, idle, reference_greedy, settled, toy_llm

from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig
from powerinfer.devices import Batch
from powerinfer.devices.choices import Choice
from powerinfer.errors import PowerInferError
from powerinfer.runtime.draft_model import DraftModel
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.lookup import LookupDrafts, longest_match
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import AnswerRequest, Completion, Request
from powerinfer.runtime.scheduler import Scheduler, StepLimits
from powerinfer.runtime.speculation import MOST, DraftSource, Guessing, Outlook, SizeTimes, Speculation
from powerinfer.serve.live import _drafts
from powerinfer.serve.metrics import _EngineFigures
from powerinfer.serve.timings import AnswerTimings


class Guesses:
    """A source whose drafts are right with a given probability, each; after a wrong one nothing is."""

    name = "test"

    def __init__(self, right: float, seed: int = 0) -> None:
        self._right, self._random = right, Random(seed)
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self.asked = self.forgotten = 0
        self.closed = False

    def outlook(self, request: AnswerRequest) -> Outlook:
        return Outlook(MOST, "test", 0.5)

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        self.asked += 1
        return [self._for(request, count) for request, count in wanted]

    def _for(self, request: AnswerRequest, count: int) -> list[int]:
        tokens, n = request.tokens, request.n_prompt
        answer = self.answers.get(tuple(tokens[:n]), [])[len(tokens) - n :]
        answer += [self._random.randrange(VOCAB) for _ in range(count)]
        return [
            token if self._random.random() < self._right else self._random.randrange(VOCAB) for token in answer[:count]
        ]

    def prepare(self, requests: object) -> None:
        pass

    def observe(self, requests: Sequence[tuple[Request, int, int]]) -> None:
        pass

    def forget(self, request: AnswerRequest) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every request has any number of drafts in every step, whatever they cost."""
    random = Random(7)
    monkeypatch.setattr(Speculation, "_counts", lambda self, outlooks: _any_counts(self, outlooks, random))
    yield


def _any_counts(speculation: Speculation, outlooks: dict[AnswerRequest, Outlook], random: Random) -> dict:
    for request in outlooks:
        speculation._requests.setdefault(request, Guessing())
    return {request: random.randint(0, outlook.most) for request, outlook in outlooks.items()}


def _three(speculation: Speculation, outlooks: dict[AnswerRequest, Outlook]) -> dict[AnswerRequest, int]:
    for request in outlooks:
        speculation._requests.setdefault(request, Guessing())
    return {request: min(3, outlook.most) for request, outlook in outlooks.items()}


def speculating(source: DraftSource, executor: ToyExecutor | None = None, context: int = 512, **engine: object) -> LLM:
    config = ModelConfig(
        architecture="toy", d_model=D_MODEL, vocab_size=VOCAB, context_length=context,
        norm_eps=1e-5, layers=(LayerConfig(AttentionConfig(1, 1, 1), FfnConfig(1)),),
    )  # fmt: skip
    settings_ = EngineConfig(**engine)  # type: ignore[arg-type]
    return LLM.from_parts(executor or ToyExecutor(), ToyTokenizer(), config, settings_, source=source)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


PROMPTS = [prompt(length) for length in (1, 31, 32, 33, 64, 65, 100, 2)]

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=1, seed=3, max_tokens=50, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=33, frequency_penalty=0.4, logprobs=2),
    SamplingParams(temperature=0, max_tokens=60, stop=["a", "e9"]),
    SamplingParams(temperature=0, max_tokens=30, choice=["a long answer of many letters", "a short answer", "b"]),
    SamplingParams(temperature=1, seed=9, max_tokens=100, regex="[a-f]{3,90}z"),
    SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
]


def same(answer: Completion, plain: Completion) -> bool:
    fields = ("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "logprobs")
    return all(getattr(answer, field) == getattr(plain, field) for field in fields)


@pytest.mark.sampled(("right", "chunk"), ("chunk", "states"))
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("chunk", "pages"), [(3, 64), (64, 26)], ids=["room", "preempting"])
@pytest.mark.parametrize("states", [0, 20, 9], ids=["", "states", "few states"])
def test_answers_stay_the_same(many: None, right: float, chunk: int, pages: int, states: int) -> None:
    def executor() -> ToyExecutor:
        return ToyExecutor(n_pages=pages, page_size=8, n_states=states)

    context = 8 * 26  # tokens
    plain = toy_llm(executor(), context, prefill_chunk=chunk).generate(PROMPTS, PARAMS)
    source = Guesses(right)
    source.answers = {tuple(one): answer.token_ids for one, answer in zip(PROMPTS, plain, strict=True)}
    llm = speculating(source, executor(), context, prefill_chunk=chunk)
    for _ in range(2):  # the second time with a prefix that the first left
        answers = llm.generate(PROMPTS, PARAMS)
        assert all(map(same, answers, plain))
        assert idle(llm)
    assert source.asked, "there were drafts"
    stats = llm.stats().speculation
    assert stats.drafted >= stats.accepted == sum(stats.places)
    assert list(stats.places) == sorted(stats.places, reverse=True)
    if pages == 64:
        assert right - 0.4 < stats.accepted / stats.drafted < right + 0.1


def test_right_drafts_save_steps(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "_counts", lambda self, outlooks: dict.fromkeys(outlooks, 3))
    executor, source = ToyExecutor(), Guesses(1.0)
    text, params = prompt(20), SamplingParams(temperature=0, max_tokens=101, ignore_eos=True)
    source.answers[tuple(text)] = toy_llm().generate([text], params)[0].token_ids
    answer = speculating(source, executor).generate([text], params)[0]
    assert answer.token_ids == source.answers[tuple(text)]
    assert executor.sizes == [20] + [4] * 25


@pytest.mark.parametrize(("pages", "drafts"), [(2, [0]), (3, [7]), (5, [7, 0]), (6, [7, 7])])
def test_drafts_take_no_page_of_others(pages: int, drafts: list[int]) -> None:
    """Where a request's last page is full it has drafts if there is a free one, and nobody is put back for it."""
    scheduler = Scheduler(n_pages=pages, page_size=8, context=64, limits=StepLimits(64, 2, 64, 64))
    for seed in (1, 2):
        scheduler.submit(toy_llm()._runner.request(prompt(15, seed), SamplingParams(max_tokens=12)))
    assert scheduler.plan() is not None
    requests = scheduler.commit()
    scheduler.settle()
    for request in requests:
        request.tokens.append(1)
        request.drafts = range(7)
    batch = scheduler.plan()
    assert batch is not None and len(batch.tokens) == len(drafts) + sum(drafts)
    assert [len(request.drafts) for request in requests] == drafts and scheduler.preemptions == 0


def test_the_drafts_of_the_last_step_count(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "_counts", _three)
    source, text = Guesses(1.0), prompt(20)
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    source.answers[tuple(text)] = toy_llm().generate([text], params)[0].token_ids
    llm = speculating(source)
    answer = llm.generate([text], params)[0]
    assert (answer.drafted, answer.accepted) == (4, 4), "one of the prompt, one and three drafts, one and a draft"
    stats = settled(llm).speculation
    assert (stats.drafted, stats.accepted, stats.places) == (4, 4, (2, 1, 1))


def test_servers_show_what_came_of_drafts(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the answer's timings, in /metrics and on the page."""
    monkeypatch.setattr(Speculation, "_counts", _three)
    source, text = Guesses(1.0), prompt(20)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    source.answers[tuple(text)] = toy_llm().generate([text], params)[0].token_ids
    llm = speculating(source)
    before, timings = llm.stats(), AnswerTimings(len(text))
    for event in ask(llm, text, params).rest():
        assert event is not None
        timings.add(event)
    shown, stats = timings.document(), settled(llm)
    assert shown["draft_n"] == shown["draft_n_accepted"] == stats.speculation.drafted == 21
    model: Any = SimpleNamespace(name="toy", loads=1, stats=lambda: (stats, {"speculation.drafted": 5}))
    samples = [one for metric in _EngineFigures(lambda: [model]).collect() for one in metric.samples]
    figures = {(one.name, one.labels.get("place")): one.value for one in samples}
    assert figures["powerinfer_drafted_tokens_total", None] == 5 + 21
    assert figures["powerinfer_accepted_places_total", "2"] == stats.speculation.places[2] == 7
    assert figures["powerinfer_draft_failures_total", None] == 0
    frame = _drafts(stats, before)
    assert frame is not None and frame["accepted"] == 1 and 3.5 < frame["tokens_per_step"] <= 4


def test_drafts_are_not_computed_beside_prompts(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a request either that starts once they are there."""
    monkeypatch.setattr(Speculation, "_counts", _three)
    executor = ToyExecutor()
    executor.held = True
    llm = speculating(Guesses(0.5), executor)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first = ask(llm, prompt(20), params)
    executor.let(3)
    executor.wait_for(3)
    second = ask(llm, prompt(9), params)
    executor.release()
    first.rest()
    second.rest()
    mixed = [size for size, served in zip(executor.sizes, executor.sequences, strict=True) if served == 2]
    assert mixed[0] == 10 and mixed[1] == 8


def test_an_aborted_request_leaves_nothing(many: None) -> None:
    source, executor = Guesses(0.5), ToyExecutor()
    executor.held = True
    llm = speculating(source, executor)
    asked = ask(llm, prompt(40), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    executor.let(4)
    executor.wait_for(4)
    llm._runner.abort([asked.request])
    executor.release()
    asked.rest()
    assert idle(llm) and source.forgotten == 1
    llm.close()
    assert source.closed


def test_a_step_that_fails_ends_its_requests_alone(many: None) -> None:
    source, executor = Guesses(0.5), ToyExecutor()
    executor.fail_at[3] = PowerInferError("no")
    llm = speculating(source, executor)
    with pytest.raises(PowerInferError, match="no"):
        llm.generate([prompt(5)], PARAMS[0])
    assert llm.generate([prompt(5)], PARAMS[0])[0].token_ids == toy_llm().generate([prompt(5)], PARAMS[0])[0].token_ids
    assert idle(llm)


class Failing(Guesses):
    """A source that fails now and then."""

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        if self.asked == 3:
            self.asked += 1
            raise ValueError("of a native call")
        return super().draft(wanted)


def test_a_source_that_fails_ends_drafts_alone(many: None) -> None:
    source = Failing(0.5)
    llm = speculating(source)
    assert llm.drafts == "test"
    for _ in range(2):
        assert same(llm.generate([prompt(5)], PARAMS[0])[0], toy_llm().generate([prompt(5)], PARAMS[0])[0])
    assert source.asked == 4 and idle(llm)
    assert source.closed and llm.drafts is None and settled(llm).speculation.failed == 1
    assert llm.choices["drafts"] == "none (test failed: of a native call)"


def test_without_a_source_that_failed_steps_are_launched_ahead(many: None) -> None:
    executor, plain = AheadExecutor(), AheadExecutor()
    ahead, executor.choices.launches = "ahead of the tokens", Choice("ahead of the tokens")
    llm, other = speculating(Failing(0.5), executor), toy_llm(plain)
    assert llm.choices["launches"] == "when the tokens are known (drafts follow them)" and not executor.collected
    for _ in range(2):
        assert same(llm.generate([prompt(5)], PARAMS[0])[0], other.generate([prompt(5)], PARAMS[0])[0])
    assert llm.drafts is None and llm.choices["launches"] == ahead and idle(llm)
    assert plain.collected / 2 < executor.collected < plain.collected


def test_a_source_that_fails_behind_a_step_ends_drafts_alone(many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self: Guesses, requests: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Guesses, "observe", observe)
    llm = speculating(Guesses(0.5))
    assert same(llm.generate([prompt(5)], PARAMS[0])[0], toy_llm().generate([prompt(5)], PARAMS[0])[0])
    assert llm.drafts is None and llm.choices["drafts"] == "none (test failed: MemoryError)" and idle(llm)


class Clock:
    """Steps that take a given time by their number of tokens, and up to a share of it more or less."""

    def __init__(self, source: Guesses, seconds: list[float], noise: float = 0.0) -> None:
        self.speculation = Speculation(source)
        self.seconds = seconds
        self.noise, self.random = noise, Random(11)
        self.spent = 0.0
        self.steps = 0

    def run(self, request: AnswerRequest, answer: Sequence[int]) -> None:
        """Decode an answer."""
        while len(request.tokens) - request.n_prompt < len(answer):
            request.computed = len(request.tokens) - 1
            self.speculation.draft([request])
            drafts, at = list(request.drafts), len(request.tokens) - request.n_prompt
            right = 0
            while right < len(drafts) and at + right < len(answer) and drafts[right] == answer[at + right]:
                right += 1
            request.tokens += answer[at : at + right + 1]
            seconds = self.seconds[len(drafts)] * (1 + self.noise * self.random.uniform(-1, 1))
            self.speculation.computed(1 + len(drafts), 1, right + 1, seconds)
            if drafts:
                guessing = self.speculation.guessing(request)
                assert guessing is not None
                self.speculation.verified(guessing, len(drafts), right)
            self.spent += seconds
            self.steps += 1
        self.speculation.forget(request)


def decoded(right: float, seconds: list[float], tokens: int = 600, noise: float = 0.0) -> tuple[float, Clock]:
    """(speed, as that without drafts has it; the clock)."""
    source = Guesses(right)
    answer, text = prompt(tokens, 5), prompt(9)
    source.answers[tuple(text)] = answer
    llm = toy_llm(context=2 * tokens)
    request = llm._runner.request(text, SamplingParams(max_tokens=tokens, temperature=0))
    clock = Clock(source, seconds, noise)
    clock.run(request, answer)
    return tokens * seconds[0] / clock.spent, clock


FLAT = [1.0 + 0.05 * count for count in range(MOST + 1)]
STEEP = [1.0 + 0.8 * count for count in range(MOST + 1)]


def test_drafts_that_are_right_pay() -> None:
    assert decoded(1.0, FLAT)[0] > 4.5
    assert decoded(0.75, FLAT)[0] > 2.0


@pytest.mark.parametrize(("right", "seconds"), [(0.0, FLAT), (0.0, STEEP), (0.3, STEEP), (0.75, STEEP)])
def test_drafts_that_do_not_pay_are_few(right: float, seconds: list[float]) -> None:
    """The worst cases cost at most 3 %."""
    speed, clock = decoded(right, seconds)
    assert speed > 0.97
    assert clock.speculation.stats().drafted, "they were tried"


@pytest.mark.parametrize("right", [0.0, 0.1, 0.2])
def test_a_short_answer_on_a_noisy_machine_loses_little(right: float) -> None:
    """Where a token more takes a fifth of a step."""
    speed, clock = decoded(right, [1.0 + 0.2 * count for count in range(MOST + 1)], tokens=128, noise=0.1)
    assert speed > 0.97 and 0 < clock.speculation.stats().drafted < 12


def test_without_drafts_few_steps_ask_a_steady_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are tried in the same steps as of one that each token may change."""
    looks, tries = list[list[int]](), list[list[int]]()
    for steady in (False, True):
        looked: list[int] = []
        tried: list[int] = []

        def outlook(source: Guesses, request: AnswerRequest, steady: bool = steady, at: list[int] = looked) -> Outlook:
            at.append(len(request.tokens))
            return Outlook(MOST, "test", 0.5, steady=steady)

        def draft(
            source: Guesses, wanted: Sequence[tuple[AnswerRequest, int]], at: list[int] = tried
        ) -> list[list[int]]:
            at.append(len(wanted[0][0].tokens))
            return [[VOCAB] for _ in wanted]

        monkeypatch.setattr(Guesses, "outlook", outlook)
        monkeypatch.setattr(Guesses, "draft", draft)
        decoded(0.0, STEEP)
        looks.append(looked)
        tries.append(tried)
    assert tries[0] == tries[1] and len(tries[0]) > 2
    assert len(looks[0]) >= 599 and len(looks[1]) < 599 / 6


def test_noise_makes_no_wrong_draft_pay() -> None:
    """Where steps with drafts seem to take less time than those without."""
    _, clock = decoded(0.0, [1.0, *[0.8] * MOST], tokens=400)
    assert 0 < clock.speculation.stats().steps < 60


def test_drafts_are_tried_again() -> None:
    """A text whose end can be guessed, though nothing before could: drafts come back."""
    source = Guesses(1.0)
    answer, text = prompt(1500, 5), prompt(9)
    llm = toy_llm(context=4000)
    request = llm._runner.request(text, SamplingParams(max_tokens=1500, temperature=0))
    clock = Clock(source, FLAT)
    clock.run(request, answer[:400])
    assert clock.spent < 400 * 1.03, "nothing could be guessed"
    source.answers[tuple(text)] = answer
    request = llm._runner.request(text, SamplingParams(max_tokens=1500, temperature=0))
    before = clock.spent
    clock.run(request, answer)
    assert clock.spent - before < 1500 / 2.5


def test_times_between_measured_sizes() -> None:
    times = SizeTimes()
    assert times.expect(3) is None
    times.add(1, 1.0)
    assert times.expect(1) == 1.0 < times.expect(4) < 1.2  # type: ignore[operator]
    times.add(5, 3.0)
    assert times.expect(3) == 2.0
    for _ in range(600):
        times.add(1, 1.0)
    assert times.expect(5) < 1.2, "what was measured long ago is measured again"  # type: ignore[operator]


# ---------------------------------------------------------------- prompt lookup


def slow_match(tokens: list[int]) -> tuple[int, int]:
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(32, end) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= max(2, best[0]):
            best = (length, end)
    return best


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=90))
def test_the_longest_match_is_found(tokens: list[int]) -> None:
    assert longest_match(np.asarray(tokens, np.int32)) == slow_match(tokens)


def test_lookup_goes_on_with_what_followed() -> None:
    llm = toy_llm()
    source = LookupDrafts()
    request = llm._runner.request([*b"one two three. one two"], SamplingParams(max_tokens=9))
    assert source.outlook(request).kind == "4 to 7"
    assert source.draft([(request, 6)]) == [[*b" three"]]
    request.tokens += b" thr"
    assert source.outlook(request).kind == "8 to 15"
    assert source.draft([(request, 3)]) == [[*b"ee."]]
    repeated = llm._runner.request([*b"xabababab"], SamplingParams(max_tokens=9))
    assert source.outlook(repeated).most == MOST
    assert source.draft([(repeated, 7)]) == [[*b"abababa"]]
    source.forget(request)
    assert source.outlook(llm._runner.request([*b"abcdef"], SamplingParams(max_tokens=9))).most == 0


def test_a_long_text_that_repeats_itself_is_no_work() -> None:
    tokens = np.zeros(100_000, np.int32)
    assert longest_match(tokens) == (32, 99_999)
    tokens[-1] = 1
    assert longest_match(tokens) == (0, 0)


def test_answers_with_lookup_stay_the_same(many: None) -> None:
    texts = [[*b"abcabcabcabc"], [*b"to be or not to be"], prompt(40)]
    params = SamplingParams(temperature=0, max_tokens=80, regex="(ab){60}")  # which can be guessed
    llm = speculating(LookupDrafts())
    plain = toy_llm().generate(texts, params)
    assert all(map(same, llm.generate(texts, params), plain))
    assert settled(llm).speculation.accepted > 20 and idle(llm)


# ---------------------------------------------------------------- a smaller model


class SimilarExecutor(ToyExecutor):
    """A model that agrees with the toy in most places."""

    def forward(self, batch: object) -> np.ndarray:
        logits = super().forward(batch)  # type: ignore[arg-type]
        for row in logits:
            if float(row.sum()) % 1 < 0.2:
                row[int(row.argmax())] = -30
        return logits


@pytest.mark.parametrize("executor", [ToyExecutor, SimilarExecutor])
@pytest.mark.parametrize("pages", [64, 8])
def test_a_smaller_model_drafts(many: None, executor: type[ToyExecutor], pages: int) -> None:
    draft_executor = executor(n_pages=pages, page_size=16, max_tokens=24)
    source = DraftModel(draft_executor, VOCAB)
    llm = speculating(source, ToyExecutor(n_pages=128))
    plain = toy_llm(ToyExecutor(n_pages=128)).generate(PROMPTS, PARAMS)
    assert all(map(same, llm.generate(PROMPTS, PARAMS), plain))
    assert idle(llm)
    stats = settled(llm).speculation
    assert stats.accepted > 0.3 * stats.drafted > 0
    assert source._pages.available == pages and not source._sequences
    greedy = [reference_greedy(one, 30) for one in PROMPTS[:2]]
    assert [one.token_ids for one in llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=30))] == greedy
    llm.close()
    assert draft_executor.closed


def test_a_smaller_model_computes_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt once, then what was accepted and not its own draft."""
    monkeypatch.setattr(Speculation, "_counts", lambda self, outlooks: dict.fromkeys(outlooks, 2))
    executor = ToyExecutor()
    llm = speculating(DraftModel(executor, VOCAB))
    llm.generate([prompt(30)], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert executor.positions == list(range(len(executor.positions)))
    assert executor.sizes[:2] == [30, 1]


class FewTokens(ToyExecutor):
    """A model of fewer tokens than the toy has."""

    vocab_size = 200

    def forward(self, batch: Batch) -> np.ndarray:
        if batch.tokens.max() >= self.vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        return super().forward(batch)[:, : self.vocab_size]


def test_a_text_beyond_the_smaller_models_vocabulary_has_no_drafts(many: None) -> None:
    source = DraftModel(FewTokens(), VOCAB)
    llm = speculating(source)
    texts = [[250, 3, 4, 5], [3, 4, 5]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = toy_llm().generate(texts, params)
    assert all(map(same, llm.generate(texts, params), plain))
    assert llm.drafts == "model" and idle(llm)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_smaller_model_that_takes_few_tokens_at_a_time(many: None, most: int) -> None:
    source = DraftModel(ToyExecutor(max_tokens=most), VOCAB)
    llm = speculating(source, prefill_chunk=most, max_batch=most)
    assert all(map(same, llm.generate(PROMPTS, PARAMS), toy_llm().generate(PROMPTS, PARAMS)))
    stats = settled(llm).speculation
    assert idle(llm) and not stats.failed and stats.accepted > 0.3 * stats.drafted > 0


def test_a_smaller_model_reads_a_text_in_parts_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps no more than the chunk; and of the next turn of a chat what is new."""
    monkeypatch.setattr(Speculation, "_counts", lambda self, outlooks: {
        one: self._requests.setdefault(one, Guessing()) and min(2, outlook.most) for one, outlook in outlooks.items()
    })  # fmt: skip
    small = ToyExecutor(page_size=16)
    llm = speculating(DraftModel(small, VOCAB, 24), context=512)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = prompt(150)
    answer = llm.generate([text], params)[0].token_ids
    assert small.sizes[:6] == [24] * 6 and max(small.sizes) <= 24
    computed = len(small.positions)
    assert computed < 150 + 3 * 40
    llm.generate([[*text, *answer, *prompt(20)]], params)
    assert len(small.positions) - computed < 20 + 16 + 3 * 40
    assert min(small.positions[computed:]) >= 160 and idle(llm)


def test_what_a_source_has_to_read_must_pay() -> None:
    """Drafts that would save less than it takes to read a long prompt are not asked for; nor is a try."""

    class Reader(Guesses):
        lacks = 4000
        read = 0

        def outlook(self, request: AnswerRequest) -> Outlook:
            return Outlook(MOST, "test", 0.9, self.lacks)

        def prepare(self, requests: Sequence[AnswerRequest]) -> int:
            self.read, self.lacks = self.read + self.lacks, 0
            return self.read

    def read(tokens: int) -> int:
        source = Reader(1.0)
        answer, text = prompt(tokens, 5), prompt(9)
        source.answers[tuple(text)] = answer
        llm = toy_llm(context=2 * tokens + 20)
        request = llm._runner.request(text, SamplingParams(max_tokens=tokens, temperature=0))
        Clock(source, FLAT).run(request, answer)
        return source.read

    assert read(100) == 0, "4,000 tokens take as long as hundreds of steps"
    assert read(1000) == 4000


def test_times_of_drafting_are_forgotten() -> None:
    times = SizeTimes(proportional=True)
    times.add(2, 1.0)
    assert times.expect(4) == 2.0 and times.expect(1) == 1.0
    times.add(4, 9.0)
    for _ in range(600):
        times.add(2, 1.0)
    assert times.expect(4) == 2.0


def test_a_token_more_costs_what_it_did() -> None:
    times = SizeTimes()
    times.add(1, 1.0)
    times.add(2, 1.3)
    assert times.expect(4) == pytest.approx(1.9)
