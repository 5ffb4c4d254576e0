"""Sensitivity of a model to errors of its matrices: how much its predictions change, measured on a text.

The matrices of a kind, in the first eighth of the layers, in the last or between, get the errors of a small type, and
the model is computed with them. Sensitivity is the mean KL divergence of the predictions, in nats, divided by the sum
of the errors as shares of the matrices. All of that is one pass over the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.importance import Importance
from powerinfer.formats.layout import is_matrix, is_router, shapes
from powerinfer.formats.quant import block_type, dequantize, quantize
from powerinfer.formats.source import Names
from powerinfer.progress import Progress
from powerinfer_train.activations import Observed

if TYPE_CHECKING:
    from powerinfer.prepare.corpus import Windows

_NOISY = "Q4_0"  # the type whose errors are made
_WINDOWS = 2  # that are computed
_SCORED = 4  # of so many tokens one is compared


def measure_sensitivity(
    checkpoint: Checkpoint, names: Names, windows: Windows, importance: Importance, progress: Progress
) -> dict[str, float]:
    """The loss for an error as large as the matrix, by the names of the file's tensors. names: of these; importance:
    weighs the errors."""
    noisy = _Noisy(checkpoint, names, importance)
    ids = torch.from_numpy(windows.ids[:_WINDOWS].copy()).long()
    with torch.no_grad():
        losses = noisy.losses(ids, progress)
    return {
        names(name): losses[group] / max(noisy.shares[group], 1e-12)
        for name, group in noisy.groups.items()
        if group in losses
    }


def _groups(checkpoint: Checkpoint) -> dict[str, str]:
    """The group of each matrix, by canonical name."""
    layers, groups = checkpoint.config.n_layers, {}
    for name, shape in shapes(checkpoint.config):
        if not is_matrix(name, shape) or is_router(name) or shape[-1] % block_type(_NOISY).block:
            continue
        if name in ("embed", "head"):
            groups[name] = name
        elif name.startswith("layers.") and checkpoint.has(name):
            number, part = int(name.split(".")[1]), name.rpartition(".")[2]
            place = "first" if number < layers // 8 else "last" if number >= 7 * layers // 8 else "middle"
            groups[name] = f"{part} {place}"
    return groups


class _Noisy:
    """A model whose matrices get errors, group by group. groups: by canonical name; shares: by group, the sum of the
    errors as shares of the matrices."""

    def __init__(self, checkpoint: Checkpoint, names: Names, importance: Importance) -> None:
        self._model, self._names, self._importance = Observed(checkpoint), names, importance
        self._all = [name for name, _ in shapes(checkpoint.config) if checkpoint.has(name)]
        self._config = checkpoint.config
        self.groups = _groups(checkpoint)
        self.shares: dict[str, float] = dict.fromkeys(self.groups.values(), 0.0)
        self._counted: set[str] = set()

    def losses(self, ids: Tensor, progress: Progress) -> dict[str, float]:
        """The mean KL divergence that the errors of each group cause, ids: int64 [windows, tokens]."""
        model, config = self._model, self._config
        outer = [name for name in self._all if not name.startswith("layers.")]
        model.put(outer)
        states = {"": model.enter(ids)}
        with self._having(["embed"]) as group:
            if group:
                states[group] = model.enter(ids)
        for layer in range(config.n_layers):
            begin = f"layers.{layer}."
            model.put([name for name in self._all if name.startswith(begin)])
            changed: dict[str, list[str]] = {}
            for name, of in self.groups.items():
                if name.startswith(begin):
                    changed.setdefault(of, []).append(name)
            before = states[""]
            for of in {**dict.fromkeys(states), **changed}:
                with self._having(changed.get(of, ())):
                    states[of] = model.layer(states.get(of, before), layer)
            progress("measuring sensitivity", layer + 1, config.n_layers + 1)
        model.put(outer)
        if "head" in self.groups:
            states["head"] = states[""]
        divergences = self._divergences(states)
        progress("measuring sensitivity", config.n_layers + 1, config.n_layers + 1)
        return divergences

    @contextmanager
    def _having(self, names: Sequence[str]) -> Iterator[str]:
        """The model with errors in these matrices of a group, whose name it is; "": there are none."""
        names = [name for name in names if name in self.groups]
        exact = {name: self._model.weights[name] for name in names}
        for name in names:
            self._model.weights[name] = self._with_errors(name, exact[name])
        yield self.groups[names[0]] if names else ""
        self._model.weights |= exact

    def _with_errors(self, name: str, weight: Tensor) -> Tensor:
        x = weight.reshape(-1, weight.shape[-1]).numpy()
        noisy = dequantize(quantize(x, _NOISY), _NOISY)
        columns = self._importance.columns.get(self._names(name))
        counted = np.ones((1, x.shape[1]), np.float32) if columns is None else columns
        counted = np.repeat(counted, len(x) // len(counted), axis=0) if len(counted) > 1 else counted
        if name not in self._counted:
            self._counted.add(name)
            share = (counted * (noisy - x) ** 2).sum() / max((counted * x**2).sum(), 1e-30)
            self.shares[self.groups[name]] += float(share)
        return torch.from_numpy(noisy.reshape(tuple(weight.shape)))

    def _divergences(self, states: dict[str, Tensor]) -> dict[str, float]:
        model, divergences = self._model, {}

        def logs(group: str) -> Tensor:
            return model.logits(model.leave(states[group][:, ::_SCORED].contiguous())).log_softmax(-1)

        exact = logs("")
        for group in states.keys() - {""}:
            heads = [group] if group == "head" or (group == "embed" and self._config.tied_embeddings) else []
            with self._having(heads):
                divergences[group] = max(0.0, float((exact.exp() * (exact - logs(group))).sum(-1).mean()))
        return divergences
