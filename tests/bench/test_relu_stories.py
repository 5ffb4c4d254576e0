"""runs/: llama2.c checkpoints, the torch model that is trained, and the training, on tiny random models."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from powerinfer import LLM  # noqa: E402
from powerinfer.evaluate import perplexity  # noqa: E402
from runs import relu_llama, relu_stories  # noqa: E402
from runs.llama2c import BOS, Shape, read_checkpoint, read_tokens, write_gguf  # noqa: E402
from runs.relu_llama import Cache, Llama  # noqa: E402
from runs.relu_stories import Original, Recipe, Training  # noqa: E402

SHAPE = Shape(d_model=48, d_ff=80, n_layers=3, n_heads=4, n_kv_heads=2, vocab=300, context=64)


def checkpoint(shape: Shape = SHAPE, seed: int = 1) -> bytes:
    """A llama2.c checkpoint with random weights, then its tokenizer, both as its exporter writes them."""
    random = np.random.default_rng(seed)
    sizes = (shape.d_model, shape.d_ff, shape.n_layers, shape.n_heads, shape.n_kv_heads)
    data = struct.pack("<7i", *sizes, shape.vocab if shape.tied else -shape.vocab, shape.context)
    for name, size in shape.tensors():
        size = (shape.n_layers, *size) if "{}" in name else size
        values = random.normal(size=size) * (0.5 if "norm" in name else size[-1] ** -0.5) + ("norm" in name)
        data += values.astype("<f4").tobytes()
    data += np.zeros(shape.context * shape.head_dim, "<f4").tobytes()
    if not shape.tied:
        data += random.normal(size=(shape.vocab, shape.d_model)).astype("<f4").tobytes()
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(chr(byte).encode() for byte in range(256))]
    pieces += [b" ", *(bytes([97 + index]) * 2 for index in range(26)), b" a", b" b"]
    pieces += [b"zz%d" % index for index in range(shape.vocab - len(pieces))]
    data += struct.pack("<i", max(map(len, pieces)))
    for index, piece in enumerate(pieces):
        data += struct.pack("<fi", -float(max(0, index - 259)), len(piece)) + piece
    return data


def original(shape: Shape = SHAPE, seed: int = 1) -> Original:
    data = checkpoint(shape, seed)
    found, weights, at = read_checkpoint(data)
    assert found == shape
    return Original(shape, {name: torch.tensor(w) for name, w in weights.items()}, read_tokens(data[at:], shape.vocab))


def random_windows(count: int, seed: int = 5) -> torch.Tensor:
    rows = torch.randint(3, SHAPE.vocab, (count, SHAPE.context), generator=torch.Generator().manual_seed(seed))
    rows[:, 0] = BOS
    return rows


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K for a rotation of halves instead of neighbours."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def oracle(made: Original, activation: str) -> torch.Tensor:
    """Logits of transformers' LLaMA in float64 for two random windows."""
    shape = made.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        hidden_act=activation,
        tie_word_embeddings=shape.tied,
    )
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inner = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    inner |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
    inner |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    state = {}
    for name, values in made.weights.items():
        if name.endswith(("attn_q", "attn_k")):
            values = halves(values, shape.n_heads if name.endswith("q") else shape.n_kv_heads)
        *block, kind = name.split(".")
        state[(f"model.layers.{block[1]}.{inner[kind]}" if block else names[kind]) + ".weight"] = values
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if shape.tied else [])
    with torch.no_grad():
        return model.double()(random_windows(2)).logits


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_torch_model_is_transformers_llama(activation, tied):
    made = original(replace(SHAPE, tied=tied))
    model = Llama(made.shape, made.weights, activation)
    truth = oracle(made, activation)
    with torch.no_grad():
        error = (model.logits(model.states(random_windows(2))) - truth).abs().max()
    assert error < 1e-5 * truth.abs().max()
    assert (oracle(made, "relu" if activation == "silu" else "silu") - truth).abs().max() > 0.01 * truth.abs().max()


@pytest.mark.parametrize("activation", ["silu", "relu", "drelu", "fatrelu"])
def test_the_engine_computes_what_torch_does(activation, tmp_path: Path):
    """The file names the activation; grouped heads, interleaved rotation, the tied head. All in float32."""
    made, path = original(), tmp_path / "model.gguf"
    threshold = 0.25 if activation == "fatrelu" else 0.0
    arrays = {name: w.numpy() for name, w in made.weights.items()}
    write_gguf(path, "tiny", made.shape, arrays, made.tokens, activation, threshold, float16=False)
    model = Llama(made.shape, made.weights, activation, threshold)
    rows = random_windows(1)
    truth = model.logits(model.states(rows))[0].detach().numpy()
    found = []
    with LLM(path, threads=1, kv_type="f32", trial=False) as llm:
        assert llm.config.activations == activation
        llm.score(rows[0].tolist(), 0, lambda at, logits: found.append(logits.copy()))
    np.testing.assert_allclose(np.concatenate(found), truth, rtol=0, atol=2e-5 * np.abs(truth).max())


def test_the_text_and_its_perplexity_are_those_of_the_engine(tmp_path: Path):
    made, path = original(), tmp_path / "model.gguf"
    made.write(path, made.weights, "relu", float16=False)
    text = "aa bb a b zz cc, dd! " * 40
    model = Llama(made.shape, made.weights, "relu")
    with LLM(path, threads=1, kv_type="f32", trial=False) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer.decode(tokenizer.encode(text, special=False)).strip() == text.strip()
        assert BOS in tokenizer.eos_ids  # a story ends where the next one begins
        cut = relu_llama.windows(tokenizer.encode(text, special=False), SHAPE.context)
        theirs = perplexity(llm, text, SHAPE.context)
    assert len(cut) > 2
    assert relu_llama.evaluate(model, cut, rows=2)[0] == pytest.approx(theirs.perplexity, rel=1e-4)


def test_neurons_that_fired_are_counted():
    model = Llama(SHAPE, original().weights, "drelu")
    rows, expected = random_windows(3), torch.zeros(SHAPE.n_layers, SHAPE.d_ff, dtype=torch.int64)

    def count(layer, seen):
        x = seen.x.flatten(0, 1)
        gate, up = (x @ model.weights[f"blk.{layer}.ffn_{part}"].T for part in ("gate", "up"))
        expected[layer] += ((gate > 0) & (up > 0)).sum(0)

    model.states(rows, count)
    _, counts = relu_llama.evaluate(model, rows, rows=2)
    assert torch.equal(counts, expected)
    assert 0 < counts.sum() < rows.numel() * SHAPE.n_layers * SHAPE.d_ff / 2


def test_a_cache_changes_nothing():
    model = Llama(SHAPE, original().weights)
    rows = random_windows(2)
    cache = Cache(model, 2)
    with torch.no_grad():
        whole = model.states(rows)
        parts = [model.states(rows[:, :20], cache=cache)]
        parts += [model.states(rows[:, at : at + 1], cache=cache) for at in range(20, SHAPE.context)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_samples_are_seeded_and_likely():
    model = Llama(SHAPE, original().weights)

    def draw(seed: int) -> torch.Tensor:
        return relu_llama.sample(model, 8, torch.Generator().manual_seed(seed), top_k=5)

    rows = draw(3)
    assert torch.equal(rows, draw(3)) and not torch.equal(rows, draw(4))
    assert (rows[:, 0] == BOS).all()
    logits = model.logits(model.states(rows)[:, :-1]).detach()
    rank = (logits > logits.gather(-1, rows[:, 1:, None])).sum(-1)
    assert rank.max() == 4  # of the five best, and not always the best


def test_stories_are_cut_out_of_a_row():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    row = [BOS, *map(ord, " One. Two"), BOS, *map(ord, 'Three. "Four!" Fi')]
    assert relu_stories.stories(row, Letters()) == ["One. Two", 'Three. "Four!"']
    assert relu_stories.stories([BOS, *map(ord, "no end")], Letters()) == []


def test_turning_neurons_keeps_the_model_and_helps_drelu():
    made, rows = original(), random_windows(4)
    teacher, model = Llama(SHAPE, made.weights), Llama(SHAPE, made.weights)
    relu_llama.oriented(model, teacher, rows)
    torch.testing.assert_close(model.states(rows), teacher.states(rows), rtol=1e-4, atol=1e-5)
    before, after = (Llama(SHAPE, m.weights, "drelu") for m in (teacher, model))
    losses = [float(relu_llama.regression_loss(m, teacher, rows)[0]) for m in (before, after)]
    assert losses[1] < losses[0]


def test_losses_are_zero_for_the_teacher_itself():
    teacher, rows = Llama(SHAPE, original().weights), random_windows(2)
    same, other = (Llama(SHAPE, teacher.weights, activation) for activation in ("silu", "relu"))
    words = torch.arange(SHAPE.vocab)
    assert float(relu_llama.regression_loss(same, teacher, rows)[0]) < 1e-9
    assert float(relu_llama.regression_loss(other, teacher, rows)[0]) > 0.05
    assert abs(float(relu_llama.distillation_loss(same, teacher, rows, words)[0])) < 1e-5
    found, _ = relu_llama.distillation_loss(other, teacher, rows, words)
    p, q = ((m.logits(m.states(rows)).log_softmax(-1).detach()) for m in (teacher, other))
    assert float(found) == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3) and float(found) > 0.01


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_the_penalty_is_about_the_share_that_fires(activation):
    """Far from zero exactly; whatever the scale of the weights; and going down it silences neurons."""
    random = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (2, 50, 40), generator=random) * 2.0 - 1
    gate, up = (5 * signs).requires_grad_().unbind()

    def share(scale: float) -> torch.Tensor:
        h = relu_llama.hidden_of(gate * scale, up * scale, activation)
        return relu_llama.firing(relu_llama.Pass(gate, gate * scale, up * scale, h, h), activation)

    fires = float((relu_llama.hidden_of(gate, up, activation) != 0).double().mean())
    assert share(1).item() == pytest.approx(fires, abs=0.02) and 0.1 < fires < 0.6
    assert share(100).item() == pytest.approx(share(0.01).item(), rel=1e-4)
    (slope,) = torch.autograd.grad(share(1), gate)
    assert (slope > 0).any() and (slope >= 0).all()


def test_training_lowers_the_loss_and_goes_on_where_it_was(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(relu_stories, "fast_type", lambda: torch.float32)
    monkeypatch.setattr(Training, "SAVE_EVERY", 4)
    made, text = original(), random_windows(40)
    recipe = Recipe("relu", regress=8, distil=8, penalty=(0.0, 0.1))
    folders = [tmp_path / name for name in ("whole", "broken")]
    for folder in folders:
        folder.mkdir()
    model = relu_stories.train("m", recipe, made, text, folders[0])
    teacher, first = made.model(), Llama(SHAPE, made.weights, "relu")
    with torch.no_grad():
        losses = [float(relu_llama.regression_loss(m, teacher, text)[0]) for m in (first, model)]
    assert losses[1] < 0.8 * losses[0]
    assert not any(torch.equal(w, made.weights[name]) for name, w in model.weights.items() if relu_llama.is_ffn(name))
    assert all(torch.equal(w, made.weights[name]) for name, w in model.weights.items() if not relu_llama.is_ffn(name))

    class Killed(Exception):
        pass

    def kill_in(name: str, step: int) -> None:
        calls = iter(range(1, 100))
        whole = getattr(relu_llama, name)

        def loss(*args):
            if next(calls) == step:
                raise Killed
            return whole(*args)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(relu_stories, name, loss)
            relu_stories.train("m", recipe, made, text, folders[1])

    kill_in("regression_loss", 7)
    kill_in("distillation_loss", 6)
    again = relu_stories.train("m", recipe, made, text, folders[1])
    for name, values in model.weights.items():
        assert torch.equal(values, again.weights[name]), name


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relu_stories, "fast_type", lambda: torch.float32)
    names = ["stories15M-relu", "stories15M-drelu"]
    recipes = {name: Recipe(name.rpartition("-")[2], 2, 2, (0.0, 0.1)) for name in names}
    monkeypatch.setattr(relu_stories, "RECIPES", recipes)
    (tmp_path / "llama2.data").write_bytes(checkpoint())
    for name, letters in (("train.txt", "once a cat sat. "), ("heldout.txt", "a dog ran far. ")):
        (tmp_path / name).write_text(letters * 60)

    def make(*models: str) -> dict[str, dict[str, object]]:
        relu_stories.make(tmp_path, list(models), 1024, 512)
        return json.loads((tmp_path / "figures.json").read_text())

    found = make(names[0])
    assert list(found) == [names[0], "stories15M"] and found["stories15M"]["zeros"] < 0.01
    assert 0.2 < found[names[0]]["zeros"] < 0.8 and found[names[0]]["perplexity"] > 1
    assert not list(tmp_path.glob("*.state.*")) and not list(tmp_path.glob("*.part"))
    seen = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    both = make(*names)
    assert list(both) == [names[0], "stories15M", names[1]] and {k: both[k] for k in found} == found
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {name for name in seen if seen[name] != kept[name]} == {"figures.json"}
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if make(*names) == both}
    assert again == kept, "nothing is written where everything is there"
    with LLM(tmp_path / f"{names[1]}-F16.gguf", threads=1) as llm:
        assert llm.config.activations == "drelu"


def test_a_text_of_less_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="3 windows"):
        next(relu_llama.batches(random_windows(3), 4, seed=1))


def test_the_rate_rises_then_falls():
    factors = [relu_stories.pace(step, 100) for step in range(100)]
    assert factors.index(max(factors)) in range(15, 25) and max(factors) <= 1
    assert factors[0] == pytest.approx(0.05) and factors[-1] == pytest.approx(0.05, abs=0.002)
    assert math.isclose(relu_stories.pace(0, 1), 0.05)


def test_damaged_checkpoints_are_refused():
    data = checkpoint()
    tokens = data[read_checkpoint(data)[2] :]
    for bad in (b"", data[:27], data[:1000], b"\0" * 28, struct.pack("<7i", 48, 80, 3, 5, 5, 300, 64) + data[28:]):
        with pytest.raises(ValueError, match=r"llama2\.c checkpoint"):
            read_checkpoint(bad)
    for bad in (tokens[:40], tokens[:-1], tokens + b"more"):
        with pytest.raises(ValueError, match=r"llama2\.c tokenizer"):
            read_tokens(bad, SHAPE.vocab)
