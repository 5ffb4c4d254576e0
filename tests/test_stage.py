"""Cold neurons that stream to the GPU for a long prompt: their sum, the buffers they pass through, the crossing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from prepared_models import saved_results  # noqa: E402
from sparse_models import give_bundles, give_profile, tiny_llama  # noqa: E402
from test_gpu_kernels import ROW_TYPES, Bundles, all_of, assert_close, expected, floats, make_bundles, on_device  # noqa: E402
from test_hybrid import split  # noqa: E402
from test_sparse import RELU, packed  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer import LLM, SamplingParams  # noqa: E402
from powerinfer.devices import stage as staging  # noqa: E402
from powerinfer.devices.sharing import Sharing, cpu_rates  # noqa: E402
from powerinfer.devices.stage import BESIDE, Stage, buffer_bytes  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_memory import gather, pieces  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.profile_file import open_profile  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.hybrid import crossing  # noqa: E402
from powerinfer.hybrid.crossing import Crossing  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout  # noqa: E402
from powerinfer.placement import budget  # noqa: E402
from powerinfer.placement.plan import PlanRequest  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.placement.solver import GROUP  # noqa: E402

TOKENS = 37  # more than those whose products read a weight once


def of_groups(bundles: Bundles, groups: int) -> int:
    """Bytes of a buffer for that number of whole groups."""
    return groups * (bundles.layout.group_bytes + BUNDLE_GROUP * BESIDE) + staging._PADDING


def streamed(stage: Stage, bundles: Bundles, cold: np.ndarray, x: np.ndarray, most: float = 0.0) -> torch.Tensor:
    for buffer in (*stage._host, *stage._on_device):
        buffer.fill_(255)  # no number in any type
    total = torch.zeros(x.shape, device=torch_device())
    kept = gather(bundles.layout, bundles.groups, cold)
    stage.add_sum(total, on_device(x), bundles.layout, kept, bundles.config.layers[0].ffn, bundles.vectors, most)
    return total


SOME = np.sort(np.random.default_rng(1).permutation(200)[:90]).astype(np.int32)
SPARSE = np.arange(3, 200, 60, dtype=np.int32)  # groups of one neuron, and some of none


@pytest.mark.parametrize("types", ROW_TYPES)
@pytest.mark.usefixtures("device")
def test_the_sum_of_every_type(types: tuple[str, str]) -> None:
    """Against float64, within the rounding of float32; the buffers go round several times; the same bits again."""
    bundles, x = make_bundles(96, 200, types), floats(41, TOKENS, 96)
    stage = Stage(torch_device(), of_groups(bundles, 1))
    for cold in (SOME, SPARSE, np.arange(200, dtype=np.int32)):
        want, bound, _, _ = expected(bundles, cold, x)
        got = streamed(stage, bundles, cold, x)
        assert_close(got, want, bound + 8 * np.abs(want) * 2**-23)  # pieces are added one by one
        assert torch.equal(streamed(stage, bundles, cold, x), got)
    assert (
        len(
            list(
                pieces(
                    bundles.layout,
                    gather(bundles.layout, bundles.groups, cold),
                    of_groups(bundles, 1) - staging._PADDING,
                    BESIDE,
                )
            )
        )
        == 7
    )


@pytest.mark.parametrize("types", ROW_TYPES)
@pytest.mark.usefixtures("device")
def test_what_becomes_of_a_piece_takes_no_more_than_its_buffer(
    types: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows get a larger type on a GPU."""
    bundles, sizes = make_bundles(512, 200, types), []
    stage = Stage(torch_device(), of_groups(bundles, 3))
    real = gpu.unpack

    def seen(layout: BundleLayout, rows: torch.Tensor, *more: Any) -> None:
        sizes.append(len(more[0]) * gpu.neuron_bytes(layout))
        real(layout, rows, *more)

    monkeypatch.setattr(gpu, "unpack", seen)
    streamed(stage, bundles, np.arange(200, dtype=np.int32), floats(45, TOKENS, 512))
    assert len(sizes) > 1 and max(sizes) <= stage.piece_bytes


@pytest.mark.parametrize("types", ROW_TYPES)
@pytest.mark.usefixtures("device")
def test_in_the_narrow_types_of_a_gpu(types: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the same neurons on the GPU: the operands are the same, and the sums are of float32."""
    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    bundles, x = make_bundles(96, 200, types), floats(44, TOKENS, 96)
    want = gpu.neuron_sum(all_of(bundles, SOME), on_device(x))[0].double().cpu().numpy()
    _, bound, _, _ = expected(bundles, SOME, x)
    rounding = 2**-8 if types[0] == "BF16" else 2**-11  # of h, where its sums differ
    off = rounding * np.abs(x).max() * np.abs(bundles.parts["down"][SOME]).sum(axis=0)
    assert_close(streamed(Stage(torch_device(), of_groups(bundles, 2)), bundles, SOME, x), want, 2 * bound + off)


@pytest.mark.parametrize("limits", [False, True], ids=["one threshold", "of neurons"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.usefixtures("device")
def test_biases_and_thresholds(gated: bool, limits: bool) -> None:
    bundles = make_bundles(48, 200, ("F16", "F16"), "fatrelu", gated, True, limits, limits and gated)
    x = floats(42, TOKENS, 48)
    for most in (0.0, 0.4):
        want, bound, _, _ = expected(bundles, SOME, x, None, most)
        got = streamed(Stage(torch_device(), of_groups(bundles, 2)), bundles, SOME, x, most)
        assert_close(got, want, bound + 8 * np.abs(want) * 2**-23)


def test_pieces_are_whole_groups_and_lose_nothing() -> None:
    bundles = make_bundles(96, 200, ("Q4_0", "Q4_0X32"))
    some = gather(bundles.layout, bundles.groups, SOME)
    for most in (1, of_groups(bundles, 1), of_groups(bundles, 3), 1 << 30):
        cut = list(pieces(bundles.layout, some, most, BESIDE))
        assert [piece.first for piece in cut[1:]] == [piece.last for piece in cut[:-1]]
        assert (cut[0].first, cut[-1].last) == (0, len(SOME))
        np.testing.assert_array_equal(np.concatenate([piece.rows for piece in cut]), some.rows[0])
        for piece in cut:
            size = piece.rows.nbytes + sum(part.nbytes for part in (piece.at, piece.group, piece.shared))
            assert size + 8 * len(piece.at) <= max(most, of_groups(bundles, 1))


def test_a_buffer_is_half_a_layer_at_most() -> None:
    layout, d_ff = make_bundles(96, 32, ("F16", "F16")).layout, 1000
    group = layout.group_bytes + BUNDLE_GROUP * BESIDE
    pad = staging._PADDING
    assert buffer_bytes(layout, d_ff, 1 << 40) == 16 * group + pad  # of 32
    assert buffer_bytes(layout, d_ff, 5 * group + 1) == 5 * group + 1
    assert buffer_bytes(layout, d_ff, group + pad - 1) == buffer_bytes(layout, d_ff, 0) == 0
    assert buffer_bytes(layout, 1 << 24, (9 << 20) + 1) == 8 << 20
    assert buffer_bytes(layout, 1 << 24, 1 << 40) == staging.PIECE


def test_parts_are_shared_out_by_their_bytes() -> None:
    """Nothing is left out or copied twice, in as many equal shares as threads, however short the parts are."""
    rng = np.random.default_rng(3)
    for sizes in ([917] * 36, [5000], [64, 0, 3000, 1, 0], rng.integers(0, 1000, 50).tolist()):
        for shares in (1, 3, 4):
            cut = staging.shared_out(sizes, shares)
            each = [sum(end - begin for _, begin, end in share) for share in cut]
            assert len(cut) == shares and sum(each) == sum(sizes) and max(each) - min(each) <= 1
            covered = [np.zeros(size, np.int32) for size in sizes]
            for number, begin, end in (span for share in cut for span in share):
                covered[number][begin:end] += 1
            assert all((one == 1).all() for one in covered)


@pytest.mark.usefixtures("device")
def test_what_several_threads_copy_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts shorter than what a thread is worth, as experts' matrices are, and longer ones; some are not there."""
    monkeypatch.setattr(staging, "usable_cores", lambda: (4, ""))
    monkeypatch.setattr(staging, "_LEAST_SHARE", 1 << 12)
    rng, stage = np.random.default_rng(4), Stage(torch_device(), 1 << 16)
    shares: list[int] = []
    real = staging.shared_out
    monkeypatch.setattr(staging, "shared_out", lambda sizes, n: (shares.append(n), real(sizes, n))[1])
    for sizes in ([1000] * 30, [40_000, 3], [50] * 4):
        parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        with stage.sent([parts[0], None, *parts[1:]]) as sent:
            assert sent[1] is None
            for part, on_device_ in zip(parts, [sent[0], *sent[2:]], strict=True):
                assert on_device_ is not None
                np.testing.assert_array_equal(on_device_.cpu().numpy(), part)
    assert shares == [4, 4, 1]
    stage.close()


@pytest.mark.usefixtures("device")
def test_registered_memory_is_not_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what lies outside of its whole pages; nor where a system refuses, or once it is released."""
    monkeypatch.setattr("powerinfer.devices.registered.LEAST_BYTES", 1 << 12)
    rng, stage, staged = np.random.default_rng(5), Stage(torch_device(), 1 << 17), []
    copy = Stage._copy
    monkeypatch.setattr(
        Stage, "_copy", lambda self, copied: (staged.append(sum(len(one) for _, one in copied)), copy(self, copied))[1]
    )
    memory = rng.integers(0, 256, 3 << 16, np.uint8)
    memory.flags.writeable = False
    page, first = PAGESIZE, -memory.ctypes.data % PAGESIZE
    other = rng.integers(0, 256, 777, np.uint8)

    def sent(begin: int, end: int) -> int:
        """The bytes that the CPU copied of these, and others around them."""
        with stage.sent([other, memory[begin:end], None, other]) as (before, own, none, behind):
            assert before is not None and own is not None and none is None and behind is not None
            np.testing.assert_array_equal(own.cpu().numpy(), memory[begin:end])
            for part in (before, behind):
                np.testing.assert_array_equal(part.cpu().numpy(), other)
        return staged.pop() - 2 * len(other)

    stage.registered.note(memory)
    assert sent(0, 1 << 16) == 1 << 16 and not stage.registered.nbytes, "it is not known yet whether steps stream"
    stage.registered.active = True
    assert sent(first, first + page) == 0 and stage.registered.nbytes
    stage.settle()  # they do not
    assert sent(0, 1 << 16) == 1 << 16 and not stage.registered.nbytes
    stage.least = 33
    stage.settle()
    assert stage.registered.nbytes == (len(memory) - first) // page * page
    last = first + (len(memory) - first) // page * page
    assert sent(first, first + 5 * page + 9) == 0 and sent(0, first + page) == first
    assert sent(last - page, len(memory)) == len(memory) - last
    assert sent(first + 7, first + 1000) == 0
    stage.registered.note(np.empty(100, np.uint8))  # less than a page
    stage.registered.release(memory)
    assert sent(0, 1 << 16) == 1 << 16
    monkeypatch.setattr(type(stage._streams), "register", lambda *_: None)
    stage.registered.note(memory)
    assert sent(0, 1 << 16) == 1 << 16
    stage.close()


# ---- In a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-relu", "falcon-40b", "opt"])
@pytest.mark.usefixtures("device")
def test_a_prompt_is_the_dense_answer_whoever_computes_it(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    path = packed(model, tmp_path)
    checkpoint = open_checkpoint(path)
    layout, d_ff = open_bundles(checkpoint, None, cpu.bundle_row_bytes).layouts[0], checkpoint.config.widest_ffn
    for share in (0.0, 0.5, 1.0):
        stage = Stage(torch_device(), buffer_bytes(layout, d_ff, 1 << 15))
        with split(path, share, stage=stage) as (executor, _):
            pages = families.scattered_pages(executor, 1)[0]
            answers = []
            for least in (None, 33, 33):
                stage.least = least
                answers.append(families.run_chunks(executor, tokens, [len(tokens) - 20, 20], pages))
                assert families.rms(answers[-1] - truth) <= allowed, (share, least)
            np.testing.assert_array_equal(answers[1], answers[2])  # same bits again
            assert (answers[0] != answers[1]).any() == (share < 1), "nothing streamed"


@pytest.mark.usefixtures("device")
def test_neurons_that_are_swapped_stay_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are placed in the memory of others; what takes more memory is registered anew."""
    monkeypatch.setattr("powerinfer.devices.registered.LEAST_BYTES", 1 << 12)
    truth, registered = Truth(case_named("llama-relu"), half=True), list[int]()
    stage = Stage(torch_device(), 1 << 15)
    kind = type(stage._streams)
    register = kind.register

    def noted(streams: Any, address: int, nbytes: int) -> Callable[[], None] | None:
        registered.append(nbytes)
        return register(streams, address, nbytes)

    monkeypatch.setattr(kind, "register", noted)
    with split(packed(truth, tmp_path), 0.5, stage=stage) as (executor, ffns):
        assert not registered
        stage.least = 33
        stage.settle()
        layers, nbytes = len(registered), stage.registered.nbytes
        assert layers == len(ffns) and nbytes == sum(registered)
        ffns[0].swap(ffns[0].hot[:1], ffns[0].cold[:1])
        assert len(registered) == layers and stage.registered.nbytes == nbytes
        ffns[0].place(ffns[0].hot[:0])
        assert len(registered) == layers and stage.registered.nbytes < nbytes
        pages = families.scattered_pages(executor, 1)[0]
        tokens = families.prompt(case_named("llama-relu"))
        ours = families.run_chunks(executor, tokens, [len(tokens)], pages)
        assert families.rms(ours - truth.logits[0]) <= truth.allowed()
        assert len(registered) == layers + 1 and stage.registered.nbytes > nbytes, "when it is sent first"


PASSED = [case for case in RELU if case.kind not in ("qwen3_5_text", "plm")]  # the CPU has states, and latents


@pytest.mark.sampled
@pytest.mark.parametrize("case", PASSED, ids=lambda case: case.name)
@pytest.mark.usefixtures("device")
def test_layers_in_ram_stream_with_their_neurons(
    case: families.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a layer whose neurons are split: bundles, attention and cache, so that the CPU computes nothing of a long
    prompt but embedding and head; what follows is decoded by the CPU with the cache that came back."""
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    path = packed(model, tmp_path)
    stage = Stage(torch_device(), 1 << 15)
    with split(path, 0.5, layers=1, head=False, stage=stage, passes=True) as (executor, _):
        streamed = executor.streamed
        assert streamed is not None
        assert {own.layer for own in streamed.spans} == set(range(1, model.config.num_hidden_layers))
        pages, answers = families.scattered_pages(executor, 3), []
        parts: list[tuple[int | None, int | None, int]] = []
        run_part = executor.cpu.run_part
        monkeypatch.setattr(
            executor.cpu,
            "run_part",
            lambda batch, at, to: (parts.append((at, to, len(batch.tokens))), run_part(batch, at, to))[1],
        )
        for least, own in zip((None, 33, 33), pages, strict=True):
            stage.least = least
            parts.clear()
            answers.append(families.run_chunks(executor, tokens, [40, 1, len(tokens) - 41], own))
            assert families.rms(answers[-1] - truth) <= allowed, least
            assert all(at in (None, to) and tokens >= 33 for at, to, tokens in parts), "the CPU computed layers"
            assert bool(parts) == (least is not None)
        np.testing.assert_array_equal(answers[1], answers[2])
        assert (answers[0] != answers[1]).any(), "nothing streamed"
        executor.gpu.rehearse(2)


# ---- The crossing ----------------------------------------------------------------------------------------------------


def lines(cpu: float, gpu_s: float) -> Callable[[int, bool], float]:
    """The CPU takes so long for a token, streaming so long for any number."""
    return lambda tokens, streams: gpu_s if streams else cpu * tokens


def test_the_crossing_is_where_the_lines_cross() -> None:
    sizes = (40, 64, 128, 256, 300)
    for at in (50, 100, 200, 290):
        found = crossing.find(sizes, lines(1.0, crossing.GAIN * at))
        assert found.least is not None and at <= found.least <= at + 1
        assert [tokens for tokens, _, _ in found.tried] == [size for size in sizes if size < at] + [
            next(size for size in sizes if size > at)
        ]
    assert crossing.find(sizes, lines(1.0, 20.0)).least == gpu.FEW + 1
    assert crossing.find(sizes, lines(1.0, 1000.0)).least is None


def test_the_rarest_experts_are_shared() -> None:
    """As many as the CPU has computed when the last of the others has come; what nobody needs is no work."""
    even = Sharing(33, 100, 1.0, 0.5, 0.25)
    assert even.takes(33) and even.takes(100) and not even.takes(32) and not even.takes(101)
    for counts, streamed, wanted in (
        ([4, 0, 2, 8, 1, 0], 0, [1, 2, 4, 5]),  # 0.75 + 1.0 of 2, then 1.5 more of 1
        ([4, 0, 2, 8, 1, 0], 3, [0, 1, 2, 4, 5]),
        ([0, 0, 0], 2, [0, 1, 2]),
        ([60, 60], 1, []),
        ([], 4, []),
    ):
        assert even.choose(np.array(counts, np.int64), streamed).tolist() == wanted, counts
    assert cpu_rates((10 * 0.5 + 40 * 0.25, 10, 40), (12 * 0.5 + 80 * 0.25, 12, 80)) == pytest.approx((0.5, 0.25))
    assert cpu_rates((1.0, 10, 40), (4.0, 10, 80)) == (0.0, 0.05), "no expert takes less than no time"


def test_the_division_of_experts_is_kept_where_it_is_faster() -> None:
    found = Crossing(150, ((64, 1.0, 3.0), (128, 2.0, 3.0), (256, 4.0, 3.0)))
    rates, sizes = Sharing(33, 1 << 40, 0.1, 0.1, 0.1), (64, 128, 256, 512, 1024)

    def shared(gains: set[int]) -> Crossing:
        def seconds(tokens: int, on: bool) -> float:
            return 0.5 if on and tokens in gains else 3.0

        return crossing.find_sharing(found, sizes, rates, seconds)

    for gains, wanted in (
        ({128, 256, 512}, (128, 512)), ({256}, (256, 256)), ({64, 128, 256, 512, 1024}, (64, 1024)), ({128, 512}, None),
        (set(), None), ({64, 256}, (256, 256)),
    ):  # fmt: skip
        result = shared(gains)
        if wanted is None:
            assert result.sharing is None and result.streams_from == 150
        else:
            assert result.sharing == replace(rates, first=wanted[0], last=wanted[1])
            assert result.streams_from == min(150, wanted[0])
            assert f"up to {wanted[1]} but for the rarest" in str(result.choice("experts"))


PROMPT, SHORT = [5, 9, 2] * 23, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def loaded(path: Path, **more: Any) -> tuple[dict[str, str], dict[str, Any], list[int]]:
    """(choices, report, the answer to a prompt) with room for some of the neurons on the emulated GPU."""
    with LLM(path, **{"threads": 1, "context": 96, "prefill_chunk": 64, "max_batch": 2, "gpu": "cpu", **more}) as llm:
        told = llm.sparsity
        assert told is not None
        return llm.choices, told, llm.generate([PROMPT], SHORT)[0].token_ids


def test_the_crossing_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    monkeypatch.setattr(budget, "STAGED", 2)  # half of what is left, of very little
    monkeypatch.setattr(measure, "measured", lambda *_, **__: load("pc-low"))
    checkpoint = open_checkpoint(path)
    model, profile = checkpoint_model(checkpoint), open_profile(checkpoint, None)
    request = PlanRequest(model, profile, load("pc-low"), context=96, chunk=64, requests=2)
    given: dict[str, Any] = {"vram": request.vram_for(7) - 7 * GROUP * model.gpu_neuron // 2, "ram": 1 << 30}
    file = Path(f"{path}.powerinfer") / "trials.json"
    wanted = loaded(path, trial=False, **given)
    assert "nothing was measured" in wanted[0]["prefill"] and wanted[1]["streams_from"] is None
    assert not saved_results(file, "prompts")

    choices, told, answer = loaded(path, **given)  # as it is
    assert "measured in" in choices["prefill"] and answer == wanted[2]
    entry = saved_results(file, "prompts")[0]
    assert entry["least"] == told["streams_from"] and entry["tried"][0][0] == 64 and entry["tried"][0][1] > 0

    def found(least: int | None) -> Callable[..., Crossing]:
        return lambda *_: Crossing(least, ((40, 1e-3, 2e-3),))

    sums = []
    add_sum = Stage.add_sum
    monkeypatch.setattr(Stage, "add_sum", lambda self, *more: (sums.append(len(more[1])), add_sum(self, *more)))
    monkeypatch.setattr(crossing, "measured", found(50))
    assert loaded(path, retrial=True, **given)[1]["streams_from"] == 50
    assert set(sums) == {64}, "the first piece of the prompt streams, what is left of it does not"
    monkeypatch.setattr(crossing, "measured", None)
    choices, told, answer = loaded(path, **given)
    assert "measured earlier" in choices["prefill"] and "stream from 50 tokens" in choices["prefill"]
    assert told["streams_from"] == 50 and answer == wanted[2]
    assert loaded(path, trial=False, **given)[1]["streams_from"] == 50

    monkeypatch.setattr(crossing, "measured", found(None))
    choices, told, _ = loaded(path, prefill_chunk=63, **given)  # another key: measured, and saved beside
    assert "the CPU computes cold neurons" in choices["prefill"] and told["streams_from"] is None
    assert [one["least"] for one in saved_results(file, "prompts")] == [None, 50]
    for damaged in ("{", file.read_text().replace('"least": ', '"least": -1')):
        file.write_text(damaged)
        assert loaded(path, **given)[1]["streams_from"] is None
        assert saved_results(file, "prompts")[0]["least"] is None
