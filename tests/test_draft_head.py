"""The draft head of a model (MTP): read from either kind of file, beside `transformers`, in chunks and batches."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")

from draft_models import DraftModel, tier_of  # noqa: E402
from families import CONTEXT, ROUNDING, TOKENS, rms, scattered_pages  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from powerinfer import _native  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import Batch  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor  # noqa: E402
from powerinfer.devices.cpu_ffn import pack  # noqa: E402
from powerinfer.devices.disk import DiskTier, OnDisk  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.hybrid import resolve as resolving  # noqa: E402
from powerinfer.hybrid.load import _leave_draft_from_disk, load_resolved  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Resolved, model_of, ram_bytes  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.models.draft import wire_draft  # noqa: E402
from powerinfer.placement.budget import Workload, in_ram  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.placement.draft_gain import disk_gain, problem_from_disk  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402

CASES = [
    ("qwen35", False), ("qwen35-moe", False), ("qwen3-next", False), ("glm4-moe", False), ("glm4-moe", True),
    ("deepseek-v3", False), ("deepseek-v3", True), ("glm4-moe-lite", False), ("ling-2", False), ("minimax-m2", False),
    ("ernie-moe", False), ("nemotron-h-latents", False),
]  # fmt: skip
NAMES = [f"{name}{'-whole' * whole}" for name, whole in CASES]


def executor_of(checkpoint: Checkpoint, disk: DiskTier | None = None, **options: Any) -> CpuExecutor:
    settings = {"threads": 1, "context": CONTEXT, "kv_type": "f32", "prefill_chunk": TOKENS, "max_batch": 4}
    return load(checkpoint, EngineConfig(**(settings | options)), disk=disk)


def batch_of(tokens: np.ndarray, first: int, pages: np.ndarray, state: int = 0) -> Batch:
    """Tokens of one sequence from a position on, all of whose logits are wanted."""
    span, slot = np.arange(len(tokens), dtype=np.int32), np.array([state], np.int32)
    rows = np.zeros(len(tokens), np.int32)
    return Batch(np.ascontiguousarray(tokens), first + span, rows, pages[None], span, slot, slot)


def run(
    executor: CpuExecutor, tokens: np.ndarray, pages: np.ndarray, chunks: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(logits of the model, hidden states that the head reads and gives, its logits) of a text in pieces."""
    head, at, parts = executor.drafter, 0, []
    assert head is not None
    for n in chunks:
        rows = np.arange(n, dtype=np.int32)
        of_model = executor.forward(batch_of(tokens[at : at + n], at, pages)).copy()
        inputs = head.inputs(rows)
        of_head = head.forward(batch_of(tokens[at + 1 : at + n + 1], at, pages), inputs).copy()
        parts.append((of_model, inputs, head.outputs(rows), of_head))
        at += n
    assert at == len(tokens) - 1
    return tuple(np.concatenate(one) for one in zip(*parts, strict=True))  # type: ignore[return-value]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["folder", "gguf"])
@pytest.mark.parametrize(("name", "whole"), CASES, ids=NAMES)
def test_a_head_is_that_of_transformers(name: str, whole: bool, layout: str, tmp_path: Path) -> None:
    model = DraftModel(name, whole=whole)
    checkpoint = model.open(model.save(layout, tmp_path))
    assert checkpoint.notes == [] or "transposing" in checkpoint.notes[0], checkpoint.notes
    draft = checkpoint.config.draft
    assert draft is not None and (draft.embedding, draft.head, draft.final_norm) == (whole, whole, model.final_norm)
    executor = executor_of(checkpoint)
    _, *ours = run(executor, model.tokens, scattered_pages(executor, 1)[0], [TOKENS])
    executor.close()
    for got, exact, narrow in zip(ours, model.exact, model.narrow, strict=True):
        assert rms(got - exact) <= ROUNDING * rms(narrow - exact)


KINDS = ["qwen35", "glm4-moe", "deepseek-v3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[DraftModel, Path]]:
    """A model of each kind as a folder."""
    models = {name: DraftModel(name) for name in KINDS}
    return {name: (one, one.save("folder", tmp_path_factory.mktemp(name))) for name, one in models.items()}


Files = dict[str, tuple[DraftModel, Path]]


@pytest.mark.parametrize("options", [{}, {"kv_type": "q8_0", "quantize": "q8_0"}], ids=["floats", "quantised"])
@pytest.mark.parametrize("name", KINDS)
def test_chunks_give_the_same_bits(name: str, options: dict[str, Any], files: Files) -> None:
    """In one go, in pieces, token by token at the end, on more threads; and the model's own bits are those without."""
    model, path = files[name]
    quantize = {key: one for key, one in options.items() if key == "quantize"}
    of_engine = {key: one for key, one in options.items() if key != "quantize"}
    results = []
    for threads, chunks in ((1, [TOKENS]), (2, [32, 1, 30, *[1] * (TOKENS - 63)]), (1, [3] * (TOKENS // 3))):
        checkpoint = open_checkpoint(path, draft_head=True, **quantize)
        executor = executor_of(checkpoint, threads=threads, **of_engine)
        results.append(run(executor, model.tokens, scattered_pages(executor, 1)[0], chunks))
        executor.close()
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert np.array_equal(got, wanted)
    executor = executor_of(open_checkpoint(path, **quantize), **of_engine)
    assert executor.drafter is None
    alone = executor.forward(batch_of(model.tokens[:-1], 0, scattered_pages(executor, 1)[0]))
    assert np.array_equal(alone, results[0][0])


@pytest.mark.parametrize("name", KINDS)
def test_batches_give_the_bits_of_single_runs(name: str, files: Files) -> None:
    model, path = files[name]
    texts = model.tokens, np.roll(model.tokens, 7)
    executor = executor_of(open_checkpoint(path, draft_head=True))
    head, pages = executor.drafter, scattered_pages(executor, 4)
    assert head is not None
    alone = [run(executor, text, pages[at], [40, TOKENS - 40]) for at, text in enumerate(texts)]
    for at, text in enumerate(texts):
        run(executor, text[:41], pages[2 + at], [40])  # their beginnings, elsewhere
    n = TOKENS - 40
    both = Batch(
        np.concatenate([text[40:-1] for text in texts]),
        np.tile(np.arange(40, TOKENS, dtype=np.int32), 2),
        np.repeat(np.arange(2, dtype=np.int32), n),
        np.ascontiguousarray(pages[2:]),
        np.arange(2 * n, dtype=np.int32),
    )
    following = Batch(
        np.concatenate([text[41:] for text in texts]), both.positions, both.rows, both.page_table, both.logit_rows
    )
    if executor.n_states == 0:  # else the states of their beginnings are in one slot: inputs are those of `alone`
        executor.forward(both)
    inputs = np.concatenate([one[1][40:] for one in alone])
    if executor.n_states == 0:
        assert np.array_equal(head.inputs(both.logit_rows), inputs)
    together = head.forward(following, inputs)
    assert np.array_equal(together, np.concatenate([one[3][40:] for one in alone]))
    assert np.array_equal(head.outputs(both.logit_rows), np.concatenate([one[2][40:] for one in alone]))


@pytest.mark.parametrize("name", KINDS)
def test_further_drafts_leave_the_model_alone(name: str, files: Files) -> None:
    """Drafts read what the head gave before, one position on; the model then goes on as if there had been none."""
    model, path = files[name]
    executor = executor_of(open_checkpoint(path, draft_head=True))
    pages, last = scattered_pages(executor, 1)[0], np.array([0], np.int32)
    first, *_ = run(executor, model.tokens[:41], pages, [40])
    head = executor.drafter
    assert head is not None
    logits = executor.forward(batch_of(model.tokens[40:41], 40, pages))
    copied, inputs = logits.copy(), head.inputs(last)
    drafts, position = [int(model.tokens[41])], 40
    for _ in range(4):
        said = head.forward(batch_of(np.array(drafts[-1:], np.int32), position, pages), inputs)
        drafts.append(int(said[0].argmax()))
        inputs, position = head.outputs(last), position + 1
    assert np.array_equal(logits, copied)
    rest = executor.forward(batch_of(model.tokens[41:-1], 41, pages))
    wanted = executor_of(open_checkpoint(path)).forward(batch_of(model.tokens[:-1], 0, pages))
    assert np.array_equal(np.concatenate([first, copied, rest]), wanted)


def test_closing_an_executor_frees_its_head(files: Files) -> None:
    _, path = files["glm4-moe"]
    executor = executor_of(open_checkpoint(path, draft_head=True))
    head = weakref.ref(executor.drafter)  # type: ignore[type-var]
    executor.close()
    assert head() is None


# ---- files


def test_nothing_changes_where_no_head_is_asked_for(files: Files) -> None:
    for _, path in files.values():
        plain, whole = open_checkpoint(path), open_checkpoint(path, draft_head=True)
        assert plain.config.draft is None and whole.config.draft is not None
        assert plain.fingerprint == whole.fingerprint and plain.parameters == whole.parameters
        assert set(plain.names()) < set(whole.names())
        assert [note.split()[0] for note in plain.notes] == [note.split()[0] for note in whole.notes]
        executor = executor_of(plain)
        assert executor.drafter is None and executor.bytes_per_token == executor_of(whole).bytes_per_token


MISSING = ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_norm", "ffn_gate_inp", "attn_q"]


@pytest.mark.parametrize("missing", MISSING)
def test_a_head_that_lacks_a_tensor_is_left_out(missing: str, tmp_path: Path) -> None:
    model = DraftModel("glm4-moe")
    path, name = model.save("gguf", tmp_path), f"blk.{model.layers}.{missing}.weight"
    whole = model.open(path, draft_head=False)
    checkpoint = model.open(path, change=lambda keys, tensors: tensors.pop(name))
    assert checkpoint.config == whole.config
    (line,) = checkpoint.notes
    assert line.startswith("the layers that predict further tokens (MTP) are left out: tensor")
    if missing != "ffn_gate_inp":  # without a router the layer is a dense one
        assert name in line
    executor = executor_of(checkpoint)
    assert executor.drafter is None
    said = executor.forward(batch_of(model.tokens[:-1], 0, scattered_pages(executor, 1)[0]))
    assert np.array_equal(
        said, executor_of(whole).forward(batch_of(model.tokens[:-1], 0, np.arange(3, dtype=np.int32)))
    )


def test_a_tensor_of_another_shape_or_a_strange_one_leaves_it_out(tmp_path: Path) -> None:
    model = DraftModel("qwen35")
    path, at = model.save("gguf", tmp_path), f"blk.{model.layers}."

    def swap(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[f"{at}nextn.eh_proj.weight"] = tensors[f"{at}nextn.enorm.weight"]

    def add(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[f"{at}nextn.strange.weight"] = tensors[f"{at}nextn.enorm.weight"]

    for change, line in ((swap, "nextn.eh_proj.weight has shape"), (add, "nextn.strange.weight")):
        checkpoint = model.open(path, change=change)
        assert checkpoint.config.draft is None and line in checkpoint.notes[0], checkpoint.notes


def test_without_a_norm_of_its_own_a_head_has_the_models(tmp_path: Path) -> None:
    model = DraftModel("glm4-moe")
    path, name = model.save("gguf", tmp_path), f"blk.{model.layers}.nextn.shared_head_norm.weight"
    checkpoint = model.open(path, change=lambda keys, tensors: tensors.pop(name))
    draft = checkpoint.config.draft
    assert draft is not None and not draft.final_norm
    executor = executor_of(checkpoint)
    ours = run(executor, model.tokens, scattered_pages(executor, 1)[0], [TOKENS])

    def same(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name] = tensors["output_norm.weight"]

    executor = executor_of(model.open(path, change=same))
    theirs = run(executor, model.tokens, scattered_pages(executor, 1)[0], [TOKENS])
    assert all(map(np.array_equal, ours, theirs))


def test_copies_of_the_models_tensors_are_shared(tmp_path: Path) -> None:
    """Files of DeepSeek-V3 and GLM-4.5 have the embedding and the output head once more in the head's layer."""
    model = DraftModel("deepseek-v3")
    path, at = model.save("gguf", tmp_path), f"blk.{model.layers}.nextn."

    def copy(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[f"{at}embed_tokens.weight"] = tensors["token_embd.weight"]
        tensors[f"{at}shared_head_head.weight"] = tensors["output.weight"]

    checkpoint, plain = model.open(path, change=copy), model.open(path)
    assert checkpoint.config == plain.config and set(checkpoint.names()) == set(plain.names())


def test_of_several_heads_the_first_is_read(tmp_path: Path) -> None:
    model = DraftModel("glm4-moe")
    path, first, second = model.save("gguf", tmp_path), f"blk.{model.layers}.", f"blk.{model.layers + 1}."

    def add(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        keys["glm4moe.block_count"] += 1
        keys["glm4moe.nextn_predict_layers"] = 2
        tensors |= {name.replace(first, second): one for name, one in tensors.items() if name.startswith(first)}

    checkpoint = model.open(path, change=add)
    assert checkpoint.config == model.open(path).config
    assert checkpoint.notes == ["of 2 layers that predict further tokens (MTP) only the first is read"]


# ---- memory


@pytest.mark.sampled
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("quantize", [None, "q8_0"])
@pytest.mark.parametrize("name", KINDS)
def test_its_memory_is_counted(name: str, quantize: str | None, whole: bool, tmp_path: Path) -> None:
    """The bytes of matrices as the executor packs them, those of vectors, and a layer more of the cache."""
    model = DraftModel(name, whole=whole)
    path = model.save("folder", tmp_path)
    plain, drafting = (open_checkpoint(path, quantize, draft_head=one) for one in (False, True))
    without, counted = checkpoint_model(plain), checkpoint_model(drafting)
    assert without.inventory.draft == 0
    assert replace(counted.inventory, draft=0, draft_units=(), gpu_draft=0) == without.inventory
    assert counted.parameters == without.parameters
    packed = Counted()
    wire_draft(packed, open_checkpoint(path, quantize, draft_head=True))  # type: ignore[arg-type]
    assert counted.inventory.draft == packed.nbytes
    work = Workload("f16", CONTEXT, 32)
    held, before = in_ram(counted, work), in_ram(without, work)
    draft = drafting.config.draft
    assert draft is not None and held.pop("draft") == packed.nbytes
    page = cpu.kv_page_bytes("f16", draft.layer.attention)
    assert held.pop("kv") == before.pop("kv") + CONTEXT // cpu.PAGE * page
    assert held.pop("scratch") > before.pop("scratch") and held == before


class Counted(CpuExecutor):
    """A device that adds up what a draft head takes."""

    def __init__(self) -> None:
        self._pool, self.disk, self.bytes_per_token, self.nbytes = _native.Pool(1), None, 0, 0
        self._pack = partial(pack, self._pool, _native.Arena())

    def _add(self, *packed: Any) -> None:
        self.nbytes += sum(one.nbytes for one in packed)

    def norm(self, weight: Any, bias: Any = None, order: Any = None, eps: Any = None) -> Any:
        self._add(weight)
        return weight

    def attention(self, layer: int, norm: Any, qkv: Any, **vectors: Any) -> None:
        self._add(*qkv, *(one for one in vectors.values() if isinstance(one, np.ndarray)))

    def gate_attended(self, layer: int, norm: Any, matrix: Any) -> None:
        self._add(matrix)

    def latent_attention(self, layer: int, norm: Any, *parts: Any) -> None:
        *rest, k_b = parts
        self._add(*rest, self._stack(k_b))

    def latent_project(self, layer: int, v_b: Any, matrix: Any, norm: Any = None) -> None:
        self._add(self._stack(v_b), matrix)

    def project(self, layer: int, matrix: Any, *_: Any) -> None:
        self._add(matrix)

    def ffn(self, layer: int, norm: Any, gate: Any, up: Any, down: Any, *_: Any) -> None:
        self._add(gate, up, down)

    def experts(self, layer: int, norm: Any, weights: Any, out_norm: Any = None) -> None:
        self._add(self.matrix(weights.router), *map(self._stack, weights.experts()), *map(self.matrix, weights.shared))
        self._add(*(one for one in (weights.correction,) if one is not None))

    def draft_input(self, embedding: Any, embed_norm: Any, hidden_norm: Any, matrix: Any) -> None:
        self._add(self.matrix(matrix), *([] if embedding is None else [embedding.data]))

    def draft_head(self, norm: Any, matrix: Any) -> None:
        self._add(*([] if matrix is None else [self.matrix(matrix)]))


def test_it_is_left_out_where_it_cannot_be_computed(
    files: Files, monkeypatch: pytest.MonkeyPatch, described: None
) -> None:
    """Where memory is too little for it, and where some of the model stays on disk; not beside a GPU."""
    _, path = files["glm4-moe"]
    engine = EngineConfig(gpu="none", context=CONTEXT, threads=1, max_batch=1, speculate="mtp")

    def resolved(**options: Any) -> tuple[Resolved, list[str]]:
        said: list[str] = []
        return resolve(open_checkpoint(path, draft_head=True), replace(engine, **options), say=said.append), said

    placed, said = resolved()
    assert placed.checkpoint.config.draft is not None and not said
    loaded, _ = load_resolved(placed, lambda: [1, 2, 3])
    assert loaded.drafter is not None  # type: ignore[attr-defined]
    ram = ram_bytes(model_of(placed), engine)
    least, said = resolved(ram=ram)
    assert least.checkpoint.config.draft is not None and least.placement.disk is None and not said
    less, said = resolved(ram=ram - 1, disk="none")
    assert less.checkpoint.config.draft is None
    assert said == ["the layers that predict further tokens (MTP) are left out: there is too little memory for them"]
    beside, said = resolved(gpu="cpu", vram=2 << 30)
    assert beside.checkpoint.config.draft is not None and not said
    executor, _ = load_resolved(beside, lambda: [1, 2, 3])
    assert executor.drafter is not None
    executor.close()
    plan = DiskPlan(OnDisk(), {}, 1)  # less than the head takes
    _leave_draft_from_disk(beside.placed(disk=plan), said.append)  # once the GPU ran out of memory
    assert beside.checkpoint.config.draft is not None and not said, "it was asked for"
    _leave_draft_from_disk(replace(beside, engine=replace(engine, speculate="auto")).placed(disk=plan), said.append)
    assert beside.checkpoint.config.draft is None and len(said) == 1 and "0.00 times the speed" in said[0]

    def placed_on_disk(checkpoint: Checkpoint, engine: EngineConfig, *_: Any) -> Resolved:
        return Resolved(checkpoint, engine).placed(disk=plan)

    monkeypatch.setattr(resolving, "_placed", placed_on_disk)
    asked, said = resolved()
    assert asked.checkpoint.config.draft is not None and asked.placement.disk is plan and not said
    fewer, said = resolved(speculate="auto")
    assert fewer.checkpoint.config.draft is None and fewer.placement.disk is plan
    assert len(said) == 1 and "would hold more of what is read from disk" in said[0]


def test_what_is_read_from_disk_decides(files: Files) -> None:
    """Dense weights are read once for two tokens, experts for each; what the head takes could hold some of them."""
    model = checkpoint_model(open_checkpoint(files["glm4-moe"][1], draft_head=True))
    config, draft = model.config, model.inventory.draft
    dense = DiskPlan(OnDisk(frozenset(("layers.0.q",))), {}, 10 * draft)
    assert disk_gain(dense, model) == pytest.approx(1.7 * 0.9)
    assert disk_gain(replace(dense, streamed=draft // 2), model) == 0, "without the head nothing is read"
    every = sum(one.file for layer in config.experts for one in model.experts[layer])
    about = OnDisk(experts=dict.fromkeys(config.experts, 4))
    plan = DiskPlan(about, {"experts": every // 2}, 0, {"experts": every})
    share = 1 - 3 / 8  # that a token does not select
    missing = 1 - (every // 2 + draft) / every
    assert disk_gain(plan, model) == pytest.approx(1.7 * max(0.0, missing) * 3 / 8 / (0.5 * (1 - share**2)))
    assert problem_from_disk(dense, model, "auto") is None and problem_from_disk(plan, model, "mtp") is None
    for about, way, says in (
        (plan.about, "auto", "times the speed"),
        (OnDisk(neurons={0: 3}), "mtp", "neurons are read from disk"),
        (OnDisk(frozenset((model.head.name,))), "mtp", "output head"),
    ):
        assert says in (problem_from_disk(replace(plan, about=about), model, way) or "")


@pytest.mark.parametrize("name", KINDS)
def test_a_head_of_a_model_on_disk(name: str, files: Files) -> None:
    """It is in RAM; the model's matrices pass through a window, and experts are read when they are selected."""
    model, path = files[name]
    executor = executor_of(open_checkpoint(path, draft_head=True))
    expected = run(executor, model.tokens, scattered_pages(executor, 1)[0], [40, 1, TOKENS - 41])
    checkpoint = open_checkpoint(path, draft_head=True)
    executor = executor_of(checkpoint, disk=tier_of(checkpoint))
    found = run(executor, model.tokens, scattered_pages(executor, 1)[0], [40, 1, TOKENS - 41])
    assert executor.disk is not None and executor.disk.counts()["bytes"] > 0
    assert all(map(np.array_equal, found, expected))
    executor.close()


# ---- other files, and the native operator


def test_names_below_mtp(tmp_path: Path) -> None:
    """A further head, a strange module, experts in one tensor or one each, the prefix of a folder for pictures."""
    model = DraftModel("qwen35-moe")
    path = model.save("folder", tmp_path)
    file = path / "model.safetensors"
    tensors, plain = load_file(file), open_checkpoint(path, draft_head=True)
    assert plain.config.draft is not None and plain.notes == []

    def reopened(change: dict[str, np.ndarray]) -> Checkpoint:
        save_file(change, file)
        return open_checkpoint(path, draft_head=True)

    further = {name.replace("mtp.layers.0", "mtp.layers.1"): one for name, one in tensors.items()}
    several = reopened(tensors | further)
    assert several.config == plain.config
    assert several.notes == ["of 2 layers that predict further tokens (MTP) only the first is read"]
    strange = reopened(tensors | {"mtp.strange.weight": tensors["mtp.norm.weight"]})
    assert strange.config.draft is None and "strange" in strange.notes[0]
    at, n, size = "mtp.layers.0.mlp.experts", model.config.num_experts, model.config.moe_intermediate_size
    other = {name: one for name, one in tensors.items() if not name.startswith(at)}
    if f"{at}.gate_up_proj" in tensors:
        gate_up, down = tensors[f"{at}.gate_up_proj"], tensors[f"{at}.down_proj"]
        for expert in range(n):
            matrices = gate_up[expert, :size], gate_up[expert, size:], down[expert]
            for part, matrix in zip(PARTS, matrices, strict=True):
                other[f"{at}.{expert}.{part}_proj.weight"] = np.ascontiguousarray(matrix)
    else:
        parts = {part: [tensors[f"{at}.{expert}.{part}_proj.weight"] for expert in range(n)] for part in PARTS}
        both = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        other |= {f"{at}.gate_up_proj": np.stack(both), f"{at}.down_proj": np.stack(parts["down"])}
    experts = [f"layers.{model.layers}.experts_{part}" for part in PARTS]
    wanted = [reopened(tensors).take(name).float32().copy() for name in experts]
    checkpoint = reopened(other)
    assert checkpoint.config == plain.config and checkpoint.notes == []
    assert all(np.array_equal(checkpoint.take(name).float32(), one) for name, one in zip(experts, wanted, strict=True))


PARTS = ("gate", "up", "down")


@pytest.mark.parametrize(
    ("key", "value", "reads"),
    [
        ("mtp_hybrid_override_pattern", "*E", True), ("mtp_layers_block_type", ["attention", "moe"], True),
        ("mtp_hybrid_override_pattern", "**", False), ("mtp_layers_block_type", 3, False),
    ],
)  # fmt: skip
def test_a_head_of_other_layers_is_left_out(key: str, value: object, reads: bool, tmp_path: Path) -> None:
    path = DraftModel("nemotron-h-latents").save("folder", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config.pop("mtp_layers_block_type", None)
    (path / "config.json").write_text(json.dumps(config | {key: value}))
    checkpoint = open_checkpoint(path, draft_head=True)
    assert (checkpoint.config.draft is not None) == reads
    assert reads or "the layers that predict further tokens (MTP) are left out: " in checkpoint.notes[0]


def test_the_native_operator_is_checked() -> None:
    pool, arena = _native.Pool(1), _native.Arena()
    workspace, cache = _native.Workspace(pool, ""), _native.Cache("f32", [(1, 16)], 2)

    def matrix(rows: int, cols: int) -> _native.Matrix:
        return _native.pack_matrix(pool, arena, "F32", rows, cols, np.zeros(rows * cols * 4, np.uint8), None)

    def table(cols: int) -> _native.Table:
        return _native.Table("F32", 32, cols, np.zeros(32 * cols * 4, np.uint8))

    def norm(n: int) -> _native.Norm:
        return _native.Norm(np.ones(n, np.float32), 1e-6)

    def program() -> _native.Program:
        made = _native.Program(workspace, cache, 8, 64, 64, [1])
        made.embed(table(64))
        made.head(norm(64), matrix(32, 64))
        return made

    right = table(64), norm(64), norm(64), matrix(64, 128)
    program().draft_input(*right)
    wrong = {0: table(32), 1: norm(32), 2: norm(80), 3: matrix(64, 64)}
    for at, value in wrong.items():
        with pytest.raises(ValueError, match="draft head"):
            program().draft_input(*(value if number == at else one for number, one in enumerate(right)))
        with pytest.raises((TypeError, ValueError)):  # the last may be absent, but of an EAGLE head
            program().draft_input(*(None if number == at else one for number, one in enumerate(right)))
    twice = program()
    twice.draft_input(*right)
    with pytest.raises(ValueError, match="one draft head"):
        twice.draft_input(*right)
    with pytest.raises(ValueError, match="has no hidden states"):
        twice.hidden_states(np.zeros(1, np.int32), np.zeros((1, 64), np.float32), True)
