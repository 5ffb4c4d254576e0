"""What `transformers` says of random models, in files that every process, and every later run, shares (shared.py).

Their names hash all that it follows from: the case, its configuration and what is asked of it, the code that makes
them, the versions of the libraries, and the kind of this machine's CPU, whose float32 sums differ. The engine has no
part in any of it.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from shared import Arrays, folder_of, shared

LIBRARIES = ("torch", "transformers", "gguf", "numpy", "safetensors", "huggingface-hub")
SOURCES = (
    "shared.py", "truth.py", "families.py", "gemma_files.py", "kimi_files.py", "lfm2_files.py", "mamba_files.py",
    "openelm.py", "renamed_families.py", "smallthinker.py",
)  # fmt: skip



def entries() -> Path:
    """The folder of this run's entries."""
    return _entries(Path(os.environ["POWERINFER_CACHE"]) / "truths")


@functools.cache
def _entries(every: Path) -> Path:
    about = [*(f"{name} {version(name)}" for name in LIBRARIES), sys.version, platform.machine()]
    about.append(torch.backends.cpu.get_cpu_capability())
    sources = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    return folder_of(every, b"\n".join([*sources, *(one.encode() for one in about)]))


class Truth:
    """A random model of a case: its files, and what `transformers` says of three texts in float64 and in float32."""

    def __init__(
        self, case: families.Case, layout: str = "folder", folder: Path | None = None, *, seed: int = 11,
        half: bool = False, **changes: Any,
    ) -> None:  # fmt: skip
        """layout, folder: of the files; half: parameters are float16 numbers; changes: of the case's settings."""
        self.case, self.layout, self.folder, self.seed, self.half = case, layout, folder, seed, half
        self.config = case.config(**changes)
        self.texts = [families.prompt(case, seed) for seed in (3, 4, 5)]
        self._key = repr(case), self.config.to_json_string(), seed, half

    @cached_property
    def model(self) -> Any:
        """The model of `transformers`, for the caller to change as it likes."""
        return self._model()

    def _model(self) -> Any:
        model = families.random_model(self.case, self.config, self.seed)
        return families.halved(model) if self.half else model

    @cached_property
    def path(self) -> Path:
        """The model's files, for this caller alone."""
        assert self.folder is not None
        return self.save(self.layout, self.folder)

    def save(self, layout: str, folder: Path) -> Path:
        """The model's files in a layout."""
        for name, content in shared(entries(), lambda: self._files(layout), "files", layout, *self._key).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.tobytes())
        return folder / ("model.gguf" if layout.startswith("gguf") else "model")

    def _files(self, layout: str) -> Arrays:
        with tempfile.TemporaryDirectory() as name:
            families.save(self.case, self.config, self._model(), layout, Path(name))
            files = sorted(path for path in Path(name).rglob("*") if path.is_file())
            return {str(path.relative_to(name)): np.fromfile(path, np.uint8) for path in files}

    @cached_property
    def _said(self) -> Arrays:
        def say() -> Arrays:
            model = self._model()
            every = families.exact_texts(self.case, self.config, model, self.texts)
            said = {f"exact {i}": one for i, one in enumerate(every)}
            return said | {f"narrow {i}": families.logits(model, text) for i, text in enumerate(self.texts)}

        return shared(entries(), say, "logits", *self._key)

    @property
    def logits(self) -> list[np.ndarray]:
        """Of each text, float64 [T, vocab]."""
        return [self._said[f"exact {i}"] for i in range(len(self.texts))]

    @property
    def narrow(self) -> list[np.ndarray]:
        """The same in float32."""
        return [self._said[f"narrow {i}"] for i in range(len(self.texts))]

    @cached_property
    def mistaken(self) -> np.ndarray:
        """The logits of the first text by the configuration that the case must be told apart from."""
        config = self.case.config(**self.case.mistaken)

        def say() -> Arrays:
            return {"exact": families.exact_logits(self.case, config, self._model(), self.texts[0])}

        return shared(entries(), say, "mistaken", config.to_json_string(), *self._key)["exact"]

    def allowed(self, texts: int = 1) -> float:
        """The error that this engine may have, by that of float32 in the first texts."""
        errors = [self.narrow[i] - self.logits[i] for i in range(texts)]
        return families.ROUNDING * families.rms(np.stack(errors))

    def check(self, ours: np.ndarray, text: int = 0, what: str = "", texts: int = 2) -> None:
        """The last logits of a text are those of the truth, within what is allowed."""
        assert ours.dtype == np.float32
        error, allowed = families.rms(ours - self.logits[text][-len(ours) :]), self.allowed(texts)
        assert error <= allowed, f"{what}: {error:.3g} against {allowed:.3g}"
