"""The catalogue of short names: its data, which quantisation suits a machine, and what names mean."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from powerinfer import hub, system
from powerinfer.cli import pull as pull_verb
from powerinfer.cli.main import main
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats import catalogue as catalogue_module
from powerinfer.formats import catalogue_names
from powerinfer.formats.catalogue import CatalogueModel, Download, Memory, catalogue, nearest, unsupported_families
from powerinfer.formats.catalogue_names import full_name, name_form, offer, short_name, similar_name, unsupported
from powerinfer.formats.families import FOLDERS, GGUFS
from powerinfer.formats.weight_types import NATIVE_TYPES
from powerinfer.hardware.cards import described_machine
from powerinfer.placement.estimates import estimate, shape_of
from powerinfer.placement.mixes import read_dtype
from powerinfer.placement.shapes import described_model, find_shape, shape_names
from powerinfer.progress import Say

GB = 10**9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The memory of the machine that names are resolved for."""
    has = SimpleNamespace(memory=Memory(32 * GB, 8 * GB))
    monkeypatch.setattr(catalogue_names, "machine_memory", lambda: has.memory)
    return has


# ---------------------------------------------------------------- the data


def test_every_entry_is_whole() -> None:
    seen: dict[str, str] = {}
    for name, model in catalogue().items():
        usual, *larger = model.downloads
        assert all(one.gigabytes > usual.gigabytes for one in larger), name
        assert len({one.quantisation for one in model.downloads}) == len(model.downloads), name
        for one in model.downloads:
            bits = 8 * one.gigabytes / model.parameters
            assert 4 < bits < 18.5, f"{name} {one.quantisation}: {bits:.1f} bits a parameter"
            if one.quantisation is not None and one.file is not None:
                assert one.quantisation.lower() in one.file.lower() and one.file.endswith(".gguf"), name
                kind = one.quantisation.removeprefix("UD-").removesuffix("_M")
                assert kind in NATIVE_TYPES, f"{name}: {kind} grows when it is loaded"
        assert model.active is None or model.active < model.parameters
        assert model.shape is None or model.shape in shape_names(), name
        for alias in (name, *model.aliases):
            assert seen.setdefault(name_form(alias), name) == name, f"{alias} is of two models"
        assert unsupported(name) is None, name


def test_families_that_are_called_unsupported_are() -> None:
    for family in unsupported_families():
        assert not set(family.architectures) & {*FOLDERS, *GGUFS}, family.family


TWICE = {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "deepseek-r1-1.5b", "smallthinker-4b-a0.6b"}
"""Models whose files repeat the embedding as the output head."""
WITH_PREDICTORS = {"bamboo-7b", "bamboo-7b-dpo", "turbosparse-mistral-7b"}
WITH_INPUTS = {f"gemma-{one}" for one in ("4-e2b", "4-e4b", "3n-e2b", "3n-e4b")}
"""Models whose files have the inputs of layers in more bits than other matrices."""
HEADS = {"stablelm-2-1.6b"}
"""Models whose files have the output head in more bits, where it is a tenth of the model."""
FEWER_BITS = {"gemma-4-12b", "gemma-4-31b"}
"""Models whose files have the embedding, which is the head too, in the bits of other matrices."""


def test_sizes_are_those_that_shapes_and_types_make() -> None:
    for name, model in catalogue().items():
        shape = shape_of(name, model)
        assert shape is not None, f"{name} has no shape: no estimate of its speed"
        for one in model.downloads:
            described = described_model(find_shape(shape).config, read_dtype(one.quantisation or "bf16"), shape, 0.0)
            matrices = [matrix for layer in (*described.attention, *described.ffn) for matrix in layer]
            head = 0 if described.config.tied_embeddings else described.head.file
            nbytes = sum(matrix.file for matrix in matrices) + described.tables + head
            most = 0.26 if name in TWICE else 0.15 if name in WITH_PREDICTORS | WITH_INPUTS else 0.048
            most = 0.07 if name in HEADS else most
            least = -0.04 if name in FEWER_BITS else -0.01
            assert least <= one.gigabytes / (nbytes / GB) - 1 < most, f"{name} {one.quantisation}: {nbytes / GB:.2f} GB"
            assert 0.97 < model.parameters / (described.parameters / GB) < (1.19 if name in TWICE else 1.03), name


# ---------------------------------------------------------------- what suits a machine

MODEL = CatalogueModel(
    "o/n", (Download(10, "Q4_K_M", "a"), Download(14, "Q6_K", "b"), Download(19, "Q8_0", "c")), parameters=18
)


@pytest.mark.parametrize(
    ("ram", "gpu", "quantisation", "why"),
    [
        (16, 0, "Q4_K_M", "which fits 16 GB of RAM"),
        (256, 0, "Q4_K_M", "which fits 256 GB of RAM"),  # a larger one would be slow there
        (8, 8, "Q4_K_M", "which fits 8 GB of RAM and 8 GB of GPU memory"),
        (8, 16, "Q4_K_M", "which fits the GPU's 16 GB whole"),
        (8, 18, "Q6_K", "the largest listed that fits the GPU's 18 GB whole"),
        (8, 24, "Q8_0", "the largest listed that fits the GPU's 24 GB whole"),
        (13, 0, None, None),
        (0, 0, None, None),
    ],
)
def test_the_largest_quantisation_that_runs_well(ram: int, gpu: int, quantisation: str | None, why: str | None) -> None:
    chosen = MODEL.choose(Memory(ram * GB, gpu * GB))
    assert (chosen and chosen[0].quantisation, chosen and chosen[1]) == (quantisation, why)


def test_what_a_download_brings_is_said(machine: SimpleNamespace) -> None:
    said = "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M of Hugging Face, 18.6 GB, which fits 32 GB of RAM and 8 GB of GPU memory"
    assert offer("qwen3-30b-a3b") == ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", said)
    machine.memory = Memory(32 * GB, 24 * GB)
    assert offer("qwen3:8b")[0] == "Qwen/Qwen3-8B-GGUF:Q8_0", "whole on the GPU"
    assert ", about 16 GB, which" in offer("turbosparse-mistral-7b")[1], "a computed size"


def test_a_model_that_cannot_fit_is_refused_with_one_that_does(machine: SimpleNamespace) -> None:
    with pytest.raises(RequestError) as refused:
        offer("gpt-oss-120b")
    text = str(refused.value)
    assert "gpt-oss-120b (63.4 GB) needs 70.7 GB" in text and "this machine has 37.8 GB for it, of 32 GB" in text
    assert "kimi-linear-48b-a3b fits (30.1 GB)" in text and "`powerinfer pull ggml-org/gpt-oss-120b-GGUF:MXFP4`" in text
    assert offer("gpt-oss-120b:MXFP4") == (
        "ggml-org/gpt-oss-120b-GGUF:MXFP4", "ggml-org/gpt-oss-120b-GGUF:MXFP4 of Hugging Face, 63.4 GB"
    )  # fmt: skip
    machine.memory = Memory(GB)
    with pytest.raises(RequestError, match="and this machine has 0 GB for it, of 1 GB of RAM; `powerinfer pull"):
        offer("qwen3-4b")


def test_the_nearest_model_is_of_the_same_kind() -> None:
    assert nearest(26, True, Memory(32 * GB)) == "gemma-4-26b-a4b"
    assert nearest(30, False, Memory(32 * GB)) == "qwen3-32b"
    assert nearest(30, False, Memory(16 * GB)) == nearest(None, False, Memory(16 * GB)) == "qwen3-14b"
    assert nearest(30, True, Memory(3 * GB)) == "lfm2-350m", "where no mixture of experts fits, another model"
    assert nearest(None, False, Memory(GB)) is None


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("qwen3-30b-a3b", ("qwen3-30b-a3b", None)),
        ("Qwen3-30B-A3B", ("qwen3-30b-a3b", None)),
        ("qwen3:30b", ("qwen3-30b-a3b", None)),
        ("llama3.2", ("llama-3.2-3b", None)),
        ("llama3.2:latest", ("llama-3.2-3b", None)),
        ("llama3.2:1b", ("llama-3.2-1b", None)),
        ("Llama-3.2-1B-Instruct", ("llama-3.2-1b", None)),
        ("gemma3:4b", ("gemma-3-4b", None)),
        ("gemma3n:e4b", ("gemma-3n-e4b", None)),
        ("qwen3:8b", ("qwen3-8b", None)),
        ("gpt-oss:20b", ("gpt-oss-20b", None)),
        ("deepseek-r1:8b", ("deepseek-r1-8b", None)),
        ("phi4", ("phi-4", None)),
        ("qwen3-4b:Q8_0", ("qwen3-4b", "Q8_0")),
        ("qwen3:4b-q8_0", ("qwen3-4b", "q8_0")),
        ("llama3.2:3b-instruct-fp16", ("llama-3.2-3b", "f16")),
        ("qwen3.6-35b-a3b:UD-IQ4_XS", ("qwen3.6-35b-a3b", "UD-IQ4_XS")),
        ("qwen3-4b:other", ("qwen3-4b", "other")),
        ("llama4", ("llama-4-scout", None)),
        ("llama4:scout", ("llama-4-scout", None)),
        ("llama4:maverick", ("llama-4-maverick", None)),
        ("llama4:q8_0", ("llama-4-scout", "q8_0")),
        ("llama4:other", None),  # of an alias a tag that is no quantisation is another model
        ("gemma4", ("gemma-4-e4b", None)),  # as Ollama has it
        ("gemma4:26b", ("gemma-4-26b-a4b", None)),
        ("stablelm2", ("stablelm-2-1.6b", None)),
        ("stablelm2:12b", ("stablelm-2-12b", None)),
        ("muse-glimmer:30b", ("muse-glimmer-30b", None)),
        ("Phi-3.5-MoE-instruct", ("phi-3.5-moe", None)),
        ("qwen3:235b", None),
        ("qwen3-4b:", None),
        ("owner/qwen3-4b", None),
        ("mistral-nemo", None),
        ("", None),
        ("qwen3-4b" * 100, None),
    ],
)
def test_names_in_any_spelling(name: str, short: tuple[str, str | None] | None) -> None:
    assert short_name(name) == short
    assert hub.names_model(name) == (short is not None) or name == "mistral-nemo"


def test_a_listed_quantisation_is_asked_for_as_it_is_listed() -> None:
    assert full_name("qwen3:8b-q8_0") == "Qwen/Qwen3-8B-GGUF:Q8_0"
    assert full_name("qwen3-8b:q5_k_m") == "Qwen/Qwen3-8B-GGUF:q5_k_m"
    assert full_name("owner/name:q8_0") == "owner/name:q8_0"


@pytest.mark.parametrize(
    ("name", "family", "instead"),
    [
        ("rwkv7", "RWKV", "`powerinfer pull --names` lists what is"),
        ("internlm3:8b", "InternLM 3", "qwen3-8b is, and fits this machine"),
        ("internlm3-30b-a3b", "InternLM 3", "qwen3-30b-a3b is, and fits this machine"),
        ("internlm3:48b", "InternLM 3", "seed-oss-36b is, and fits this machine"),
    ],
)
def test_families_that_do_not_run_yet_are_named(
    name: str, family: str, instead: str, machine: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(unsupported(name)) == f"{name}: the family {family} is not supported yet; {instead}"
    with pytest.raises(RequestError, match="is not supported yet"):
        hub.pull(name)
    assert main(["run", name, "a prompt of several words"]) == 2, "as Ollama takes them"
    assert "is not supported yet" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gemma-4b", "granite-4.0-micro", "granite-4.0-h-tiny", "nemotron-3-nano:30b-a3b",
                                  "falcon-h1", "llama-3.1-8b", "phi-3.5-mini", "", "x" * 10**5])
def test_families_that_run_are_not(name: str) -> None:
    assert unsupported(name) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen3-30b-a3", "qwen3-30b-a3b"),
        ("gpt-os-20b", "gpt-oss-20b"),
        ("qwen3-30b-a3b-thinking", "qwen3-30b-a3b"),
        ("llama3", "llama-3.1-8b"),
        ("qwen3-33b", None),  # not the 32b, nor a model of experts
        ("qwen3-31b-a3b", None),
        ("qwen3-4c", "qwen3-4b"),
        ("smollm2-sparse", None),
        ("gpt-oss-12b", None),
        ("x" * 10**5, None),
    ],
)
def test_suggestions_are_of_the_same_kind(name: str, near: str | None, machine: SimpleNamespace) -> None:
    assert similar_name(name, list(catalogue())) == near


def test_suggestions_fit_the_machine(machine: SimpleNamespace) -> None:
    assert similar_name("gpt-oss-120", list(catalogue())) is None
    machine.memory = Memory(128 * GB)
    assert similar_name("gpt-oss-120", list(catalogue())) == "gpt-oss-120b"


# ---------------------------------------------------------------- pull


def test_pull_lists_the_names_with_what_they_need(
    machine: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_verb, "_measured", lambda: None)
    assert main(["pull", "--names"]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert rows["qwen3-30b-a3b"] == "Q4_K_M 18.6 GB 30.5B 3.3B 24 GB 16 GB 24 GB fits"
    assert rows["qwen3-8b"] == "Q4_K_M 5.03 GB 8.2B 8 GB 4 GB 8 GB fits"
    assert rows["llama-3.2-3b"].startswith("Q8_0 3.42 GB"), "what is chosen for this machine: the GPU holds it"
    assert rows["gpt-oss-120b"] == "MXFP4 63.4 GB 116.8B 5.1B 96 GB 64 GB 80 GB too large"
    assert rows["turbosparse-mistral-7b"].startswith("BF16 ~16 GB")
    assert set(rows) == {"name", *catalogue()} and len({len(line) for line in out.splitlines()}) == 1
    assert "here: 32 GB of RAM and 8 GB of GPU memory" in err and "once `powerinfer measure` has run" in err


def test_speeds_are_estimates_for_the_measured_machine(
    machine: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pc = replace(described_machine("RTX 4060", 32 << 30), disturbed=1.5)
    monkeypatch.setattr(pull_verb, "_measured", lambda: pc)
    few = {name: catalogue()[name] for name in ("qwen3-8b", "gpt-oss-120b", "qwen3.5-35b-a3b")}
    few["unknown"] = few["qwen3-8b"]
    monkeypatch.setattr(catalogue_module, "catalogue", lambda: few)
    assert main(["pull", "--names", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)["names"]}
    expected = estimate("qwen3-8b", "Q4_K_M", pc)
    assert expected is not None and rows["qwen3-8b"]["here"] == {
        "quantisation": "Q4_K_M", "gigabytes": 5.03, "tokens_per_second": round(expected.tok_s, 2)
    }  # fmt: skip
    assert f"{rows['qwen3-8b']['here']['tokens_per_second']:.3g} tokens/s" in err and "estimates by plan" in err
    assert "other programs took 1.5 cores while this machine was measured" in err
    assert rows["qwen3-8b"]["needs"] == {"ram": 8, "ram_beside_8": 4, "gpu": 8}
    assert rows["gpt-oss-120b"]["here"] is None and rows["unknown"]["here"]["tokens_per_second"] is None
    assert rows["qwen3-8b"]["downloads"][1]["quantisation"] == "Q8_0"


def test_the_end_of_a_pull_is_how_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace
) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    mine = tmp_path / "My model.gguf"
    mine.write_bytes(b"GGUF")
    assert main(["pull", str(mine)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{mine}\n" and err.splitlines()[-1] == "run it: powerinfer run \"...\" -m 'my model'"
    asked: list[str] = []

    def fetched(name: str, say: Say) -> hub.StoredModel:
        asked.append(name)
        return hub.StoredModel(name, Path("there"), "hugging face", 1)

    monkeypatch.setattr(hub, "pull_repository", fetched)
    for name, run in (("qwen3:8b", "qwen3:8b"), ("o/n:Q8_0", "o/n:Q8_0"), ("hf.co/o/n", "o/n")):
        assert main(["pull", name]) == 0
        assert capsys.readouterr().err.splitlines()[-1] == f'run it: powerinfer run "..." -m {run}'
    assert asked == ["Qwen/Qwen3-8B-GGUF:Q4_K_M", "o/n:Q8_0", "o/n"]
    pc = described_machine("RTX 4060", 32 << 30)
    monkeypatch.setattr(pull_verb, "_measured", lambda: pc)
    expected = estimate("qwen3-8b", "Q4_K_M", pc)
    assert expected is not None and main(["pull", "qwen3:8b"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith(f" ({expected.tok_s:.3g} tokens/s by plan)")


@pytest.mark.parametrize(
    ("gguf", "config", "family"),
    [
        ({"architecture": "internlm3", "total": 1}, None, "InternLM 3"),
        (None, {"model_type": "rwkv7"}, "RWKV"),
        ({"architecture": "qwen3"}, {"model_type": "qwen3"}, None),
        ({"architecture": ["internlm3"]}, {"model_type": {}}, None),
        (None, None, None),
    ],
)
def test_what_does_not_run_is_not_downloaded(
    gguf: dict[str, Any] | None, config: dict[str, Any] | None, family: str | None
) -> None:
    if family is None:
        hub._check_family("o/n", gguf, config)
    else:
        with pytest.raises(RequestError, match=f"o/n is of the family {family}, .*; nothing was downloaded"):
            hub._check_family("o/n", gguf, config)


@pytest.mark.parametrize(
    ("free", "there", "architecture", "complaint"),
    [
        (50, 0, "qwen3", "downloaded"),
        (5, 0, "qwen3", "o/n needs 0 MB in .*POWERINFER_CACHE selects another folder"),
        (5, 41, "qwen3", "downloaded"),
        (50, 0, "internlm3", "nothing was downloaded"),
    ],
)
def test_what_is_known_before_a_download(
    free: int, there: int, architecture: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for what is missing, and the family runs."""
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "machine_memory", lambda: Memory(GB))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free, total=1))
    weights = SimpleNamespace(rfilename="m-Q8_0.gguf", size=45, lfs=None)
    info = SimpleNamespace(siblings=[weights], sha="1", gguf={"architecture": architecture}, config=None)

    def download(repository: str, **options: object) -> None:
        raise PowerInferError("downloaded")

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(model_info=lambda name, **options: info))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = tmp_path / "models" / "o--n"
    folder.mkdir(parents=True)
    (folder / "half").write_bytes(b"x" * there)
    said: list[str] = []
    with pytest.raises(PowerInferError, match=complaint):
        hub.pull_repository("o/n", said.append)
    told = "larger than the memory here (1 GB of RAM): the rest is read from disk, slowly"
    assert any(told in line for line in said) == (complaint == "downloaded")


# ---------------------------------------------------------------- the GPU's memory


class Nvml:
    """NVIDIA's library, of a machine with two GPUs."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.closed = fails, 0

    def nvmlInit_v2(self) -> int:
        return int(self.fails == "init")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        self.index = index
        return int(index > 1)

    def nvmlDeviceGetMemoryInfo(self, device: object, memory: ctypes.Array[ctypes.c_ulonglong]) -> int:
        memory[0] = (24 + self.index) << 30
        return int(self.fails == "memory")

    def nvmlShutdown(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("visible", "fails", "gib"),
    [
        (None, "", 24), ("1", "", 25), ("1,0", "", 25), ("7", "", 0), ("", "", 0), ("-1", "", 0), ("GPU-3f", "", 0),
        (None, "init", 0), (None, "memory", 0),
    ],
)  # fmt: skip
def test_memory_of_the_gpu(visible: str | None, fails: str, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(fails)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert system.gpu_memory() == gib << 30
    assert nvml.closed == (visible not in ("", "-1", "GPU-3f") and fails != "init")


def test_no_gpu_without_its_driver_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert system.gpu_memory() == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert system.gpu_memory() == 0
