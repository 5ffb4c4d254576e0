"""The bytes of everything in a model, from its configuration and types alone: no weight is read.

A model is a checkpoint, whose headers have the types, or only a configuration and one weight type. Bytes are those of
the engine's own layouts: on the CPU matrices are in panels, rows padded to 16 and heads to whole lanes; on a GPU in the
types of its kernels, without padding; the neurons of an FFN as bundles, on a GPU as rows of its matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.config import ExpertsConfig, ModelConfig
from powerinfer.devices.cpu_experts import SharedPlace, expert_layout, plain_layout, shared_place, types_problem
from powerinfer.devices.link import link_bytes
from powerinfer.devices.states import state_bytes, state_slots
from powerinfer.errors import RequestError
from powerinfer.experts import NeuronUse
from powerinfer.formats.bundle_file import bundle_layouts, n_groups
from powerinfer.formats.expert_rows import resting_layers
from powerinfer.formats.json_file import checked, of_kind, parse_json
from powerinfer.formats.layout import check, is_matrix, is_router, matrix_names, shapes
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import ACROSS, FLOAT_TYPES, PACKED_DOWN, ROW_TYPES, STORED_ROWS
from powerinfer.kernels import cpu, gpu, gpu_states
from powerinfer.kernels.draft_rows import recent_tokens
from powerinfer.kernels.gpu_types import BY_NEURON
from powerinfer.models.inventory import Inventory, Matrix, matrix, take_inventory
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout
from powerinfer.placement.mixes import DTYPES, stored_type
from powerinfer.placement.power_law import FAMILIES, Law
from powerinfer.placement.working_memory import LAYER_MARGIN, working_memory

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.hardware.description import RatedTypes

PREDICTOR_SHARE = 0.0709
"""Weights of the predictors per weight of the model: the mean of arXiv 2312.12456."""
MOST_PREDICTOR = 0.10
"""Maximum share of predictors in the model's bytes, as in `train`."""
SELECTED_PER_FIRING = 1.5
"""Neurons that a predictor selects per neuron that fires, if unknown: ReLU and ProSparse models of 7B and 13B
have 1.0 to 2.1 (arXiv 2402.13516, table 3)."""
MOST_NEURONS = 1 << 24
"""Maximum for a plan; OPT-175B has 4.7 million."""

_PREDICTOR_TYPE = "Q8_0"
_EVERY = slice(None)


@dataclass(frozen=True)
class Model:
    """The contents of a model, layer by layer.

    attention: q, k, v, o; ffn: gate (where there is one), up, down as the dense path keeps them, or what another kind
    of FFN has: those of experts that a router selects (experts), and the others (beside); vectors: bytes of norms and
    biases, F32; predictors: of each layer in and out, () without any, or of a layer without an FFN, those inside
    experts where in_experts; selected: for each layer the neurons that its predictor selects by those that fire;
    tables: embedding and learned positions, as they are stored; projections: around an embedding of another width.
    bundles: layouts of the layers' neurons. fingerprint: of the weights' origin, "" for a model that is only described.
    quantize: the type its float matrices are quantised to on load, as the engine's option; `type` of the matrices is
    then this type. in_experts: neurons inside experts are told apart, of which a token needs the share `firing`, and a
    GPU computes as many where skips_on_gpu, else all; in_rows: and down of experts rests on disk in rows of them.
    inside: how often these neurons fire, by layer, where that is known.
    converted: canonical names of matrices that do not lie in the
    file as they are used. rows_command: the command that stores such rows.
    """

    name: str
    config: ModelConfig
    bundles: tuple[BundleLayout, ...]
    attention: tuple[tuple[Matrix, ...], ...]
    ffn: tuple[tuple[Matrix, ...], ...]
    experts: tuple[tuple[Matrix, ...], ...]
    beside: tuple[tuple[Matrix, ...], ...]
    vectors: int
    predictors: tuple[tuple[Matrix, ...], ...]
    selected: tuple[float, ...]
    tables: int
    projections: tuple[Matrix, ...]
    head: Matrix
    parameters: int
    inventory: Inventory = field(repr=False, compare=False)  # follows from the rest
    fingerprint: str = ""
    quantize: str | None = None
    quantisation: str = field(default="", compare=False)  # usual name of its types, such as that of a mix
    in_place: bool = field(default=True, compare=False)  # experts lie in the file as they are used
    in_experts: bool = False
    in_rows: bool = False
    skips_on_gpu: bool = True
    firing: float = 1.0
    inside: Mapping[int, NeuronUse] = field(default_factory=dict, repr=False, compare=False)
    converted: frozenset[str] = field(default=frozenset(), repr=False, compare=False)  # follows from the file
    rows_command: str = field(default="powerinfer pack", repr=False, compare=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of attention, FFNs and tables, as they are stored."""
        return sum(one.stored for layer in (*self.attention, *self.ffn) for one in layer) + self.tables

    def whole_ffn(self, layer: int) -> tuple[Matrix, ...]:
        """The matrices of an FFN that is placed with its layer, because its neurons are not told apart; else ()."""
        return self.ffn[layer] if self.config.layers[layer].ffn.neurons is None else ()

    @cached_property
    def n_experts(self) -> tuple[int, ...]:
        """Experts of each layer that a router selects; 0 where an FFN has none."""
        ffns = (layer.ffn for layer in self.config.layers)
        return tuple(ffn.n_experts if isinstance(ffn, ExpertsConfig) else 0 for ffn in ffns)

    @cached_property
    def rated_types(self) -> RatedTypes:
        """Types whose rates on a GPU predict the time of its steps."""
        from powerinfer.hardware.description import RatedTypes

        layers = (*self.attention, *self.ffn, *self.experts, *self.beside, *self.predictors)
        weights = (self.head, *self.projections, *(weight for layer in layers for weight in layer))
        rows = set() if any(self.n_experts) else {layout.gate_type for layout in self.bundles}
        return RatedTypes.rated({weight.gpu_type for weight in weights} | rows, rows)

    def expert_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of an expert on a GPU and in panels, with its rows of a predictor; 0 where there are none."""
        return self._expert_bytes[layer]

    @cached_property
    def _expert_bytes(self) -> tuple[tuple[int, int], ...]:
        return tuple(map(self._bytes_of_expert, range(self.config.n_layers)))

    def _bytes_of_expert(self, layer: int) -> tuple[int, int]:
        n, own, biases = max(1, self.n_experts[layer]), self.experts[layer], self.expert_biases(layer)
        stored, panels = sum(one.stored for one in own) // n, sum(one.panels for one in own) // n
        for outer in self.expert_predictor(layer)[1:]:
            size, neurons = self.config.experts[layer].size, self.neurons_inside(layer, True)
            stored += outer.stored * size // neurons * self.selects_on_gpu(layer)
            panels += outer.panels * size // neurons
        return stored + biases, panels + biases

    def sent_expert(self, layers: int) -> int:
        """Bytes of the buffers through which experts of the first layers are sent to a GPU, one at a time, each."""
        return max((self.expert_bytes(layer)[1] for layer in range(layers)), default=0)

    def hot_bytes(self, layer: int, hot: int) -> tuple[int, int]:
        """Bytes of all of a layer's experts on a GPU that has `hot` neurons of each, whole groups, and in RAM, which
        has all: with their rows of a predictor, each on one side. 0: what the groups of neurons share."""
        *first, down = self.experts[layer]
        experts, (_, outer) = self.config.experts[layer], self.expert_predictor(layer)
        neurons, outer_rows = experts.n_experts * experts.size, self.neurons_inside(layer, True)
        hot_rows = experts.n_experts * hot
        shared = 2 * experts.row_width(self.config.d_model) * neurons // BUNDLE_GROUP
        shared, numbers = (shared, 4 * hot_rows) if down.gpu_type in gpu.SHARING else (0, 0)
        rows = sum(one.stored for one in first) + down.stored - shared
        on_gpu = rows * hot_rows // neurons + outer.stored * hot_rows // outer_rows + shared + numbers
        return on_gpu, experts.n_experts * self.expert_bytes(layer)[1] - outer.panels * hot_rows // outer_rows

    def may_divide(self, layer: int) -> bool:
        """Whether a GPU can have some neurons of each of a layer's experts, and it is known how often they fire."""
        ffn = self.config.layers[layer].ffn
        return layer in self.inside and self.selects_on_gpu(layer) and isinstance(ffn, ExpertsConfig)

    def expert_predictor(self, layer: int) -> tuple[Matrix, ...]:
        """The predictor among the neurons of a layer's experts, in and out; () without one."""
        return self.predictors[layer] if self.in_experts and self.predictors else ()

    def gpu_expert_predictor(self, layer: int, slots: int) -> int:
        """Bytes on a GPU of a layer's predictor among the neurons of that number of its experts, and of a shared one,
        but for the rows that lie with the experts; 0 without one."""
        predictor = self.expert_predictor(layer)
        if not predictor:
            return 0
        inner, outer = predictor
        neurons, experts = self.neurons_inside(layer, True), self.config.experts[layer]
        shared = (neurons - experts.n_experts * experts.size) * self.selects_on_gpu(layer)
        selects = self.selects_on_gpu(layer) and slots + shared > 0
        hides = selects or (bool(experts.latents) and slots < experts.n_experts)
        return inner.stored * hides + outer.stored * shared // neurons

    def ram_expert_predictor(self, layer: int) -> tuple[Matrix, ...]:
        """Parts of it that the CPU has for experts of a layer that a GPU has, but for the rows that lie with them:
        nothing where these read latents, for which the GPU computes that."""
        return () if self.config.experts[layer].latents else self.expert_predictor(layer)[:1]

    def selects_on_gpu(self, layer: int) -> bool:
        """Whether a GPU has a predictor for its experts of a layer, which may be computed whole there."""
        return len(self.expert_predictor(layer)) > 0 and self.experts[layer][-1].gpu_type in BY_NEURON

    def expert_biases(self, layer: int) -> int:
        """Bytes of an expert's biases."""
        about = self.config.layers[layer].ffn
        if not isinstance(about, ExpertsConfig) or not about.bias:
            return 0
        return 4 * ((len(about.matrices) - 1) * about.size + self.config.d_model)

    def by_neuron(self, predicted: bool = False, rows: bool = False, on_gpu: bool = True) -> Model:
        """The same with the neurons inside experts told apart in RAM: up and down as bundles, where they can be, of
        those without gates down; predicted: the first product, too. rows: what RAM does not hold may be on disk;
        on_gpu: a GPU skips some, too."""

        def bundled(layer: int, matrices: tuple[Matrix, ...], shared: bool) -> tuple[Matrix, ...]:
            panels = self._bundled(layer, predicted, shared)
            return tuple(replace(one, panels=panels.get(one.name, one.panels)) for one in matrices)

        layers = range(self.config.n_layers)
        ffn = tuple(bundled(layer, self.ffn[layer], True) for layer in layers)
        experts = tuple(bundled(layer, self.experts[layer], False) for layer in layers)  # beside a GPU, which has it
        firing = law_of(self.config).active
        skipping = replace(self, ffn=ffn, experts=experts, predictors=(), in_experts=True, firing=firing)
        return replace(skipping, in_rows=rows, skips_on_gpu=on_gpu)

    def computed_whole(self) -> Model:
        """The same with every neuron inside experts computed, as if a selector were suspended."""
        return replace(self, firing=1.0, predictors=())

    def neurons_inside(self, layer: int, predicted: bool) -> int:
        """Neurons of a layer's experts that are told apart in RAM, with those of a shared expert; 0: none are.
        predicted: as of `by_neuron`."""
        experts = self.config.layers[layer].ffn
        if not isinstance(experts, ExpertsConfig) or experts.whole_reason is not None:
            return 0
        shared = experts.shared_size if self._shared_place(layer, predicted) else 0
        return experts.n_experts * experts.size + shared

    def _shared_matrices(self, layer: int) -> list[Matrix]:
        return [one for one in self.beside[layer] if ".shared_" in one.name]

    def _shared_place(self, layer: int, predicted: bool) -> SharedPlace:
        """Place of the bundles of a layer's shared expert. predicted: as of `by_neuron`."""
        types, shared = ([one.type for one in some] for some in (self.experts[layer], self._shared_matrices(layer)))
        experts = self.config.experts[layer]
        return shared_place(experts, self.config.d_model, types, shared, predicted=predicted)

    def _bundled(self, layer: int, predicted: bool, shared: bool) -> dict[str, int]:
        """Bytes in RAM of matrices of a layer's experts in whose place are bundles, by name: one of these matrices
        counts the bundles, the others nothing. shared: with those of the shared expert."""
        about = self.config.layers[layer].ffn
        if not isinstance(about, ExpertsConfig) or not self.neurons_inside(layer, predicted):
            return {}
        *gate, up, down = self.experts[layer]
        groups, d_model = about.n_experts * n_groups(about.size), self.config.d_model
        width, firsts = about.row_width(d_model), {one.name: 0 for one in gate if predicted}
        of_shared = self._shared_matrices(layer)
        place = self._shared_place(layer, predicted) if shared else ""
        resting = {one.name: 0 for one in (of_shared if predicted else of_shared[1:]) if place}
        if place == "behind":
            groups += n_groups(about.shared_size)
        if place == "apart":
            types = [one.type for one in of_shared]
            of_types = expert_layout if predicted else plain_layout
            layout = of_types(d_model, types[0], types[1])
            resting[of_shared[-1].name] = n_groups(about.shared_size) * layout.group_bytes
        if not about.gated and not predicted:
            return resting | {down.name: groups * plain_layout(width, up.type, down.type).group_bytes}
        layout = expert_layout(width, up.type, down.type, about.gated and predicted)
        return resting | firsts | {up.name: groups * layout.group_bytes, down.name: 0}

    @property
    def rows_in_ram(self) -> int:
        """Bytes that RAM has beside experts whose rows of down rest on disk: rows of shared experts, and where each
        lies."""
        if not self.in_rows:
            return 0
        total = 0
        for layer, about in resting_layers(self.config).items():
            total += sum(one.panels for one in self.ffn[layer])
            total -= sum(one.panels for one in (*self.experts[layer], *self.beside[layer]))
            total += 4 * (about.n_experts * about.size + about.predicted_shared)
        return total

    @cached_property
    def may_skip(self) -> bool:
        """Whether neurons inside experts can be told apart by `exact`, by their configuration and types."""
        types = {one.name: one.type for layer in self.experts for one in layer}
        config = self.config
        return config.whole_experts_reason is None and types_problem(config, types.__getitem__, False) is None

    def _told_apart(self, layer: int) -> bool:
        ffn = self.config.layers[layer].ffn
        return isinstance(ffn, ExpertsConfig) and ffn.whole_reason is None

    def step_share(self, layer: int, batch: int) -> float:
        """Share of the bytes of a layer's experts that a step reads, of those that it needs: the first matrix, or the
        rows of it that a predictor selects, and of the others the rows of neurons that fire, with the scales of the
        groups these are in."""
        if not self.in_experts or not self._told_apart(layer):
            return 1.0
        selects = min(1.0, self.selected[layer] * self.firing) if self.expert_predictor(layer) else 1.0
        return self.read_share(layer, 1 - (1 - selects) ** batch, 1 - (1 - self.firing) ** batch)

    def read_share(self, layer: int, selects: float, fires: float) -> float:
        """The same where that share of the neurons is selected, or has its first product computed, and fires."""
        first, *others = self.experts[layer]
        down = ACROSS.get(others[-1].type, others[-1].type)
        width = self.config.experts[layer].row_width(self.config.d_model)
        row, shared = cpu.bundle_row_bytes(down, width)
        scales = shared / BUNDLE_GROUP / (row + shared / BUNDLE_GROUP)
        rows = (1 - scales) * fires + scales * (1 - (1 - fires) ** BUNDLE_GROUP)
        sizes = [first.stored * selects, *(one.stored * fires for one in others[:-1]), others[-1].stored * rows]
        return sum(sizes) / sum(one.stored for one in self.experts[layer])

    @cached_property
    def weight_type(self) -> str:
        """The type of most of the FFNs' weights."""
        sizes: dict[str, int] = {}
        for one in (each for layer in self.ffn for each in layer):
            sizes[one.type] = sizes.get(one.type, 0) + one.panels
        return max(sizes, key=lambda kind: sizes[kind])

    def kv_bytes(self, kv_type: str, context: int, batch: int, layers: slice = _EVERY) -> int:
        """Keys and values of these layers, `batch` requests of `context` tokens each, in whole pages."""
        every = self.config.with_draft.layers  # the draft head's is the last
        page = sum(cpu.kv_page_bytes(kv_type, layer.attention) for layer in every[layers])
        return batch * -(-context // cpu.PAGE) * page

    def gpu_kv_bytes(self, kv_type: str, context: int, batch: int, layers: slice = _EVERY) -> int:
        """The same on a GPU, where heads are not padded."""
        heads = (layer.attention for layer in self.config.layers[layers])
        token = sum((2 - bool(one.latents)) * one.cached_heads * gpu.kv_bytes(kv_type, one.head_dim) for one in heads)
        return batch * -(-context // cpu.PAGE) * cpu.PAGE * token

    def gpu_draft_bytes(self, kv_type: str, context: int, batch: int, tokens: int) -> int:
        """Bytes of the draft head on a GPU: weights, a layer of the cache, two rows of `tokens` tokens, a margin; of
        one with experts buffers between the devices, and of their sums. Temporaries lie where those of the model
        were."""
        assert self.config.draft is not None
        attention = self.config.draft.layer.attention
        cached = (2 - bool(attention.latents)) * attention.cached_heads * gpu.kv_bytes(kv_type, attention.head_dim)
        pages = batch * -(-context // cpu.PAGE)
        rows = 4 * 2 * tokens * self.config.d_model + 2 * self.draft_link_bytes(tokens) + self._draft_row_bytes
        return self.inventory.gpu_draft + pages * cpu.PAGE * cached + rows + self.rotation_bytes + LAYER_MARGIN

    @property
    def _draft_row_bytes(self) -> int:
        """Bytes on a GPU of the copies of rows of the output head that drafts are chosen from."""
        vocab = self.config.vocab_size
        recent = recent_tokens(vocab) // cpu.LANES * cpu.LANES
        plain = not self.config.head_bias and self.config.logit_cap is None
        return recent * (self.head.stored // vocab + 4) if plain else 0

    def draft_link_bytes(self, tokens: int) -> int:
        """Bytes of RAM of the buffers between the devices of a draft head on a GPU, where it has experts."""
        draft = self.config.draft
        routed = draft is not None and isinstance(draft.layer.ffn, ExpertsConfig)
        return link_bytes(tokens, self.config.with_draft) if routed else 0

    def state_bytes(self, requests: int, layers: slice = _EVERY, undo_tokens: int = 0) -> int:
        """The states of sequences, if these layers have any, for that many requests and their prefixes; undo_tokens: as
        of `StateMemory`."""
        return state_slots(requests, True, undo_tokens) * state_bytes(self.config, layers, undo_tokens)

    def gpu_state_bytes(self, requests: int, layers: slice = _EVERY, undo_tokens: int = 0) -> int:
        """The same on a GPU."""
        some = range(self.config.n_layers)[layers]
        kinds = (kind for layer, kind in self.config.states.items() if layer in some)
        each = sum(gpu_states.state_bytes(kind, undo_tokens) for kind in kinds)
        return state_slots(requests, True, undo_tokens) * each

    def layer_state(self, layer: int) -> int:
        """Bytes of a sequence's state in a layer, 0 where it has none."""
        return state_bytes(self.config, slice(layer, layer + 1))

    @property
    def rotation_bytes(self) -> int:
        """The frequencies of the rotary embedding, on a GPU."""
        return sum(4 * (rope.dim // 2) for rope in self.config.ropes)

    def layer_vectors(self, dense: bool, layers: int = 1) -> int:
        """Norms, biases and thresholds of the first layers; without `dense` not those that go with neurons."""
        left_out = () if dense else ("gate_bias", "up_bias", "threshold", "product_threshold")
        return 4 * sum(size for each in self._vectors[:layers] for name, size in each.items() if name not in left_out)

    @cached_property
    def end_vectors(self) -> int:
        """Bytes of the norm before the head, and of its bias."""
        ends = ("final_norm", "head_bias")
        return 4 * sum(n for name, n in self.inventory.vectors.items() if name.startswith(ends))

    @cached_property
    def _vectors(self) -> list[dict[str, int]]:
        """Of each layer, name -> elements."""
        every: list[dict[str, int]] = [{} for _ in self.config.layers]
        for name, elements in self.inventory.vectors.items():
            _, _, inner = name.partition(".")
            layer, _, own = inner.partition(".")
            if inner and not own.startswith("experts_"):  # biases of experts lie where these do
                every[int(layer)][own] = elements
        return every

    @cached_property
    def bundle(self) -> BundleLayout:
        """The layout of the largest bundles: plans count all of a model's neurons as large."""
        return max(self.bundles, key=lambda layout: layout.stride)

    @cached_property
    def gpu_neuron(self) -> int:
        """Bytes of one of the largest neurons on a GPU, as a plan counts all."""
        return max(map(self.gpu_neuron_of, range(self.config.n_layers)))

    def gpu_neuron_of(self, layer: int) -> int:
        """Bytes of one neuron on a GPU, `gpu_shared` aside: rows, biases, thresholds, where its group is, counter."""
        bundles, ffn = self.bundles[layer], self.config.layers[layer].ffn.neurons
        vectors = int(bundles.down_type == "Q4_0X32")
        if ffn is not None:
            vectors += (2 if bundles.gated else 1) * ffn.bias + ffn.thresholds + ffn.product_thresholds
        return gpu.neuron_bytes(bundles) + 4 * vectors + 8

    @property
    def gpu_shared(self) -> int:
        """Bytes on a GPU that each group of bundles shares, once one of its neurons is there."""
        return 2 * self.bundle.d_model * any(layout.down_type == "Q4_0X32" for layout in self.bundles)

    def gpu_predictor(self, pair: tuple[Matrix, ...]) -> int:
        """Bytes of a layer's predictor on a GPU, with the numbers of its neurons."""
        return sum(one.stored for one in pair) + 4 * self.config.widest_ffn * bool(pair)

    def gpu_scratch(self, tokens: int, requests: int, layers: int) -> int:
        """Working memory on a GPU of steps of up to `tokens` tokens and `requests` logits: an estimate from above.

        What takes it is in `working_memory`; what a load really takes is measured (`hybrid/vram.py`).
        """
        step = tokens, requests, layers
        if step not in self._scratch:  # a plan asks for few of them many times
            self._scratch[step] = sum(working_memory(self.config, *step).values())
        return self._scratch[step]

    @cached_property
    def _scratch(self) -> dict[tuple[int, int, int], int]:
        return {}

    def scratch_bytes(self, chunk: int, batch: int) -> int:
        """The CPU's working memory while `chunk` tokens of a prompt are computed (csrc/program.cpp).

        The residual stream, q k v, what attention gives, gate and up in F32, rotations, logits of `batch` tokens, and
        the forms of activations that kernels want.
        """
        per_token = self.row_bytes + max(layer.ffn.row_bytes(self.config.d_model) for layer in self.config.layers)
        per_token += max(layer.attention.row_bytes() for layer in self.config.layers)
        per_token += 4 * sum(rope.dim for rope in self.config.ropes)
        return chunk * per_token + 4 * batch * cpu.round_up(self.config.vocab_size, cpu.LANES)

    @property
    def row_bytes(self) -> int:
        """Of that, of each token, what every model has between its operators, and forgets behind a step."""
        config, layers = self.config, self.config.with_draft
        every, widest = [layer.attention for layer in layers.layers], layers.widest_ffn
        qkv = max((one.n_heads + 2 * one.n_kv_heads) * cpu.round_up(one.head_dim, cpu.LANES) for one in every)
        wide = max(config.d_model, config.embed_dim, *(one.width for one in every))
        hidden = max(widest, config.d_model, config.embed_dim, config.layer_inputs)
        joined = 2 * config.d_model if config.draft is not None else 0
        eagle = None if config.draft is None else config.draft.eagle
        features = 0 if eagle is None else len(eagle.layers) * config.d_model
        streams = 0 if config.altup is None else config.altup.streams * config.d_model
        floats = config.d_model + qkv + wide + 2 * hidden + config.layer_inputs * config.n_layers + joined + streams
        floats += features
        rows = max(wide, joined, features) + widest
        forms = rows * (4 + 2 + 1) + rows * 12 // 32  # F32, BF16, Q8: scales and sums
        return 4 * floats + forms


# ---------------------------------------------------------------- models from checkpoints and configurations


def checkpoint_model(checkpoint: Checkpoint, prepared: str | None = None, fresh: bool = False) -> Model:
    """The model of a checkpoint, from its headers.

    The predictor is the trained one, else the one in its file. Bundles are those that exist, else those that `pack`
    would make. fresh: as if nothing were packed or trained yet.
    """
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.formats.prepared import BUNDLES, PreparedFile

    config = checkpoint.config
    if PreparedFile(BUNDLES, checkpoint, prepared).exists() and not fresh:
        layouts = open_bundles(checkpoint, prepared, cpu.bundle_row_bytes).layouts
    else:
        types = choose_types(checkpoint)
        layouts = bundle_layouts(config, types.gate, types.downs, cpu.bundle_row_bytes)
    trained = not fresh and config.whole_reason is None
    predictors, ratios = _known_predictors(checkpoint, prepared, config.separable, trained)
    name = config.name or checkpoint.path.name
    model = _model(config, name, checkpoint.taken_type, layouts, predictors, ratios)
    return replace(
        model,
        parameters=checkpoint.parameters,
        fingerprint=checkpoint.fingerprint,
        quantize=checkpoint.quantize,
        quantisation=checkpoint.quantisation,
        in_place=checkpoint.path.is_file() and checkpoint.quantize is None,
        converted=frozenset(
            name
            for name in ("embed", *matrix_names(config))
            if checkpoint.rests_at(name) is None and checkpoint.resting(name) is None
        ),
    )


def skipping_model(
    model: Model,
    checkpoint: Checkpoint,
    prepared: str | None,
    predicted: bool = False,
    rows: bool = False,
    on_gpu: bool = True,
) -> Model:
    """A checkpoint's model with neurons inside experts told apart in RAM (`Model.by_neuron`); predicted: with what
    selects among them, () where there are no predictors. rows: as of `by_neuron`; on_gpu: a GPU skips some, too."""
    from powerinfer.formats.expert_rows import kind_of
    from powerinfer.formats.prepared import PreparedFile

    command = PreparedFile(kind_of(predicted), checkpoint, prepared).command
    skipping = replace(model.by_neuron(predicted, rows, on_gpu), rows_command=command)
    if not predicted:
        return skipping
    neurons = [skipping.neurons_inside(layer, True) for layer in range(model.config.n_layers)]
    predictors, ratios = _known_predictors(checkpoint, prepared, neurons, trained=True)
    return replace(skipping, predictors=predictors, selected=ratios)


def _known_predictors(
    checkpoint: Checkpoint, prepared: str | None, neurons: Sequence[int], trained: bool
) -> tuple[tuple[tuple[Matrix, ...], ...], tuple[float, ...]]:
    """The predictors of a model among those neurons of each layer, in and out, and for each the neurons selected by
    those that fire: the trained ones, where they count, else those in its file; () without any."""
    from powerinfer.formats.predictor_file import open_predictor
    from powerinfer.formats.prepared import PREDICTOR, PreparedFile

    config = checkpoint.config
    if trained and PreparedFile(PREDICTOR, checkpoint, prepared).exists():
        file = open_predictor(checkpoint, prepared)
        ranks = {layer: one.predictor.rank for layer, one in file.layers.items()}
        return _predictors(config, neurons, ranks, file.type), _selected(config, file.training)
    ratios = (SELECTED_PER_FIRING,) * config.n_layers
    if checkpoint.predictor_threshold is None:
        return (), ratios
    rows = {name: shape[0] for name, _, shape, _ in checkpoint.tensor_list() if name.endswith(".predictor_in")}
    ends = [[f"layers.{layer}.predictor_{end}" for end in ("in", "out")] for layer in range(config.n_layers)]
    types = [(rows[inner], checkpoint.taken_type(inner), checkpoint.taken_type(outer)) for inner, outer in ends]
    return tuple(_predictor(config, *each) for each in zip(neurons, *zip(*types, strict=True), strict=True)), ratios


def partial_model(config: ModelConfig, checkpoint: Checkpoint) -> Model:
    """The first layers of a checkpoint, with some of their experts, as a configuration has them: without bundles and
    predictors."""
    return _model(config, checkpoint.path.name, checkpoint.taken_type, (), (), ())


def described_model(
    config: ModelConfig,
    dtype: str = "f16",
    name: str = "",
    share: float = PREDICTOR_SHARE,
) -> Model:
    """A model from a configuration alone, with the types that a file of this type (of `DTYPES`) has for its matrices.

    share: of the weights, that predictors have, in Q8_0; fewer where they would take more than `MOST_PREDICTOR` of the
    model's bytes. Types of bundles follow `pack`.
    """
    _check_size(config)
    stored = stored_types(config, dtype)
    gate = DTYPES[dtype]
    gate = gate if gate in ROW_TYPES or gate in STORED_ROWS else "Q8_0"
    gate = gate if config.d_model % block_type(gate).block == 0 else "F16"
    down = gate if gate in FLOAT_TYPES else "Q8_0"
    if gate in PACKED_DOWN and not any(size % BUNDLE_GROUP for size in config.ffn_sizes):
        down = PACKED_DOWN[gate]
    layouts = bundle_layouts(config, gate, down, cpu.bundle_row_bytes)
    every = (SELECTED_PER_FIRING,) * config.n_layers
    bare = _model(config, name or config.name, stored.__getitem__, layouts, (), every)
    bare = replace(bare, quantisation=dtype.upper())
    rank_weights = max(1, len(config.neurons) * config.d_model + config.n_neurons)
    bytes_of_rank = rank_weights * block_type(_PREDICTOR_TYPE).row_bytes(32) / 32
    wanted_rank = share * bare.parameters / rank_weights
    rank = int(min(wanted_rank, MOST_PREDICTOR * bare.weight_bytes / bytes_of_rank)) // 32 * 32
    if not rank or config.d_model % 32 or config.whole_reason is not None:
        return bare
    ranks = dict.fromkeys(config.neurons, rank)
    return replace(bare, predictors=_predictors(config, config.separable, ranks, _PREDICTOR_TYPE))


def stored_types(config: ModelConfig, dtype: str) -> dict[str, str]:
    """The types of the matrices in a file of such a model; routers are F32."""
    every = {name: shape[-1] for name, shape in shapes(config) if is_matrix(name, shape)}
    return {name: "F32" if is_router(name) else stored_type(config, dtype, name, n) for name, n in every.items()}


def file_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the tensors in a file of such a model; vectors are F32."""
    types = stored_types(config, dtype)
    rows = ((name, prod(shape[:-1]), shape[-1]) for name, shape in shapes(config))
    return sum(n * block_type(types.get(name, "F32")).row_bytes(cols) for name, n, cols in rows)


def _predictors(
    config: ModelConfig, neurons: Sequence[int], ranks: Mapping[int, int], kind: str
) -> tuple[tuple[Matrix, ...], ...]:
    """Predictors, in and out, among the neurons of each layer with one of these ranks."""
    layers = range(config.n_layers)
    return tuple(_predictor(config, neurons[at], ranks[at], kind, kind) if at in ranks else () for at in layers)


def _predictor(config: ModelConfig, neurons: int, rank: int, inner: str, outer: str) -> tuple[Matrix, Matrix]:
    return matrix(inner, rank, config.d_model), matrix(outer, neurons, rank)


def _selected(config: ModelConfig, training: dict[str, Any] | None) -> tuple[float, ...]:
    """For each layer, the neurons selected by those that fire, as training found, where it is described."""
    ratios = [SELECTED_PER_FIRING] * config.n_layers
    for layer, one in zip(config.predicted_layers, (training or {}).get("layers", ()), strict=False):
        if one["active_fraction"]:
            ratios[layer] = max(1.0, one["candidate_fraction"] / one["active_fraction"])
    return tuple(ratios)


def _model(
    config: ModelConfig,
    name: str,
    type_of: Callable[[str], str],
    layouts: tuple[BundleLayout, ...],
    predictors: tuple[tuple[Matrix, ...], ...],
    selected: tuple[float, ...],
) -> Model:
    _check_size(config)
    inventory = take_inventory(config, type_of)

    def each(*uses: str) -> tuple[tuple[Matrix, ...], ...]:
        layers = range(config.n_layers)
        return tuple(tuple(one for unit in inventory.of_layer(at, *uses) for one in unit.matrices) for at in layers)

    return Model(
        name=name,
        config=config,
        bundles=layouts,
        attention=each("attention", "heads"),
        ffn=each("router", "experts", "panels"),
        experts=each("experts"),
        beside=each("router", "panels"),
        vectors=4 * sum(inventory.vectors.values()),
        predictors=predictors,
        selected=selected,
        tables=inventory.tables,
        projections=inventory.around("projection"),
        head=inventory.around("head")[0],
        parameters=inventory.parameters,
        inventory=inventory,
    )


def _check_size(config: ModelConfig) -> None:
    if config.n_neurons > MOST_NEURONS:
        raise RequestError(
            f"{config.n_neurons} neurons in {config.n_layers} layers are more than can be planned for ({MOST_NEURONS})"
        )


# ---------------------------------------------------------------- models known by name


@dataclass(frozen=True)
class ModelShape:
    """A published model: its configuration, how its neurons fire, and the weights of its predictors by the model's."""

    config: ModelConfig
    law: Law
    predictor: float = PREDICTOR_SHARE


_PUBLISHED: dict[str, tuple[Law, float]] = {
    "opt-13b": (FAMILIES["opt"], 0.0671),
    "opt-66b": (FAMILIES["opt"], 0.0488),
    "falcon-40b": (FAMILIES["falcon"], 0.0868),
    "llama-13b": (FAMILIES["reglu-13b"], PREDICTOR_SHARE),
    "llama-70b": (FAMILIES["reglu-70b"], 0.0808),
}
"""Laws and predictors' shares of single models of the paper; others have those of their families. llama-7b, -13b and
-70b are its ReGLU ones (ReluLLaMA). How neurons fire is not asked of models whose layers are experts."""

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class _Described:
    shapes: dict[str, dict[str, Any]]


@cache
def _described() -> dict[str, dict[str, Any]]:
    """The published models of `shapes.json`: the keys of a config.json that sizes depend on."""
    document = of_kind(parse_json(_FILE.read_bytes(), str(_FILE)), "shapes", 1, str(_FILE))
    return checked(_Described, document, str(_FILE)).shapes


def shape_names() -> list[str]:
    """The names of the published models."""
    return sorted(_described())


def find_shape(name: str) -> ModelShape:
    """A published model by its name, or one by a config.json (or its folder), whose family decides how neurons fire.

    RequestError where there is neither; ModelError for a configuration that the engine does not run.
    """
    from powerinfer.formats.folder_config import read_config

    if (known := name.lower()) in _described():
        config = read_config(_described()[known], Path(known))
        return ModelShape(config, *_PUBLISHED.get(known, (law_of(config), PREDICTOR_SHARE)))
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = get_close_matches(name.lower(), shape_names(), 3, 0.5)
        known = f"the nearest are {', '.join(near)}; " if near else ""
        raise RequestError(
            f"no shape {shown(name)}: neither a config.json nor a published model's name ({known}`powerinfer plan "
            "--names` lists all)"
        )
    from powerinfer.formats.json_file import read_json

    metadata, _ = read_json(path)
    config = read_config(metadata, path.parent)
    check(config, str(path))
    _check_size(config)
    return ModelShape(config, law_of(config))


def law_of(config: ModelConfig) -> Law:
    if config.architecture.startswith("nemotron_h"):
        return FAMILIES["nemotron-h"]
    if config.architecture == "smallthinker":
        return FAMILIES["smallthinker"]
    if not any(layer.ffn.gated for layer in config.layers):
        return FAMILIES["opt" if config.architecture == "opt" else "falcon"]
    if config.activations == "drelu":
        return FAMILIES["drelu"]
    return FAMILIES["reglu-7b" if config.rectified else "swiglu"]
