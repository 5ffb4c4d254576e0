"""Importance of the columns of matrices (`formats.importance`) by computing a text: layer by layer, so that memory has
the weights of one layer and a state for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.importance import Importance, mean_squares
from powerinfer.formats.layout import shapes
from powerinfer.formats.source import Names
from powerinfer.progress import Progress
from powerinfer_train.recipes import uncomputed_reason
from powerinfer_train.torch_model import ATTENTIONS, TorchModel

if TYPE_CHECKING:
    from powerinfer.prepare.corpus import Windows

_TOKENS = 2048  # computed at once


class Observed(TorchModel):
    """A model that adds up the squares of what its matrices are multiplied with: (sums [matrices, cols], counts
    [matrices]) by canonical name. RequestError for a model that is not computed here."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        untold = next((one for one in checkpoint.config.attentions if type(one) not in ATTENTIONS), None)
        reason = f"layers of {untold.title}" if untold is not None else uncomputed_reason(checkpoint.config)
        if reason is not None:
            raise RequestError(f"{checkpoint.path}: importance and sensitivity are not measured for {reason}")
        super().__init__(checkpoint.config, {}, torch.float32)
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._checkpoint = checkpoint

    def put(self, names: Sequence[str]) -> None:
        """Have these weights, and no others."""
        self.weights = {}
        for name in names:
            self.weights[name] = torch.from_numpy(self._checkpoint.take(name).float32().copy())
            self._checkpoint.release()

    def linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        self.add(x, name, expert)
        return super().linear(x, name, expert)

    def add(self, x: Tensor, name: str, expert: int | None = None) -> None:
        """Count rows that a matrix is multiplied with, [..., cols]."""
        rows = x.reshape(-1, x.shape[-1]).double()
        if name not in self.sums:
            matrices = 1 if expert is None else len(self.weights[name])
            self.sums[name] = torch.zeros(matrices, rows.shape[1], dtype=torch.float64), torch.zeros(matrices)
        sums, counts = self.sums[name]
        sums[expert or 0] += rows.square().sum(0)
        counts[expert or 0] += len(rows)

    def layer(self, x: Tensor, layer: int) -> Tensor:
        """Output of a layer for x [windows, tokens, d_model]."""
        return self._layer(x, layer, None)


def measure_importance(checkpoint: Checkpoint, names: Names, windows: Windows, progress: Progress) -> Importance:
    """The importance on some text. names: of the tensors in the GGUF file. RequestError for a model that is not
    computed here, ModelError for one whose numbers are not finite."""
    config = checkpoint.config
    model, together = Observed(checkpoint), max(1, _TOKENS // windows.size)
    ids = torch.from_numpy(windows.ids.copy()).long()
    all_names = [name for name, _ in shapes(config) if checkpoint.has(name)]
    with torch.no_grad():
        model.put([name for name in all_names if name in ("embed", "positions") or name.startswith("project_in")])
        states = list(map(model.enter, ids.split(together)))
        for layer in range(config.n_layers):
            model.put([name for name in all_names if name.startswith(f"layers.{layer}.")])
            for at, x in enumerate(states):
                states[at] = model.layer(x, layer)
                progress("measuring importance", layer * len(states) + at + 1, config.n_layers * len(states))
        model.put([name for name in all_names if name.startswith(("final_norm", "project_out"))])
        for x in states:
            x = model.leave(x)
            if not bool(torch.isfinite(x).all()):
                raise ModelError(f"{checkpoint.path}: the model computes numbers that are not finite")
            if not config.tied_embeddings:
                model.add(x, "head")
    return _importance(model, names, windows)


def _importance(model: Observed, names: Names, windows: Windows) -> Importance:
    """Importance by the names of the file; matrices in one tensor have the same inputs."""
    columns, counts = {}, {}
    for canonical, (sums, times) in model.sums.items():
        counts[names(canonical)] = times.numpy()
        columns[names(canonical)] = mean_squares(sums.float().numpy(), times.numpy())
    return Importance(", ".join(windows.corpora), columns, counts)
