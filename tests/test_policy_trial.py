"""`--expert-policy auto`: policies are tried by decoding under each, and the choice is kept. Torch's CPU is the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import experts_gguf
from prepared_models import saved_results
from test_experts import model as tiny_model

torch = pytest.importorskip("torch")

from powerinfer import LLM, PowerInferError, SamplingParams, system  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.quant import BLOCK_TYPES  # noqa: E402
from powerinfer.hybrid import policy_trial, vram  # noqa: E402
from powerinfer.hybrid.experts import HybridExperts  # noqa: E402
from powerinfer.hybrid.policy_trial import ROUNDS, WARM_UP  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import needs  # noqa: E402
from powerinfer.kernels import gpu_experts  # noqa: E402
from powerinfer.placement.experts import EXPERT_POLICIES  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.sparsity.trials import INTERRUPTED, fastest  # noqa: E402
from powerinfer.system import Disturbance  # noqa: E402

pytestmark = pytest.mark.usefixtures("described")

F64 = next(at for at, one in BLOCK_TYPES.items() if one.name == "F64")
BASE = EngineConfig(threads=1, context=64, prefill_chunk=32, gpu="cpu")


def choose(seconds: dict[str, list[float]]) -> str:
    return fastest(seconds, "static", policy_trial.GAIN)


def test_what_is_clearly_faster_is_chosen() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.0, 1.0]
    assert choose({"static": base}) == "static"
    assert choose({"static": base, "lru": [0.8] * 6, "lfu": [0.7] * 6, "dynamic": [0.9] * 6}) == "lfu"
    assert choose({"static": base, "lru": [0.98 * one for one in base]}) == "static", "within the noise"
    once, twice = [0.5, 0.5, 0.5, 0.5, 0.5, 2.0], [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    assert choose({"static": base, "lru": once}) == "lru"
    assert choose({"static": base, "lru": twice}) == "static", "not faster often enough"
    assert choose({"static": [1.0], "lru": [0.5]}) == "static", "one round is none"


@pytest.fixture
def room(tmp_path: Path) -> EngineConfig:
    """Options with which five of eight experts are on the GPU."""
    path = tiny_model(tmp_path)
    each = checkpoint_model(open_checkpoint(path)).expert_bytes(0)[0]
    return replace(BASE, vram=needs(resolve(open_checkpoint(path), BASE)).vram - 3 * each)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Sets the seconds that a step takes under each policy, in one layer; nothing else takes time."""
    now, taken = [0.0], dict.fromkeys(EXPERT_POLICIES, 0.0)
    monkeypatch.setattr(policy_trial, "finished", lambda device: now[0])
    before = HybridExperts._sum_cold

    def sum_cold(ffn: HybridExperts, step: Any) -> None:
        now[0] += 0.0 if ffn._copier is None else taken[ffn._copier.policy.name]
        before(ffn, step)

    monkeypatch.setattr(HybridExperts, "_sum_cold", sum_cold)
    yield taken.update


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps: what these take is said, not measured."""
    monkeypatch.setattr(policy_trial, "BLOCK", 2)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets the cores that other programs take: none, until then."""
    monkeypatch.setattr(Disturbance, "cores", 0.0)
    yield lambda cores: monkeypatch.setattr(Disturbance, "cores", cores)


def load(folder: Path, engine: EngineConfig, policy: str = "auto", **more: Any) -> tuple[list[int], LLM]:
    llm = LLM(
        folder / "m.gguf",
        threads=1,
        context=64,
        prefill_chunk=32,
        gpu="cpu",
        vram=engine.vram,
        expert_policy=policy,
        **more,
    )
    found = llm.generate("ab", SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True))
    return found.token_ids, llm


def test_the_fastest_is_kept(room: EngineConfig, tmp_path: Path, slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow({"static": 4, "lru": 3, "lfu": 2, "dynamic": 5})
    first, llm = load(tmp_path, room)
    assert llm.choices["experts"].startswith("lfu (a step takes 8e+03 ms with static, 6e+03 ms with lru, 4e+03 ms with")
    assert "kept in" in llm.choices["experts"] and llm.sparsity["policy"] == "lfu"
    llm.close()
    (kept,) = saved_results(tmp_path / "m.gguf.powerinfer/trials.json", "expert policies")
    assert kept["policy"] == "lfu" and kept["seconds"] == {"static": 8, "lru": 6, "lfu": 4, "dynamic": 10}
    slow({"static": 1, "lru": 3, "lfu": 9, "dynamic": 5})
    with monkeypatch.context() as patch:
        patch.setattr(policy_trial, "measured", lambda *given: pytest.fail("it is chosen already"))
        again, llm = load(tmp_path, room)
    assert again == first and "chosen earlier" in llm.choices["experts"] and llm.sparsity["policy"] == "lfu"
    assert again == load_and_close(tmp_path, room, "lfu"), "as if it had been asked for"
    llm.close()
    anew, llm = load(tmp_path, room, retrial=True)
    assert llm.choices["experts"].startswith("static (") and anew == load_and_close(tmp_path, room, "static")
    llm.close()


def load_and_close(folder: Path, engine: EngineConfig, policy: str) -> list[int]:
    found, llm = load(folder, engine, policy)
    llm.close()
    return found


def test_static_is_loaded_as_ever(room: EngineConfig, tmp_path: Path, slow: Any) -> None:
    """Within the noise; then only the cold experts are in RAM, and the plan is that of `static`."""
    slow({"static": 1.0, "lru": 0.98, "lfu": 1.0, "dynamic": 1.0})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    auto = replace(room, expert_policy="auto")
    before = resolve(checkpoint, auto)
    assert before.policy.name is None and before.placement.experts is not None
    assert needs(before).ram == needs(resolve(checkpoint, replace(room, expert_policy="lru"))).ram
    first, llm = load(tmp_path, room)
    plain = load_and_close(tmp_path, room, "static")
    assert first == plain and llm.sparsity["policy"] == "static" and llm.sparsity["copied"] == 0
    cold = sum(ffn.cold_bytes for ffn in llm._sparsity.ffns)  # type: ignore[attr-defined]
    llm.close()
    _, llm = load(tmp_path, room, "lru")
    assert cold < sum(ffn.cold_bytes for ffn in llm._sparsity.ffns)  # type: ignore[attr-defined]
    llm.close()
    after, wanted = resolve(checkpoint, auto), resolve(checkpoint, room)
    assert after.policy.name == "static" and needs(after) == needs(wanted) and wanted.placement.experts is not None
    assert after.placement.experts is not None
    assert [own.tolist() for own in after.placement.experts] == [own.tolist() for own in wanted.placement.experts]


def test_every_policy_decodes_the_same_steps(
    room: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By turns, and each finds the experts on the GPU that it left there."""
    monkeypatch.setattr(policy_trial, "BLOCK", 64)
    seen: list[tuple[str, int, int, list[list[int]]]] = []
    before, copiers, policies = policy_trial.decode_one, [], []
    of_ffns, of_policies = policy_trial.measured, {}

    def measured(executor: Any, gpus: Any, *rest: Any) -> Any:
        (gpu,) = gpus
        copiers.append(gpu.copier)

        def made(name: str) -> Any:
            of_policies[name] = gpu.make(name)
            policies.append(name)
            return of_policies[name]

        return of_ffns(executor, [replace(gpu, make=made)], *rest)

    def decode(executor: Any, token: Any, at: int) -> None:
        name, ffns = copiers[0].policy.name, list(copiers[0]._ffns.values())
        own = [sorted(of_policies[name].resident(ffn.layer).tolist()) for ffn in ffns]
        if at % (64 // ROUNDS) == 0:
            assert own == [sorted(ffn.hot.tolist()) for ffn in ffns], "a block begins with what the policy wants"
        before(executor, token, at)
        assert any(one.called for one in executor.gpu.operators), "each runs as it is loaded"
        seen.append((name, int(token), at, own))

    monkeypatch.setattr(policy_trial, "measured", measured)
    monkeypatch.setattr(policy_trial, "decode_one", decode)
    _, llm = load(tmp_path, room)
    llm.close()
    assert sorted(policies) == sorted(EXPERT_POLICIES)
    steps = {name: [(token, at) for own, token, at, _ in seen if own == name] for name in EXPERT_POLICIES}
    assert len(steps["static"]) == 64 and all(own == steps["static"] for own in steps.values())
    assert [at for _, at in steps["lru"]] == list(range(64))
    turns = [seen[at][0] for at in range(0, len(seen), 64 // ROUNDS)]
    assert turns[:5] == ["static", "lru", "lfu", "dynamic", "lru"] and WARM_UP < ROUNDS
    assert len({str(own) for name, _, _, own in seen if name == "static"}) == 1
    assert len({str(own) for name, _, _, own in seen if name == "lru"}) > 1


@pytest.mark.parametrize("how", ["interrupted", "failing"])
def test_a_trial_that_does_not_end_leaves_static(
    how: str, room: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if how == "failing":

            def full(*given: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

            patch.setattr(gpu_experts, "put_panels", full)
            first, llm = load(tmp_path, room)
            assert llm.choices["experts"].startswith("static (the trial failed: the GPU ran out of memory")
            assert first == load_and_close(tmp_path, room, "static")
            llm.close()
            _, llm = load(tmp_path, room)
            assert "chosen earlier" not in llm.choices["experts"], "the failure may have been a chance"
            llm.close()
        else:
            steps: list[int] = []

            def stopped(*given: Any) -> None:
                steps.append(1)
                if len(steps) > 20:
                    raise KeyboardInterrupt

            patch.setattr(policy_trial, "decode_one", stopped)
            with pytest.raises(KeyboardInterrupt):
                load(tmp_path, room)
    again, llm = load(tmp_path, room)
    wanted = INTERRUPTED if how == "interrupted" else "the trial failed"
    assert llm.choices["experts"].startswith(f"static ({wanted}") and "chosen earlier" in llm.choices["experts"]
    assert again == load_and_close(tmp_path, room, "static")
    llm.close()


def test_when_nothing_is_tried(room: EngineConfig, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    reasons = {
        "all experts are on the GPU": replace(BASE, expert_policy="auto"),
        "--no-trial: nothing was measured": replace(room, expert_policy="auto", trial=False),
        "--adjust moves experts between requests": replace(room, expert_policy="auto", adjust=True),
        "others need all experts in RAM too": replace(
            room, expert_policy="auto", ram=needs(resolve(open_checkpoint(path), room)).ram
        ),
    }
    for why, engine in reasons.items():
        found = resolve(open_checkpoint(path), engine)
        assert found.policy.name == "static" and why in found.policy.reason, why
    converted = resolve(open_checkpoint(f64_experts(tmp_path)), replace(room, expert_policy="auto"))
    assert converted.policy.name == "static" and "need experts as a GGUF file has them" in converted.policy.reason
    alone = resolve(open_checkpoint(path), replace(BASE, gpu="none", expert_policy="auto"))
    assert alone.placement.experts is None and alone.policy.name == "static"
    other = resolve(open_checkpoint(path), replace(room, expert_policy="auto", context=32))
    assert other.policy.name is None, "tried"


def f64_experts(folder: Path) -> Path:
    """The model with experts in a type that is converted on load."""
    builder = experts_gguf()
    for tensor in builder.tensors:
        if tensor.name.endswith("up_exps.weight"):
            tensor.data, tensor.type_id = np.frombuffer(tensor.data, np.float32).astype(np.float64).tobytes(), F64
    return builder.write(folder / "f64.gguf")


def test_a_trial_that_succeeds_after_a_failure_counts(
    room: EngineConfig, tmp_path: Path, slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: Any) -> None:
        raise PowerInferError("the GPU is busy")

    slow({"static": 4, "lru": 3, "lfu": 5, "dynamic": 5})
    with monkeypatch.context() as patch:
        patch.setattr(policy_trial, "measured", failing)
        _, llm = load(tmp_path, room)
        assert llm.choices["experts"].startswith("static (the trial failed: the GPU is busy, kept in")
        llm.close()
    for how in ("kept in", "chosen earlier"):
        _, llm = load(tmp_path, room)
        assert llm.choices["experts"].startswith("lru (a step takes") and how in llm.choices["experts"]
        llm.close()


def test_a_disturbed_trial_is_repeated_once_it_is_quiet(
    room: EngineConfig, tmp_path: Path, slow: Any, others: Any
) -> None:
    slow({"static": 4, "lru": 3, "lfu": 5, "dynamic": 5})
    others(1.5)
    for how in ("while others took 1.5 cores", "chosen earlier"):
        _, llm = load(tmp_path, room)
        assert llm.choices["experts"].startswith("lru (a step takes") and how in llm.choices["experts"]
        llm.close()
    others(0.0)
    slow({"static": 4, "lru": 5, "lfu": 3, "dynamic": 5})
    for how in ("kept in", "chosen earlier"):
        _, llm = load(tmp_path, room)
        assert llm.choices["experts"].startswith("lfu (a step takes") and how in llm.choices["experts"]
        llm.close()


@pytest.mark.parametrize("disturbed", [0.0, 1.0])
def test_a_choice_holds_where_memory_is_short(
    disturbed: float, room: EngineConfig, tmp_path: Path, slow: Any, others: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits would change from run to run; only a trial needs the memory. A `--ram` that does not change decides."""
    auto, path = replace(room, expert_policy="auto"), tmp_path / "m.gguf"
    ram = needs(resolve(open_checkpoint(path), room)).ram
    monkeypatch.setattr(system, "available_memory", lambda: ram)
    assert "not tried" in resolve(open_checkpoint(path), auto).policy.reason
    monkeypatch.setattr(system, "available_memory", lambda: 0)
    assert resolve(open_checkpoint(path), auto).policy.name is None, "unknown"
    slow({"static": 4, "lru": 3, "lfu": 5, "dynamic": 5})
    others(disturbed)
    _, llm = load(tmp_path, room)
    llm.close()
    others(0.0)
    monkeypatch.setattr(system, "available_memory", lambda: ram)
    assert resolve(open_checkpoint(path), auto).policy.name == "lru"
    assert resolve(open_checkpoint(path), replace(auto, ram=ram)).policy.name == "static"


def test_static_has_no_copier(room: EngineConfig, tmp_path: Path, slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was chosen; and what was chosen is of the experts that it was tried with."""
    monkeypatch.setattr(vram, "measured_scratch", lambda *_: pytest.fail("a policy is chosen of these experts"))
    for seconds, copies in ((2, False), (0.5, True)):
        slow({"static": 1, "lru": seconds, "lfu": 2, "dynamic": 2})
        _, llm = load(tmp_path, room, retrial=True)
        assert (llm._sparsity._executor.gpu.observer is not None) == copies  # type: ignore[attr-defined]
        llm.close()


def test_the_commands_say_what_was_chosen(
    room: EngineConfig, tmp_path: Path, slow: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    slow({"static": 4, "lru": 3, "lfu": 3.5, "dynamic": 5})
    flags = ["-m", f"{tmp_path}/m.gguf", "--gpu", "cpu", "--vram", f"{room.vram}B", "--context", "64"]
    flags += ["--prefill-chunk", "32", "--threads", "1", "--expert-policy", "auto"]
    assert main(["run", "--raw", "ab", "-n", "4", "-v", *flags, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "experts           lru (a step takes" in err
    assert json.loads(out.splitlines()[-1])["sparsity"]["policy"] == "lru"
    assert main(["bench", "--prompt-tokens", "4", "--gen-tokens", "4", "--repeat", "1", *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["choices"]["experts"].startswith("lru (a step takes") and document["sparsity"]["policy"] == "lru"
    assert document["streams_from"] is None


def test_a_choice_that_does_not_fit_is_no_choice(room: EngineConfig, tmp_path: Path, slow: Any) -> None:
    slow({"static": 2, "lru": 1, "lfu": 2, "dynamic": 2})
    _, llm = load(tmp_path, room)
    llm.close()
    path = tmp_path / "m.gguf.powerinfer/trials.json"
    auto, good = replace(room, expert_policy="auto"), path.read_text()
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda kept: kept["result"].update(policy="best"),
        lambda kept: kept["result"].update(seconds={"static": -1}),
        lambda kept: kept["result"].update(seconds=[]),
        lambda kept: kept["result"].pop("policy"),
        lambda kept: kept.update(failures=1),
        lambda kept: kept["key"].update(experts="others"),
        lambda kept: kept["key"].update(model="another"),
    ]
    for change in changes:
        path.write_text(good)
        assert resolve(open_checkpoint(tmp_path / "m.gguf"), auto).policy.name == "lru"
        document = json.loads(good)
        change(next(one for one in document["trials"] if one["subject"] == "expert policies"))
        path.write_text(json.dumps(document))
        assert resolve(open_checkpoint(tmp_path / "m.gguf"), auto).policy.name is None, document
