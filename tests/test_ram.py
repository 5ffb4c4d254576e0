"""--ram without a GPU: what is loaded, and what is refused, with what would do."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import model_files
import pytest
from model_files import family_gguf
from sparse_models import TEXT, give_bundles, give_predictor, give_profile, tiny_llama

from powerinfer import LLM, ModelError, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.placement.budget import Workload, bundle_bytes, gib, in_ram, least_ram
from powerinfer.placement.shapes import checkpoint_model
from powerinfer.sizes import read_size
from powerinfer.system import total_memory

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "prefill_chunk": 32,
    "max_batch": 3,
    "gpu": "none",
    "trial": False,
    "disk": "none",
}


@pytest.mark.parametrize("gpu", ["none", "auto", "cpu"])
def test_more_ram_than_the_machine_has(gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, most = tiny_llama(tmp_path / "m.gguf"), total_memory()
    LLM(path, ram=most, **OPTIONS).close()
    with pytest.raises(RequestError, match=r"^--ram .*, but this machine has .*: give less, or leave it out$"):
        LLM(path, ram=most + mmap.PAGESIZE, **(OPTIONS | {"gpu": gpu}))
    assert main(["run", "hi", "-m", str(path), "--ram", "9999TiB", "--gpu", gpu]) == 2
    assert capsys.readouterr().err.startswith("powerinfer: --ram 10238976GiB, but this machine has ")
    assert main(["inspect", "-m", str(path), "--ram", "9999TiB", "--gpu", gpu]) == 0
    assert "refused       --ram 10238976GiB, but this machine has " in capsys.readouterr().out


def test_what_ram_holds(tmp_path: Path) -> None:
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    model = checkpoint_model(open_checkpoint(path))
    context = model.config.context_length
    one, page = -(-context // cpu.PAGE), model.kv_bytes("f16", 1, 1)

    def needed(selector: str, context: int = context) -> int:
        held = sum(in_ram(model, Workload("f16", context, chunk=32, requests=3, selector=selector)).values())
        return held + (0 if selector == "all" else bundle_bytes(model, selector == "predicted"))

    def answer(ram: int, kv: str, selector: str) -> str:
        with LLM(path, ram=ram, **OPTIONS) as llm:
            assert llm.choices["kv_cache"].startswith(kv) and llm.choices["selector"].startswith(selector)
            return llm.generate(TEXT[:40], SamplingParams(max_tokens=5, temperature=0.0)).text

    all_of_it = answer(needed("exact") + 2 * one * page, f"{3 * one} pages", "exact")
    assert answer(needed("exact") + 2 * page, f"{one + 2} pages", "exact") == all_of_it
    assert answer(needed("exact"), f"{one} pages", "exact") == all_of_it
    left = (needed("exact") - needed("all") - 1) // page
    answer(needed("exact") - 1, f"{min(3 * one, one + left)} pages", "all (--ram does not hold bundles")
    answer(needed("all"), f"{one} pages", "all (--ram")
    for ram, more, words in (
        (needed("exact") - 1, {"selector": "exact"}, ("--selector all",)),
        (needed("all") - 1, {}, (f"--context {context - cpu.PAGE}", "--kv-type q8_0", "give --ram ")),
        (needed("all", 1) - 1, {"kv_type": "q8_0"}, ("--quantize q8_0",)),
        (1 << 20, {}, ("a smaller model, or one in fewer bits",)),
    ):
        with pytest.raises(RequestError, match=r"needs .* of RAM, .* and --ram is ") as caught:
            LLM(path, ram=ram, **OPTIONS, **more)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "uneven", "falcon"])
@pytest.mark.parametrize("selector", ["all", "exact", "predicted"])
def test_the_least_ram_of_a_plan_is_what_a_load_accepts(
    name: str, selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the errors of both, also where a load may read from disk: that would take more for so small a model."""
    monkeypatch.setattr(model_files, "FF", 80 if name == "uneven" else model_files.FF)  # no whole groups of bundles
    path = tmp_path / "m.gguf"
    path = family_gguf("falcon").write(path) if name == "falcon" else tiny_llama(path)
    path = give_profile(give_predictor(give_bundles(path)))
    flags = ["plan", "-m", str(path), "--hardware", "pc-low", "--vram", "0", "--selector", selector]
    flags += ["--threads", "1", "--prefill-chunk", "32", "--max-batch", "3", "--dry-run", "--json", "--ram"]

    def refused(ram: int, disk: str = "none") -> tuple[int, str]:
        with pytest.raises(RequestError, match="give --ram ") as caught:
            LLM(path, ram=ram, selector=selector, **(OPTIONS | {"disk": disk}))
        said = advised(str(caught.value))
        return read_size(said), said

    def advised(error: str) -> str:
        return error.split("give --ram ")[1].split()[0].rstrip(",")

    least, said = refused(1 << 20)
    assert main([*flags, "1MiB"]) == 2
    assert advised(capsys.readouterr().err) == said
    model = checkpoint_model(open_checkpoint(path))
    work = Workload("f16", model.config.context_length, chunk=32, requests=3, selector=selector)
    exact = least_ram(model, work)
    assert gib(exact) == said and refused(exact - 1)[0] == refused(exact - 1, "auto")[0] == least
    assert main([*flags, f"{exact - 1}B"]) == 2
    assert advised(capsys.readouterr().err) == said
    with LLM(path, ram=exact, selector=selector, **OPTIONS) as llm:
        assert llm.choices["selector"].startswith(selector)
    assert main([*flags, f"{exact}B"]) == 0
    assert not [one for one in json.loads(capsys.readouterr().out.splitlines()[-1])["helps"] if one["flag"] == "--ram"]


@pytest.mark.parametrize("room", (True, False))
def test_bundles_are_copied_where_there_is_room(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of their file does not affect a copy; of the mapped file it ends the request with a line."""
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    if not room:
        monkeypatch.setattr("powerinfer.system.available_memory", lambda: 0)
    with LLM(path, selector="exact", prefix_cache=False, **OPTIONS) as llm:

        def answer() -> list[int]:
            return llm.generate(TEXT[:40], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)).token_ids

        before = answer()
        (file,) = Path(f"{path}.powerinfer").glob("neurons*")
        with file.open("r+b") as bundles:
            bundles.seek(mmap.PAGESIZE)  # behind the header
            bundles.write(bytes(file.stat().st_size - mmap.PAGESIZE))
        if room:
            assert answer() == before
        else:
            with pytest.raises(ModelError, match="changed while it was in use; load the model again"):
                answer()
