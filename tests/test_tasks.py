"""`eval tasks`: items of every format, bad ones, and how their choices are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sparse_models import TEXT, give_bundles, tiny_llama
from test_cli import error_line, powerinfer
from toy_model import BOS, ToyExecutor, ToyTokenizer, idle, reference_logits, toy_llm

from powerinfer import LLM, RequestError
from powerinfer.cli.main import main
from powerinfer.evaluate import accuracy, choice_log_probabilities, encode_items
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.prepare.training import torch_threads
from powerinfer.tasks import Item, read_items
from powerinfer.text.model_text import tokenizer_of
from powerinfer_train.torch_model import TorchModel, load

PLAIN = {"context": "It is", "choices": ["warm", "cold"], "answer": 1}
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "[header] How to bake [title] Begin. [step] Heat it.",
    "ctx_b": "a cook",
    "endings": ["[substeps] stirs  it.", "a]b[c"],
    "label": "1",
}
PIQA = {
    "instruction": "Please choose the correct solution to the question: What now?\n\nSolution1: do this \n\n"
    "Solution2: do that\n\nAnswer format: solution1/solution2",
    "output": "the correct answer is solution2",
    "answer": "solution2",
}
ARC = {
    "instruction": "Please choose the correct answer to the question: Which? \n\nAnswer1: one Answer2: the Answer 3: x "
    "Answer3: two\n\nAnswer format: answer1/answer2/answer3",
    "answer": "answer2",
}
PUBLISHED = {
    "question": {"stem": "Which?", "choices": [{"text": "one", "label": "A"}, {"text": "two", "label": "B"}]},
    "answerKey": "B",
}
HUB = {"question": "Which?", "choices": {"text": ["one", "two", "three"], "label": ["1", "2", "3"]}, "answerKey": "3"}
ASKED = "Question: Which?\nAnswer:"


def written(path: Path, *items: Any) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return path


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (PLAIN, ("It is", ("warm", "cold"), 1)),
        (
            {"question": "Is it", "choices": ["warm", "cold"], "answer": "warm", "more": 1},
            ("Is it", ("warm", "cold"), 0),
        ),
        (PLAIN | {"context": "\ud800", "choices": ["\udc00!", "b"]}, ("\ufffd", ("\ufffd!", "b"), 1)),
        (HELLASWAG, ("Baking: How to bake. Begin. Heat it. A cook", (" stirs it.", "a]b[c"), 1)),
        (PIQA, ("Question: What now?\nAnswer:", ("do this", "do that"), 1)),
        (ARC, (ASKED, ("one", "the Answer 3: x", "two"), 1)),
        (PUBLISHED, (ASKED, ("one", "two"), 1)),
        (HUB, (ASKED, ("one", "two", "three"), 2)),
    ],
)
def test_formats(item: dict[str, Any], expected: tuple[str, tuple[str, ...], int], tmp_path: Path) -> None:
    lines = written(tmp_path / "lines.jsonl", item, item)
    assert read_items(lines) == [Item(*expected, f"{lines}, item {number}") for number in (1, 2)]
    whole = tmp_path / "whole.json"
    whole.write_text("\ufeff " + json.dumps([item, {}], indent=1))
    assert read_items(whole, 1) == [Item(*expected, f"{whole}, item 1")]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([], "'\\[\\]' is not a JSON object"),
        ({"text": "x"}, "the fields 'text' are those of no known task"),
        (PLAIN | {"context": 5}, "context is '5', not a text"),
        (PLAIN | {"context": " "}, "no text before the choices"),
        (PLAIN | {"choices": ["warm", 5]}, "not a list of texts"),
        (PLAIN | {"choices": ["warm", " "]}, "a choice is empty"),
        (PLAIN | {"choices": ["cold"], "answer": 0}, "1 choices, not 2 to 64"),
        (PLAIN | {"answer": 2}, "the answer is number 2 of 2 choices"),
        (PLAIN | {"answer": -1}, "the answer is number -1"),
        (PLAIN | {"answer": True}, "answer is 'True', not a whole number"),
        (PLAIN | {"answer": "hot"}, "the answer 'hot' is not one of its choices"),
        (HELLASWAG | {"label": ""}, "label is '', not a whole number"),
        (HELLASWAG | {"endings": None}, "endings is 'None', not a list"),
        (PIQA | {"answer": "true"}, "answer is 'true', not like answer1"),
        (PIQA | {"answer": "solution3"}, "the answer is number 2 of 2"),
        (PIQA | {"answer": "answer1"}, "0 choices"),
        (PIQA | {"instruction": "Solution1: a Solution2: b"}, "instruction has not the form"),
        (PIQA | {"instruction": PIQA["instruction"].replace("What now?", "")}, "no text before the choices"),
        (ARC | {"instruction": ARC["instruction"].replace("Answer2", "Answer7")}, "are not answer1, answer2 and so on"),
        (HUB | {"answerKey": "4"}, "answerKey '4' is not one of the labels '1, 2, 3'"),
        (HUB | {"choices": ["one", "two"]}, "not texts with labels"),
        (PUBLISHED | {"question": {"stem": "Which?"}}, "not texts with labels"),
    ],
)
def test_items_that_are_refused(item: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", PLAIN, item)
    with pytest.raises(RequestError, match=f"^{path}, item 2: .*{message}"):
        read_items(path)
    assert len(read_items(path, 1)) == 1


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for raw, message in (
        (b"", "has no items"),
        (b"[]", "has no items"),
        (b'{"a": 1', "item 1: not valid JSON"),
        (b'[{"a": 1}', "x.jsonl: not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"\xff"', "not valid UTF-8"),
        (b'{"context": "a", "context": "b"}', "a key occurs twice"),
    ):
        path.write_bytes(raw)
        with pytest.raises(RequestError, match=message):
            read_items(path)
    with pytest.raises(RequestError, match=r"cannot read .*No such file"):
        read_items(tmp_path / "none.jsonl")


# ---------------------------------------------------------------- how they are scored, on a model one can work out


def reference_sum(context: str, choice: str, bos: bool = False, kept: int = 10**6) -> float:
    """Of the toy model, which reads bytes; kept: tokens at the end that it sees."""
    tokens = [BOS] * bos + list(f"{context} {choice}".encode())
    first = len(tokens) - len(f" {choice}".encode())
    total = 0.0
    for at in range(first, len(tokens)):
        logits = reference_logits(tokens[max(0, len(tokens) - 1 - kept) : at]).astype(np.float64)
        total += logits[tokens[at]] - np.log(np.exp(logits).sum())
    return total


LONG = "It was the best of times, it was the worst of times, it was the age of wisdom"
ITEMS = [
    Item(LONG, ("and of foolishness", "or", "when nobody believed anything at all"), 0, "1"),
    Item("Short", ("one", "two", "ünï"), 2, "2"),
    Item(LONG[:40] + "  ", ("a", "b"), 1, "3"),
]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("options", [{}, {"n_pages": 5}, {"max_tokens": 24}, {"n_states": 4}])
def test_sums_of_log_probabilities(bos: bool, options: dict[str, int]) -> None:
    executor = ToyExecutor(**options)
    llm = toy_llm(executor, max_batch=2)
    llm.tokenizer.add_bos = bos
    for item, encoded in zip(ITEMS, encode_items(llm.tokenizer, ITEMS, 512), strict=True):
        context, gap = item.context.rstrip(), item.context[len(item.context.rstrip()) :]
        expected = [reference_sum(context, gap + choice, bos) for choice in item.choices]
        for step in (64, 3, 1):
            assert choice_log_probabilities(llm, encoded, step) == pytest.approx(expected, rel=1e-5)
    assert idle(llm)


def test_what_choices_share_is_computed_once() -> None:
    executor = ToyExecutor()
    encoded = encode_items(ToyTokenizer(), ITEMS[:1], 512)[0]
    choice_log_probabilities(toy_llm(executor), encoded)
    shared = len(LONG) // executor.page_size * executor.page_size
    assert shared == 64 and executor.positions.count(0) == 1
    assert len(executor.positions) == shared + sum(len(tokens) - 1 - shared for tokens in encoded.texts)


def test_accuracy() -> None:
    llm = toy_llm()
    sums = [np.array([reference_sum(item.context, choice) for choice in item.choices]) for item in ITEMS[:2]]
    sizes = [list(map(len, item.choices)) for item in ITEMS[:2]]
    best = [int(one.argmax()) for one in sums]
    normed = [int((one / size).argmax()) for one, size in zip(sums, sizes, strict=True)]
    assert best != normed, "the two measures differ here"
    items = [Item(item.context, item.choices, best[0], "") for item in (ITEMS[0], ITEMS[0], ITEMS[0])]
    items += [Item(ITEMS[1].context, ITEMS[1].choices, (best[1] + 1) % 3, "")]
    seen: list[int] = []
    found = accuracy(llm, encode_items(llm.tokenizer, items, 512), lambda label, done, total: seen.append(done))
    assert found.acc == 0.75 and found.items == 4 and seen == [1, 2, 3, 4]
    assert found.acc_error == pytest.approx(np.sqrt(0.75 * 0.25 / 3))
    (encoded,) = encode_items(llm.tokenizer, ITEMS[1:2], 512)
    assert encoded.sizes == (3, 3, 3), "characters, not bytes"
    right = [normed[0] == best[0]] * 3 + [normed[1] == (best[1] + 1) % 3]
    assert found.acc_norm == np.mean(right) and found.chance == pytest.approx(1 / 3) and found.cut == 0


def test_what_is_longer_than_the_context_loses_its_beginning() -> None:
    llm = toy_llm(context=50)
    (encoded,) = encode_items(llm.tokenizer, ITEMS[:1], 50)
    expected = [reference_sum(LONG, choice, kept=50) for choice in ITEMS[0].choices]
    assert encoded.cut and choice_log_probabilities(llm, encoded) == pytest.approx(expected, rel=1e-5)
    assert accuracy(llm, [encoded]).cut == 1
    with pytest.raises(RequestError, match=r"^1: a choice of 37 tokens cannot be scored in a context of 20"):
        encode_items(llm.tokenizer, ITEMS[:1], 20)


# ---------------------------------------------------------------- a model in a file, and the command


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_bundles(tiny_llama(tmp_path_factory.mktemp("relu") / "m.gguf"))


def test_the_same_by_torch(relu: Path) -> None:
    """Weights and cache are float32: what differs is the order of sums, a few roundings of 6e-8 in each layer."""
    item = Item(TEXT[:100], (TEXT[51:60], TEXT[70:75], TEXT[20:29]), 0, "")
    checkpoint = open_checkpoint(relu)
    (encoded,) = encode_items(tokenizer_of(checkpoint), [item], 128)
    assert min(encoded.firsts) > 64, "two pages of the cache are shared"
    model = TorchModel(checkpoint.config, load(checkpoint), torch.float32)
    expected = []
    with torch_threads(1), torch.no_grad():
        for tokens, first in zip(encoded.texts, encoded.firsts, strict=True):
            found = torch.log_softmax(model.logits(model.states(torch.tensor([tokens[:-1]])))[0], -1)
            expected.append(float(found[range(first - 1, len(tokens) - 1), tokens[first:]].sum()))
    with LLM(relu, threads=1, selector="all", kv_type="f32") as llm:
        assert choice_log_probabilities(llm, encoded) == pytest.approx(expected, rel=1e-4)


def test_the_command(relu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contexts = [TEXT[at : at + 20] for at in range(6)]
    items = [{"context": one, "choices": [TEXT[30:39], "ab"], "answer": at % 2} for at, one in enumerate(contexts)]
    one, two = written(tmp_path / "one.jsonl", *items), written(tmp_path / "two.jsonl", *items[:2])
    command = ["eval", "tasks", "-m", str(relu), "--file", str(one), "--file", str(two), "-t", "1", "--json"]
    assert main([*command, "--limit", "4"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out.splitlines()[-1])
    assert [(task["file"], task["items"]) for task in document["tasks"]] == [("one.jsonl", 4), ("two.jsonl", 2)]
    assert document["acc"] == np.mean([task["acc"] for task in document["tasks"]]) and document["limit"] == 4
    assert 0 < document["acc"] < 1 and "sparsity" not in document and document["context"] < 128
    assert "one.jsonl" in shown.err and "mean" in shown.err
    assert main([*command, "--selector", "exact", "--step", "4"]) == 0
    sparse = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sparse["sparsity"]["ways"] == {"exact": 2} and 0 < sparse["sparsity"]["active_fraction"] < 1
    assert [task["items"] for task in sparse["tasks"]] == [6, 2] and sparse["tasks"][1] == document["tasks"][1]


def test_what_the_command_refuses(relu: Path, tmp_path: Path) -> None:
    path = str(written(tmp_path / "x.jsonl", PLAIN, {}))
    model = ["-m", str(relu), "--file", path]
    assert "item 2: the fields '' are those of no known task" in error_line(powerinfer("eval", "tasks", *model))
    assert "--limit must be at least 1" in error_line(powerinfer("eval", "tasks", *model, "--limit", "0"))
    assert "options of eval tasks" in error_line(powerinfer("eval", "perplexity", *model, "--file", path))
