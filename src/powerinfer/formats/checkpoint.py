"""A model on disk, in any format, as a configuration and a set of tensors with canonical names.

    checkpoint = open_checkpoint("model.gguf")
    q = checkpoint.take("layers.0.q")
    checkpoint.finish()

Names: `embed`, `positions`, `project_in`, `project_out`, `final_norm`, `head` (absent when the embedding is the head),
and per layer `layers.N.` + `attn_norm q k v o q_norm k_norm attn_out_norm ffn_norm gate up down ffn_out_norm`, with
`_bias` behind the name of a matrix or a LayerNorm, and perhaps `threshold` of each neuron's activation, and
`product_threshold` of its product. Latent attention has `q` or `q_a q_a_norm q_b`, and `kv_a kv_a_norm k_b v_b o`
(`LatentAttentionConfig`). Layers of experts have `router experts_gate experts_up experts_down` (of all experts,
[experts, out, in]) and perhaps `shared_gate shared_up shared_down shared_weight` in place of `gate up down`. A draft
head is one more layer, with `draft_join` [d_model, 2 * d_model], `draft_embed_norm draft_hidden_norm`, and perhaps
`draft_embed draft_head draft_norm` (`DraftHeadConfig`); an EAGLE head has `draft_fuse` [d_model, features] in place of
`draft_join`, perhaps norms of features, and `draft_tokens`, the number of each row's token. Which of them a model has
follows from its configuration (`layout.py`). A file may also have `predictor_in` [rank, d_model] and
`predictor_out` [neurons, rank] for every layer, and may store `down` as `down_rows` [neurons, d_model], or `k_b` as
`k_b_rows`; then there are both. All matrices are [out_features, in_features]. Opening reads headers only; tensors are
views of mapped files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.layout import draft_matrices, draft_prefix, is_router, matrix_names
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.mixes import stated_mix
from powerinfer.formats.quant import Bytes, Float32, all_numbers, block_type
from powerinfer.formats.source import NO_EAGLE, NO_MTP, Source
from powerinfer.formats.tensors import RawTensor, RestingTensor, StackedTensor, StoredTensor, convert, transpose
from powerinfer.formats.weight_types import FLOAT_TYPES, NATIVE_TYPES
from powerinfer.neurons import Indices
from powerinfer.progress import Progress, silent

__all__ = ["Checkpoint", "Progress", "RawTensor", "open_checkpoint"]

_QUANTIZE = {"q8_0": "Q8_0", "q4_0": "Q4_0"}
_OF_STATES = (
    ".mamba_a", ".mamba_d", ".mamba_step_bias", ".mamba_conv", ".mamba_conv_bias", ".delta_decay", ".delta_dt_bias",
    *(f".delta_{name}conv" for name in ("", "q_", "k_", "v_")), ".short_conv", ".short_conv_bias",
)  # fmt: skip


class Place(NamedTuple):
    """Bytes of a file."""

    path: Path
    begin: int
    nbytes: int


class Checkpoint:
    """An opened model. `take` gives each tensor in a type that the kernels take; `finish` proves that none was left.

    config: the model's sizes; path; source: "gguf" or "hf"; metadata: GGUF metadata or config.json; notes: lines for
    the user about conversions; file_bytes: bytes on disk; parameters: number of weights, without predictors;
    predictor_threshold: for the outputs of the file's own predictors, None if it has none; unread: keys of the
    metadata that nothing read; quantize: the requested type.

    With `quantize`, a tied embedding stays as it is for look-up and a quantised copy becomes the tensor `head`, so
    `config.tied_embeddings` is then False.
    """

    def __init__(self, source: Source, quantize: str | None = None, progress: Progress = silent) -> None:
        """RequestError if `quantize` is not "q8_0" or "q4_0", or there is nothing to quantise."""
        self._tensors = dict(source.tensors)
        self._files = source.files
        self._progress = progress
        self._used: set[str] = set()
        self._converted = 0
        self._stored_types = {name: tensor.type for name, tensor in source.tensors.items()}
        self.config = source.config
        self.path = source.path
        self.source = source.kind
        self.metadata = source.metadata
        self.quantize = quantize
        self.notes = list(source.notes)
        self.predictor_threshold = source.predictor_threshold
        self.unread = source.unread
        self.file_bytes = sum(file.size for file in source.files)
        self.parameters = sum(t.size for name, t in source.tensors.items() if self._is_of_model(name))
        self._targets = self._plan(quantize)
        self._to_convert = sum(self._tensors[self._stored_name(name)].size for name in self._targets)

    def _plan(self, quantize: str | None) -> dict[str, str]:
        """Name -> type it will be converted to, for all that `take` converts; writes `notes`."""
        targets = {name: _loaded_type(name, tensor) for name, tensor in self._tensors.items()}
        targets = {name: target for name, target in targets.items() if target != self._tensors[name].type}
        for (old, new), count in sorted(Counter((self._tensors[n].type, t) for n, t in targets.items()).items()):
            blocks = block_type(old), block_type(new)
            before, after = (one.nbytes / one.block for one in blocks)
            grows = f", which takes {after / before:.1f} times the memory" * (after > before)
            self.notes.append(f"converting {count} tensor{'s' * (count > 1)} of type {old} to {new}{grows}")
        transposed = {name.removesuffix("_rows"): one for name, one in self._tensors.items() if name.endswith("_rows")}
        turned_types = {name: _transposed_type(tensor) for name, tensor in transposed.items()}
        counts = Counter((name.rpartition(".")[2], transposed[name].type, new) for name, new in turned_types.items())
        for (part, old, new), count in sorted(counts.items()):
            to = f" to {new}" if new != old else ""
            self.notes.append(f"transposing {count} {part} matrices of type {old}{to}")
        targets |= turned_types
        if quantize is not None:
            targets |= self._plan_quantize(quantize)
        return targets

    def _stored_name(self, name: str) -> str:
        """The name of the stored tensor that `take(name)` is made from."""
        rows = f"{name}_rows"
        return rows if rows in self._tensors else name

    def _columns(self, name: str) -> int:
        """Row length of what `take(name)` gives."""
        stored = self._stored_name(name)
        return self._tensors[stored].shape[-1 if stored == name else -2]

    def _plan_quantize(self, quantize: str) -> dict[str, str]:
        if quantize not in _QUANTIZE:
            raise RequestError(f"cannot quantise to {quantize!r} on load; choose q8_0 or q4_0")
        target = block_type(_QUANTIZE[quantize])
        names = [*matrix_names(self.config), *draft_matrices(self.config)]
        names = [name for name in names if not is_router(name)]
        if not any(self._tensors[self._stored_name(name)].type in FLOAT_TYPES for name in names):
            raise RequestError(
                f"{self.path} is quantised already ({self.main_type}); leave out the option to quantise it on load"
            )
        if self.config.tied_embeddings and self._tensors["embed"].type in FLOAT_TYPES:
            self._tensors["head"] = self._tensors["embed"]
            self.config = replace(self.config, tied_embeddings=False)
            names.append("head")
        floats = [name for name in names if self._tensors[self._stored_name(name)].type in FLOAT_TYPES]
        fits = [name for name in floats if self._columns(name) % target.block == 0]
        self.notes.append(f"quantising {len(fits)} matrices to {target.name}")
        if len(fits) < len(floats):
            rest = len(floats) - len(fits)
            self.notes.append(f"{rest} matrices stay as they are: their rows are not whole blocks of {target.block}")
        return dict.fromkeys(fits, target.name)

    def names(self) -> Iterator[str]:
        """Canonical names of all tensors."""
        return iter(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._stored_name(name) in self._tensors

    def is_transposed(self, name: str) -> bool:
        """Whether the files store a matrix, or stacked ones, transposed: `take` turns it."""
        return self._stored_name(name) != name

    def places(self, name: str) -> list[Place]:
        """Places of the rows of a tensor, as it is stored (`is_transposed`), in the model's files, in their order.

        ModelError for one that is made of what the files have: it has no place of its own.
        """
        tensor = self._tensors[self._stored_name(name)]
        runs = []
        for part in tensor.parts if isinstance(tensor, StackedTensor) else (tensor,):
            if isinstance(part, RawTensor):
                for run in part.data.reshape(1, -1) if part.data.ndim == 1 else part.data:
                    runs += [place for file in self._files if (place := _place(file, run)) is not None]
        scaled = isinstance(tensor, RawTensor) and tensor.scales is not None
        if scaled or sum(place.nbytes for place in runs) != tensor.nbytes:  # it was computed when the file was opened
            use = "" if self.source == "gguf" else ": take the model as a GGUF file"
            raise ModelError(f"{self.path}: {name} is not stored as it is used, so it cannot be replaced{use}")
        return runs

    def taken_type(self, name: str) -> str:
        """The type that `take` gives that tensor in."""
        return self._targets.get(name) or self._tensors[self._stored_name(name)].type

    def factors(self, name: str) -> Float32 | None:
        """Factors of a matrix's values beside those in its blocks, as `take` gives them (`RawTensor.scales`)."""
        return None if name in self._targets else self._tensors[self._stored_name(name)].scales

    def order(self, name: str) -> Indices | None:
        """The order of the columns of a matrix as `take` gives it (`RawTensor.order`); None: as they are."""
        tensor = self._tensors[self._stored_name(name)]
        return None if isinstance(tensor, StackedTensor) else tensor.order

    def stored_type(self, name: str) -> str:
        """The type that tensor has in the files."""
        return self._tensors[self._stored_name(name)].type

    def stored(self, name: str) -> RawTensor:
        """The tensor as the files have it, transposed where it is `turned`, in its type. ModelError if they changed."""
        for file in self._files:
            file.check()
        return self._tensors[self._stored_name(name)].gathered()

    def as_stored(self, name: str) -> bool:
        """Whether `take` gives a view of the file, not a copy."""
        return name not in self._targets and isinstance(self._tensors[self._stored_name(name)], RawTensor)

    @property
    def files(self) -> Sequence[MappedFile]:
        """The model's files."""
        return self._files

    def rests_at(self, name: str) -> tuple[int, int] | None:
        """(number of the file, offset) of what `take` gives; None where that is not one piece of a file."""
        tensor = self._tensors.get(name)
        if name in self._targets or not isinstance(tensor, RawTensor) or not tensor.data.flags.c_contiguous:
            return None
        scales = 1 if tensor.scales is None else len(tensor.scales)
        return self._placed(tensor.data) if scales == 1 else None

    def rest(self, name: str) -> RestingTensor:
        """Matrices [n, out, in] that are read later, in place of `take`. ModelError if they cannot be."""
        resting = self.resting(name)
        if resting is None:
            raise ModelError(
                f"{self.path}: {name} is not stored as it is computed, so it cannot stay on disk: leave out "
                "--quantize, or take a file in a type that is computed as it is"
            )
        self._used.add(name)
        return resting

    def resting(self, name: str) -> RestingTensor | None:
        """Places of matrices [n, out, in]; None where the files do not have each in one piece as `take` gives it."""
        tensor = self._tensors.get(name)
        if name in self._targets or not isinstance(tensor, RawTensor | StackedTensor) or len(tensor.shape) != 3:
            return None
        n = tensor.shape[0]
        if isinstance(tensor, StackedTensor):
            raw = [part for part in tensor.parts if isinstance(part, RawTensor) and part.data.ndim == 1]
            matrices, scales = [part.data for part in raw], tensor.scales
        else:
            matrices, scales = list(tensor.data.reshape(n, -1) if tensor.data.ndim == 1 else tensor.data), tensor.scales
        places = tuple(place for data in matrices if (place := self._placed(data)) is not None)
        if len(places) != n:
            return None
        return RestingTensor(tensor.type, tensor.shape, places, scales)

    def _placed(self, data: Bytes) -> tuple[int, int] | None:
        for number, file in enumerate(self._files):
            if (place := _place(file, data)) is not None:
                return number, place.begin
        return None

    def take(self, name: str) -> RawTensor:
        """The tensor: matrices in one of `NATIVE_TYPES`, vectors in F32, F16 or BF16. ModelError if it is missing.

        Data is a read-only view of the file, or a new array if it had to be converted, gathered or transposed.
        """
        stored = self._stored_name(name)
        tensor = self._tensors.get(stored)
        if tensor is None:
            raise ModelError(f"{self.path}: there is no tensor {name}")
        for file in self._files:
            file.check()
        self._used.add(stored)
        if name.endswith((".threshold", ".product_threshold")):
            self._check_thresholds(name, tensor.gathered().float32())
        if name.endswith(_OF_STATES):
            self._check_of_states(name, tensor.gathered().float32())
        elif len(tensor.shape) == 1 or name.endswith("_bias"):
            self._check_vector(name, tensor.gathered().float32())
        if name not in self._targets:
            return tensor.gathered()
        change = convert if stored == name else transpose
        return self._converted_to(name, tensor.gathered(), change)

    def _converted_to(self, name: str, tensor: RawTensor, change: Callable[..., RawTensor]) -> RawTensor:
        """The tensor in the type that `take` gives; `change` makes it."""
        try:
            return change(tensor, self._targets[name], self._tick)
        except ModelError as error:
            raise ModelError(f"{self.path}: tensor {name}: {error}") from None

    def take_some(self, name: str, index: Indices) -> RawTensor:
        """Matrices of the index, of a tensor [n, out, in] that `take` gives as a whole."""
        tensor = self._tensors.get(name)
        if isinstance(tensor, StackedTensor):
            few = StackedTensor(tuple(tensor.parts[at] for at in index)).gathered()
        elif isinstance(tensor, RawTensor) and tensor.data.ndim == 1 and name in self._targets:
            few = tensor.subset(index)
        else:
            return self.take(name).subset(index)
        for file in self._files:
            file.check()
        self._used.add(name)
        return self._converted_to(name, few, convert) if name in self._targets else few

    def _check_thresholds(self, name: str, values: Float32) -> None:
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ModelError(f"{self.path}: tensor {name} holds values that are negative or no numbers")

    def _check_of_states(self, name: str, values: Float32) -> None:
        """A state that grew, or was no number once, would stay so for a whole text."""
        if not np.isfinite(values).all() or (name.endswith("mamba_a") and (values > 0).any()):
            raise ModelError(f"{self.path}: tensor {name} holds values that are no numbers, or make states grow")

    def _check_vector(self, name: str, values: Float32) -> None:
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds values that are infinite or not numbers")

    @contextmanager
    def names_damage(self) -> Iterator[None]:
        """ModelError naming the matrix where those that are packed have scales that are infinite or NaN."""
        try:
            yield
        except OverflowError as error:
            for name, tensor in self._tensors.items():
                if tensor.type in NATIVE_TYPES and not all_numbers(tensor.gathered().data, tensor.type):
                    raise ModelError(f"{self.path}: tensor {name}: {error}") from None
            raise ModelError(f"{self.path}: {error}") from None

    def skip(self, name: str) -> None:
        """Count a tensor as taken without reading it, because its contents come from elsewhere.

        ModelError if it is missing.
        """
        stored = self._stored_name(name)
        if stored not in self._tensors:
            raise ModelError(f"{self.path}: there is no tensor {name}")
        if name in self._targets and stored not in self._used:
            self._to_convert -= self._tensors[stored].size
        self._used.add(stored)

    def _tick(self, elements: int) -> None:
        self._converted += elements
        self._progress("converting weights", min(self._converted, self._to_convert), self._to_convert)

    def finish(self) -> None:
        """ModelError naming the tensors that were not taken: the model would run without part of itself.

        Predictors may be left over: they are optional.
        """
        left = [name for name in self._tensors if name not in self._used and not _is_predictor(name)]
        if left:
            names = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ModelError(f"{self.path}: not used by a {self.config.architecture} model: {names}")

    def check_unchanged(self) -> None:
        """ChangedError if a file was changed since it was opened: views of it are not the model's any more."""
        for file in self._files:
            file.check_unchanged()

    def release(self) -> None:
        """Release the memory of the pages read so far. Views stay valid: pages come back on access."""
        for file in self._files:
            file.release()

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of the tensors on disk by storage type, the largest share first."""
        sizes: Counter[str] = Counter()
        for name, own in self._stored_types.items():
            sizes[own] += self._tensors[name].nbytes
        return dict(sizes.most_common())

    @property
    def main_type(self) -> str:
        """The storage type that holds most of the weights of the layers."""
        sizes: Counter[str] = Counter()
        for name in matrix_names(self.config):
            stored = self._stored_name(name)
            if stored in self._stored_types:
                sizes[self._stored_types[stored]] += self._tensors[stored].size
        return sizes.most_common(1)[0][0]

    @property
    def quantisation(self) -> str:
        """Usual name of the model's types as it is loaded: the mix that a GGUF file states, else the main type."""
        if self.quantize is not None:
            return _QUANTIZE[self.quantize]
        return stated_mix(self.metadata.get("general.file_type"), self.main_type) or self.main_type

    def _is_of_model(self, name: str) -> bool:
        """Whether a tensor is neither of a predictor nor of the draft head."""
        return not _is_predictor(name) and not name.startswith(draft_prefix(self.config))

    def join_draft(self, head: Source) -> None:
        """Take the draft head of other files, an EAGLE head. Its matrices of floats get the type of `quantize`, or
        Q8_0 where the model's are quantised."""
        quantised = self.main_type not in FLOAT_TYPES
        target = _QUANTIZE[self.quantize] if self.quantize else "Q8_0" if quantised else None
        self.config = head.config
        self._files = [*self._files, *head.files]
        self._tensors |= head.tensors
        self._stored_types |= {name: one.type for name, one in head.tensors.items()}
        types = {name: _loaded_type(name, one) for name, one in head.tensors.items()}
        floats = [name for name in draft_matrices(self.config) if types[name] in FLOAT_TYPES]
        if target is not None:
            block = block_type(target).block
            types |= {name: target for name in floats if self._columns(name) % block == 0}
        changed = {name: new for name, new in types.items() if new != head.tensors[name].type}
        if target in changed.values():
            count = sum(new == target for new in changed.values())
            self.notes.append(f"quantising {count} matrices of the EAGLE head to {target}")
        self._targets |= changed
        self._to_convert = sum(self._tensors[self._stored_name(name)].size for name in self._targets)

    def leave_draft(self, reason: str) -> str:
        """Leave the draft head out. reason, and the line that is returned: for people."""
        of_head, draft = draft_prefix(self.config), self.config.draft
        self._tensors = {name: one for name, one in self._tensors.items() if not name.startswith(of_head)}
        self._targets = {name: one for name, one in self._targets.items() if not name.startswith(of_head)}
        self._stored_types = {name: one for name, one in self._stored_types.items() if name in self._tensors}
        self._to_convert = sum(self._tensors[self._stored_name(name)].size for name in self._targets)
        self.config = replace(self.config, draft=None)
        return f"{NO_MTP if draft is None or draft.eagle is None else NO_EAGLE}: {reason}"

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft head on disk; 0: there is none, or it is left out."""
        of_head = draft_prefix(self.config)
        return sum(nbytes for name, _, _, nbytes in self.tensor_list() if name.startswith(of_head))

    def tensor_list(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """(name, type, shape, bytes) of every tensor on disk."""
        tensors = ((name, self._tensors[name]) for name in self._stored_types)
        return [(name, tensor.type, tensor.shape, tensor.nbytes) for name, tensor in tensors]

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digits that change with the model: its configuration, its tensors, and samples of their bytes."""
        digest = hashlib.sha256()
        for file in self._files:
            file.check()
        digest.update(repr(replace(self.config, name="", tied_embeddings="head" not in self._stored_types)).encode())
        listed = (one for one in self.tensor_list() if not one[0].startswith(draft_prefix(self.config)))
        for name, type_name, shape, nbytes in sorted(listed):
            digest.update(f"{name} {type_name} {shape} {nbytes}\n".encode())
            for part in self._tensors[name].samples():
                digest.update(part)
        return digest.hexdigest()[:32]


def _place(file: MappedFile, run: Bytes) -> Place | None:
    at = run.ctypes.data - file.view().ctypes.data
    return Place(file.path, at, run.nbytes) if 0 <= at < file.size else None


def _is_predictor(name: str) -> bool:
    return ".predictor_" in name


def _transposed_type(tensor: StoredTensor) -> str:
    """The type of a matrix once it is transposed: blocks lie along the other axis then."""
    if tensor.type in FLOAT_TYPES:
        return tensor.type
    return "Q8_0" if tensor.shape[-2] % block_type("Q8_0").block == 0 and tensor.type != "F64" else "F32"


def _loaded_type(name: str, tensor: StoredTensor) -> str:
    """The type of a tensor in memory: its own, but for F64, vectors in blocks and factors that a table cannot have."""
    if name.endswith(("embed", "positions")) and tensor.scales is not None:
        return "Q8_0"  # rows are looked up as files have them, without factors beside
    if len(tensor.shape) == 1:
        return tensor.type if tensor.type in FLOAT_TYPES else "F32"
    return tensor.type if tensor.type in NATIVE_TYPES else "F32"  # F64 alone is none of those


def open_checkpoint(
    path: str | Path, quantize: str | None = None, progress: Progress = silent, *, draft_head: bool = False
) -> Checkpoint:
    """Open a GGUF file (any part of a split one), a Hugging Face folder, or a folder that holds one GGUF model.

    quantize: "q8_0" or "q4_0", to quantise the matrices of a float model as they are taken; draft_head: with
    the head that predicts further tokens (`ModelConfig.draft`), if the model has one that can be read. ModelError if
    the model is malformed or not supported, RequestError if the request does not fit it.
    """
    return Checkpoint(_open(Path(path), draft_head), quantize, progress)


def _open(path: Path, draft_head: bool) -> Source:
    if path.suffix in (".safetensors", ".json") and (path.parent / "config.json").exists():
        path = path.parent  # any file of a Hugging Face folder is accepted for the folder
    elif path.suffix in (".safetensors", ".json") and path.is_file():
        raise ModelError(f"{path} is not a model by itself: give its folder, with config.json and tokenizer")
    if path.suffix == ".gpuidx":
        from powerinfer.formats.published import GPU_INDEX

        raise ModelError(f"{path} {GPU_INDEX}")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(f"{path}: pickle files can run code and are never read; use a GGUF file or safetensors")
    if not path.is_dir():
        return _open_gguf(path, draft_head)
    if (path / "config.json").exists():
        from powerinfer.formats.folder import open_folder

        return open_folder(path, draft_head)
    return _open(_only_gguf(path), draft_head)


def _open_gguf(path: Path, draft_head: bool) -> Source:
    from powerinfer.formats.gguf import read_gguf

    file = read_gguf(path)
    if file.magic == "PWRI":
        from powerinfer.formats.published import open_published

        return open_published(file)
    from powerinfer.formats.gguf_model import open_gguf

    return open_gguf(file, draft_head)


def _only_gguf(folder: Path) -> Path:
    """The one GGUF model of a folder: a single file, or the first part of a split one."""
    files = sorted(file for file in folder.glob("*.gguf") if "-of-" not in file.name or "-00001-of-" in file.name)
    if not files:
        raise ModelError(f"{folder} holds no model: neither config.json with safetensors files nor a GGUF file")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        more = f" and {len(files) - 4} more" if len(files) > 4 else ""
        raise ModelError(f"{folder} holds {len(files)} GGUF models; choose one of them: {names}{more}")
    return files[0]
