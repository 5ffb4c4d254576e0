"""Making the rows of experts that are read from disk neuron by neuron, with the codes of the model's file: down or, for
a predictor, up and down."""

from __future__ import annotations

import time

import numpy as np

from powerinfer.devices.cpu_experts import put_rows, types_problem
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.expert_rows import (
    ExpertRowsFile,
    open_expert_rows,
    resting_layers,
    row_layouts,
    write_expert_rows,
)
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.formats.quant import Bytes, all_numbers
from powerinfer.kernels import cpu
from powerinfer.progress import Progress, silent

_AT_ONCE = 32 << 20  # bytes of experts, or one


def applies(checkpoint: Checkpoint) -> bool:
    """Whether a model has experts whose rows can be packed."""
    return bool(resting_layers(checkpoint.config))


def predicts(checkpoint: Checkpoint, prepared: str | None) -> bool:
    """Whether a predictor selects among these neurons, in types whose rows can be packed with up."""
    predicts = checkpoint.predictor_threshold is not None or PreparedFile(PREDICTOR, checkpoint, prepared).exists()
    config = checkpoint.config
    return predicts and config.unpredicted_reason is None and types_problem(config, checkpoint.taken_type, True) is None


def pack_experts(
    checkpoint: Checkpoint,
    prepared: str | None,
    force: bool = False,
    progress: Progress = silent,
    threads: int = 0,
    predicted: bool = False,
) -> tuple[ExpertRowsFile, float | None]:
    """Write the rows into the folder `prepared` (None: beside the model), unless they are up to date and not `force`.
    The file, and the seconds that it took; None: it was there. predicted: with up.

    RequestError for types whose codes rows cannot keep, ModelError for a weight that is no number, PowerInferError if
    the file cannot be written; no partial file remains. progress: called with ("packing experts", experts done,
    experts).
    """
    problem = types_problem(checkpoint.config, checkpoint.taken_type, predicted)
    if problem is not None:
        raise RequestError(f"pack: {problem}")
    if not force and (file := current(checkpoint, prepared, predicted)) is not None:
        return file, None
    begin, done = time.perf_counter(), 0
    layouts, config = row_layouts(checkpoint, cpu.bundle_row_bytes, predicted), checkpoint.config
    total, cores = sum(config.experts[layer].n_experts for layer in layouts), min(8, cpu.choose_threads(threads)[0])
    with write_expert_rows(checkpoint, prepared, layouts, predicted) as write:
        for layer, layout in layouts.items():
            n, groups = config.experts[layer].n_experts, n_groups(config.experts[layer].size)
            down = checkpoint.take(f"layers.{layer}.experts_down").data.reshape(n, layout.d_model, -1)
            up = None  # not read: of a folder it would be a copy
            if predicted:
                up = checkpoint.take(f"layers.{layer}.experts_up").data.reshape(n, config.experts[layer].size, -1)
            step = max(1, _AT_ONCE // (groups * layout.group_bytes))
            space = np.zeros((step * groups, layout.group_bytes), np.uint8)
            for first in range(0, n, step):
                part = down[first : first + step]
                rows = space[: len(part) * groups]
                _check(checkpoint, layer, "down", first, part)
                of_up = None if up is None else up[first : first + step]
                if of_up is not None:
                    _check(checkpoint, layer, "up", first, of_up)
                put_rows(layout, rows, of_up, part, cores)
                write(layer, first, rows)
                done += len(part)
                progress("packing experts", done, total)
            checkpoint.release()
    return open_expert_rows(checkpoint, prepared, cpu.bundle_row_bytes, predicted), time.perf_counter() - begin


def _check(checkpoint: Checkpoint, layer: int, part: str, first: int, matrices: Bytes) -> None:
    """ModelError for matrices of the experts from `first` on with a weight that is infinite or NaN: the step that reads
    its row would not say where it is."""
    name = f"layers.{layer}.experts_{part}"
    kind = checkpoint.taken_type(name)
    for expert, matrix in enumerate(matrices, first):
        if not all_numbers(np.ascontiguousarray(matrix).reshape(-1), kind):
            raise ModelError(f"{checkpoint.path}: {name} of expert {expert} has weights that are no numbers")


def current(checkpoint: Checkpoint, prepared: str | None, predicted: bool = False) -> ExpertRowsFile | None:
    """The rows that are there already, if they are the model's."""
    try:
        return open_expert_rows(checkpoint, prepared, cpu.bundle_row_bytes, predicted)
    except ModelError:
        return None
