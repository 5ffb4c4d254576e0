"""
The native module: packed weights, kernels of every instruction-set level, and programs of fused operators.

Arrays are C-contiguous and of exactly the type written here. Wrong shapes, names and numbers are ValueErrors.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAGE: int = 32

LANES: int = 16

TYPES: list[str]

ACTIVATIONS: list[str]

KV_TYPES: list[str]

def levels() -> list[str]:
    """Instruction-set levels that this build has and this CPU runs, best first."""

def find_level(name: str) -> str:
    """The level of that name, the best for an empty one; ValueError if it cannot run here."""

def panel_bytes(type: str, k: int) -> int:
    """Bytes of 16 packed rows of k columns."""

def kv_page_bytes(type: str, kv_heads: int, head_dim: int, latents: int = 0) -> int:
    """Bytes of one layer in a page of 32 tokens; latents: as of Cache."""

class Pool:
    def __init__(self, threads: int) -> None: ...
    def keep_awake(self) -> None:
        """Threads do not park until let_park() is called as often: to wake them takes longer than a small job."""

    def let_park(self) -> None: ...
    @property
    def threads(self) -> int: ...

class ReadError(OSError):
    pass

class ReadStats:
    """
    What was read: reads, bytes: as it was asked for; small: of the reads those of small parts
    of `Slots` past the cache, joined: in how many the disk reads them; waited: seconds in
    `wait`; active: seconds in which any read was under way, as far as the calls of `Reads` saw.
    """

    @property
    def reads(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def small(self) -> int: ...
    @property
    def joined(self) -> int: ...
    @property
    def waited(self) -> float: ...
    @property
    def active(self) -> float: ...

class Reads:
    """
    Reads of files that go on while the caller computes. For one thread at a time.

    files: their paths and bytes. direct: past the system's cache, if the file systems allow it.
    engine: "uring", "threads", or "auto": the first that works here. ReadError for a file that
    cannot be opened, or has another size.

    If any of the others is given, the disk is emulated, for tests: it serves one read after another,
    in latency seconds and at rate bytes a second (0: at once). The read number fail_at, from 0, and
    those after it, `failures` in all (None: every one), fail with the errno `error`, 0: as if the
    file ended.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        direct: bool,
        engine: str = "auto",
        *,
        latency: float | None = None,
        rate: float | None = None,
        fail_at: int | None = None,
        failures: int | None = None,
        error: int | None = None,
    ) -> None: ...
    def begin(self, reads: Sequence[tuple[int, int, int, int]], buffer: NDArray[np.uint8]) -> int:
        """
        Begin reads, (file, offset, bytes, place in the buffer) each, and return what to wait for.

        Where `direct`, the memory at that place must lie in a block of ALIGN bytes as the offset does, and the
        rest of the blocks that a read touches must be in the buffer: it is overwritten, too.
        """

    def wait(self, ticket: int) -> None:
        """
        Wait until all of them are there; ReadError if one failed, or the file has changed. They are all over
        then, but of a disk that has not answered for `patience` seconds they can be waited for again.
        """

    def done(self, ticket: int) -> bool:
        """Whether `wait` would return, or fail, at once."""

    def cancel(self, ticket: int) -> None:
        """Return when none of them is under way; some may not have been begun."""

    def stats(self) -> ReadStats: ...
    @property
    def engine(self) -> str:
        """Which one: "uring", "threads" or "emulated"."""

    @property
    def direct(self) -> bool: ...
    @property
    def patience(self) -> float: ...
    @patience.setter
    def patience(self, arg: float, /) -> None: ...
    @property
    def gap(self) -> int:
        """Bytes between small parts of `Slots` up to which they are read past the cache as one."""

    @gap.setter
    def gap(self, arg: int, /) -> None: ...

    ALIGN: int = 4096

READ_COPIES: int = 16777216

class Resting:
    """
    Where a part of each of equal items rests in a file: item i at offset + i // each * outer
    + i % each * stride.
    """

    def __init__(
        self, file: int, offset: int, bytes: int, stride: int, each: int | None = None, outer: int = 0
    ) -> None: ...
    @staticmethod
    def matrices(type: str, rows: int, k: int, places: Sequence[tuple[int, int]]) -> Resting:
        """A matrix [rows, k] of each item, at (file, offset), with room for its panels."""

class SlotMemory:
    """
    Memory for slots of equal size, which several `Slots` may share: each has its own number of
    them, and of the rest, `common`, whichever needs more for a while. For one thread at a time.
    """

    def __init__(self, slots: int, slot_bytes: int, common: int = 0) -> None: ...
    def use(self, n: int) -> None:
        """
        From now on only the first n slots have items; the memory of the others is given back, and all are let go.
        Between steps. ReadError: what was being read is not over.
        """

    @property
    def slots(self) -> int: ...

class Slots:
    """
    Items of equal size that rest on disk, and memory for some of them. For one thread at a time.

    parts: of each item. What has least `priority` is replaced first, of equals the lowest item.
    memory: which has as many slots left, and as large ones; None: of its own.
    """

    def __init__(
        self, reads: Reads, parts: Sequence[Resting], items: int, slots: int, memory: SlotMemory | None = None
    ) -> None: ...
    def want(self, items: NDArray[np.int32]) -> int:
        """
        Pin these items, from the first on as many as there is room for beside those pinned, and begin to read
        those that are not there. How many.
        """

    def fetch(self, items: NDArray[np.int32]) -> int:
        """
        Begin to read items that may be wanted later, in place of others of less priority. For how many there
        was room.
        """

    def wait(self) -> None:
        """Wait for what is pinned. ReadError: an item that could not be read is not there, and all are let go."""

    def let_go(self) -> None:
        """Of all that is pinned."""

    def settle(self) -> None:
        """The same, and common slots are free again: what has least `priority` leaves."""

    def held(self, item: int) -> bool:
        """Whether it is in memory."""

    def part(self, item: int, part: int) -> NDArray[np.uint8]:
        """A part of an item in memory, uint8; it is the item's while that is pinned."""

    @property
    def lines(self) -> NDArray[np.uint32] | None:
        """Where part 0 of each item in memory lies, in units of 64 bytes; None if they do not begin at such."""

    @property
    def priority(self) -> NDArray[np.float32]:
        """Of each item: the slots' own memory, to be written between steps."""

    def stats(self) -> dict[str, int]:
        """
        wanted: items that were pinned; hits: of those, that needed no read; bytes: read for the others; early: of
        the hits those that `fetch` has read since they were last pinned, and since `settle`.
        """

    def clear(self) -> None:
        """Reset the counters."""

    @property
    def memory(self) -> SlotMemory: ...
    @property
    def items(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

class Window:
    """A ring of memory through which matrices on disk pass, in the order of operators."""

    def __init__(self, reads: Reads, nbytes: int) -> None: ...
    def forget(self) -> None:
        """Between steps: drop what was read ahead, and give the ring's memory back until it is needed."""

class Arena:
    def __init__(self) -> None: ...

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def panels(self) -> NDArray[np.uint8] | None:
        """Its memory, uint8 [panels, bytes of a panel] (csrc/table.h); None if it stays on disk."""

def pack_matrix(
    pool: Pool,
    arena: Arena,
    type: str,
    rows: int,
    k: int,
    data: NDArray[np.uint8],
    row_map: NDArray[np.int32] | None = None,
) -> Matrix:
    """
    A matrix [rows, k] from the blocks of a model file, uint8 1-D. row_map: packed row r is row row_map[r], zeros
    where that is -1.
    """

def disk_matrix(
    type: str, rows: int, k: int, file: int, offset: int, row_map: NDArray[np.int32] | None = None
) -> Matrix:
    """
    A matrix that stays on disk, as of `pack_matrix`: [rows, k] as stored in a file of `Reads` from `offset`
    on. A program that uses it needs a window.
    """

def repack(pool: Pool, matrix: Matrix, first: int, rows: int, data: NDArray[np.uint8]) -> None:
    """Replace rows from `first` on, a multiple of LANES, by [rows, k] as in `pack_matrix`. Not while a step runs."""

def matmul(pool: Pool, matrix: Matrix, level: str, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out = x . matrix^T: x [tokens, k], out [tokens, rows rounded up to LANES]."""

NEURON_TOKENS: int = 32

def bundle_row_bytes(type: str, k: int) -> int:
    """Bytes of one row of a bundle."""

def shared_bytes(type: str, k: int) -> int:
    """Bytes of the scales that the rows of a group share."""

GROUP: int = 32

def pack_bundle_rows(
    pool: Pool,
    type: str,
    kind: str,
    rows: int,
    k: int,
    data: NDArray[np.uint8],
    out: NDArray[np.uint8],
    pitch: int,
    at: int,
) -> None:
    """
    Write the gate, up or down rows of bundles, at byte `at` of each; they lie `pitch` bytes apart.

    data: rows as a model file stores them; out: [groups, bytes of a group]; kind: "dot" (gate, up) or "add"
    (down).
    """

def code_bytes(type: str, k: int) -> int:
    """Bytes of the codes of one row of a bundle, behind which its own scales lie."""

def bundle_row_order(type: str, kind: str, k: int) -> NDArray[np.int32]:
    """The byte of a bundle's row at which each of its k elements lies, int32; two codes of 4 bits share a byte."""

def unpack_bundle_rows(
    type: str, kind: str, k: int, data: NDArray[np.uint8], pitch: int, at: int, out: NDArray[np.float32]
) -> None:
    """The values of the gate, up or down rows of bundles: data [groups, bytes of a group], out [rows, k]."""

class NeuronSpec:
    """
    What neurons compute with their weights: activation, a name of ACTIVATIONS; threshold, of
    fatrelu and cats; biases of gate and up, a value for each neuron; limits, in place of threshold
    one for each neuron. Of topk, threshold is how many neurons of a bank are kept, and limits the units
    in which their magnitudes are compared. product_limits, beside limits of fatrelu and cats and with a
    gate: what the magnitude of each neuron's product of gate and up must exceed, or it is zero.
    """

    def __init__(
        self,
        activation: str = "silu",
        threshold: float = 0.0,
        gate_bias: NDArray[np.float32] | None = None,
        up_bias: NDArray[np.float32] | None = None,
        limits: NDArray[np.float32] | None = None,
        product_limits: NDArray[np.float32] | None = None,
    ) -> None: ...

class Bundles:
    """
    Neurons of a layer, each with its rows of gate and up and its column of down.

    data: [groups, bytes of a group], kept; or, with counts (bundles of each group), [1, bytes] of
    groups that differ; then spec's vectors have a value for every place of a group.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        neurons: int,
        d_model: int,
        gate_type: str | None,
        up_type: str,
        down_type: str,
        pitch: int,
        gate_at: int,
        up_at: int,
        down_at: int,
        spec: NeuronSpec,
        counts: NDArray[np.int32] | None = None,
    ) -> None: ...
    @property
    def neurons(self) -> int: ...
    def add(
        self,
        level: str,
        x: NDArray[np.float32],
        index: NDArray[np.int32],
        out: NDArray[np.float32],
        threshold: float = 0.0,
    ) -> None:
        """Add the sum of the listed neurons of x to out, both [tokens, d_model], by one thread."""

def apart_bundles(
    neurons: int,
    d_model: int,
    gate_type: str | None,
    up_type: str,
    down_type: str,
    spec: NeuronSpec,
    up: NDArray[np.uint8] | None,
    down: NDArray[np.uint8],
) -> Bundles:
    """
    Neurons of a layer beside a matrix with their first product, of gate or in a plain FFN of up: their rows of
    up, [groups, bytes of 32], None in a plain FFN, and of down, [groups, bytes of 32 and what they share]; kept.
    """

def resting_bundles(
    slots: Slots,
    d_model: int,
    gate_type: str | None,
    up_type: str,
    down_type: str,
    gate_at: int | None,
    up_at: int | None,
    down_at: int,
    spec: NeuronSpec,
    shared: NDArray[np.uint8] | None = None,
) -> Bundles:
    """
    Bundles of neurons on disk, the items of the slots, whose one part is what a step reads of each. The place of
    a row is None where it is no part of that: a matrix has it, or `add_firsts` gives it. shared: the scales of all
    groups of down, [groups, bytes], kept.
    """

class Table:
    def __init__(self, type: str, rows: int, k: int, data: NDArray[np.uint8]) -> None: ...
    def row(self, index: int, out: NDArray[np.float32]) -> None: ...

class Norm:
    def __init__(
        self,
        weight: NDArray[np.float32],
        eps: float,
        bias: NDArray[np.float32] | None = None,
        layer: bool = False,
        plain: bool = False,
    ) -> None:
        """RMS norm; LayerNorm where `layer`; only a product with the weights where `plain`."""

class Cache:
    def __init__(self, type: str, heads: Sequence[tuple[int, int]], pages: int, latents: Sequence[int] = []) -> None:
        """
        heads: of each layer the number for keys and values, 0: none, and their dimensions. latents: of each layer the
        numbers of a key, its first, that are its value too; 0, or none given: values are stored beside keys.
        """

    @property
    def pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def heads(self, layer: int) -> NDArray[np.uint8]:
        """
        The memory of a layer, uint8 [pages, kv heads, bytes], which may be written while no step runs. A head of a
        page: keys [head_dim][32], values [32][head_dim], head_dim in whole LANES; of q8_0 followed by the scales of
        32 dimensions, float16, in the same order.
        """

class States:
    def __init__(self, layers: Sequence[tuple[int, int, int, int, int]], slots: int) -> None:
        """
        layers: (taps of the convolution, key heads, their dimensions, value heads, their dimensions) of each
        on the CPU.
        """

    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

class Workspace:
    """Kernels of a level, and the scratch memory of everything that runs on a pool with them."""

    def __init__(self, pool: Pool, level: str) -> None: ...

class NeuronSum:
    """
    A part of an FFN: some neurons of one layer, and the sum that they add to the output.

    threshold: activations up to this magnitude count as zero; count_fired: for each neuron, too, the
    tokens that it fires for. Steps of up to NEURON_TOKENS tokens are counted.
    """

    def __init__(
        self, workspace: Workspace, bundles: Bundles, threshold: float = 0.0, count_fired: bool = False
    ) -> None: ...
    def sum(
        self,
        x: NDArray[np.float32],
        out: NDArray[np.float32],
        selected: NDArray[np.uint8] | None = None,
        weight: NDArray[np.float32] | None = None,
    ) -> bool:
        """
        out = weight * the sum of the selected neurons; x and out: [tokens, d_model].

        selected: [tokens, neurons], not zero where a token selects a neuron, None: all; weight: [tokens], 0: the
        token selects none, None: 1. False where no neuron is selected: out is zero, nothing was computed.
        """

    @property
    def neurons(self) -> int: ...
    def keep(self, members: NDArray[np.int32]) -> None:
        """
        Of neurons on disk: only these, int32 ascending, are summed from now on, and of these are `selected`
        and `take_fired`. Where their first rows are not read, `add_firsts` gives them before they are summed.
        """

    def add_firsts(self, rows: NDArray[np.uint8]) -> None:
        """The first rows of the next n that `keep` has, uint8 [n, bytes]: copied."""

    @property
    def uses(self) -> NDArray[np.int32]:
        """Of neurons on disk: steps that summed each, until they are reset here, between steps."""

    def disk_counts(self) -> dict[str, int]:
        """
        Of neurons on disk, not while a step runs: wanted, hits; guessed: read because they were expected; right: of
        these, needed.
        """

    def counts(self) -> dict[str, int]:
        """
        steps, tokens and, summed over tokens, neurons active and candidates (computed); rows of bundles read.

        Waits until no job runs, like the others that read or reset counters: all of a job is counted, or nothing.
        """

    def take_fired(self, out: NDArray[np.int64]) -> None:
        """out = tokens that each neuron fired for since the last call, [neurons]."""

    def clear(self) -> None:
        """Reset the counters."""

def least_slots(workspace: Workspace, neurons: int) -> int:
    """The fewest slots with which a layer's neurons on disk can be summed."""

class HostCalls:
    """What the functions share that a GPU's stream calls. They run one at a time."""

    def __init__(self) -> None: ...
    @property
    def made(self) -> int:
        """Calls so far."""

    def begin(self) -> None:
        """A step begins: the CPU waits for its first call, and what failed in earlier ones is void."""

    def take_failure(self) -> str:
        """What the first call that failed since said, once; empty: none did."""

class HostCall:
    """
    A function, void (*)(void*), and its argument, for a GPU's stream to call without Python: their
    addresses, valid as long as this object is there. By itself it computes nothing. It does not
    throw: after a failure its result is zeros, and HostCalls has what went wrong.
    """

    def __init__(self, calls: HostCalls) -> None: ...
    @property
    def function(self) -> int: ...
    @property
    def data(self) -> int: ...
    def take(self) -> tuple[int, int, float, float]:
        """
        Since the last time, not while a step runs: calls, those of them that had something to compute, and seconds
        that the CPU waited before them, and that it computed.
        """

class NeuronCall(HostCall):
    """NeuronSum.sum, of arrays that it keeps."""

    def __init__(
        self,
        calls: HostCalls,
        sum: NeuronSum,
        x: NDArray[np.float32],
        out: NDArray[np.float32],
        selected: NDArray[np.uint8] | None = None,
    ) -> None: ...

class Predictor:
    """
    Predicts which neurons of an FFN fire: candidates are those with z >= threshold, or the `floor`
    largest where these are fewer; z = outer . relu(inner . x), x before the FFN's norm.

    inner: [rank, d_model]; outer: [neurons, rank].
    """

    def __init__(self, inner: Matrix, outer: Matrix, threshold: float = 0.0, floor: int = 0) -> None: ...
    @property
    def inner_nbytes(self) -> int: ...
    @property
    def outer_nbytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class DenseNeurons:
    """A part of an FFN: neurons of one layer as matrices."""

    def __init__(self, spec: NeuronSpec, gate: Matrix | None, up: Matrix, down: Matrix) -> None: ...

class FfnSpec:
    """What an FFN does around the sum of its neurons."""

    def __init__(
        self, norm: Norm | None = None, out_norm: Norm | None = None, down_bias: NDArray[np.float32] | None = None
    ) -> None: ...

class Operator:
    """An operator of a program, the number-th that it runs."""

    @property
    def number(self) -> int: ...

class Ffn(Operator):
    """An FFN that has its neurons as matrices, as bundles, or both."""

    def set_bundled(self, bundled: NeuronSum, predictor: Predictor | None = None, recall_every: int = 0) -> None:
        """
        Replace its neurons as bundles, and the predictor that selects among them; counters and ways are reset.

        recall_every: steps between samples of the predictor's recall, 0: none.
        """

    @property
    def dense_above(self) -> float:
        """The share of firing neurons above which an exact step reads up and down from the matrices."""

    @dense_above.setter
    def dense_above(self, arg: float, /) -> None: ...
    def foresee(self, after: Ffn) -> None:
        """
        Steps in which both use predictors begin to read neurons of `after` that rest on disk, those that its
        predictor selects of this one's input.
        """

    def set_ways(self, ways: Sequence[str]) -> None:
        """
        How steps of 1, 2, .. NEURON_TOKENS tokens run: "dense" (the default where there are matrices),
        "exact" or "predicted".
        """

    def counts(self) -> dict[str, int]:
        """As of NeuronSum, and exact_steps, sampled_tokens, sampled_active, sampled_found."""

    def count_fired(self, on: bool) -> None:
        """Start or stop counting, for each neuron, the tokens that it fires for, in steps of up to NEURON_TOKENS."""

    def take_fired(self, out: NDArray[np.int64]) -> int:
        """out = tokens that each neuron fired for since the last call, [neurons]; returns the number of tokens."""

    def clear(self) -> None:
        """Reset the counters."""

class RouterSpec:
    """How a token's experts, and their weights, follow from the router's logits."""

    def __init__(
        self,
        top_k: int,
        scoring: str = "softmax",
        normalise: bool = False,
        scale: float = 1.0,
        correction: NDArray[np.float32] | None = None,
        groups: int = 1,
        top_groups: int = 1,
        group_best: int = 1,
        bias: NDArray[np.float32] | None = None,
    ) -> None:
        """
        correction: added to scores for the selection alone; bias: to the logits. Experts are selected in the
        top_groups best of `groups`; a group's score is the sum of its group_best best experts'.
        """

def route(spec: RouterSpec, logits: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """The experts of a token, in ascending order, and their weights; logits: [experts]."""

class ExpertMatrices:
    """Experts of one layer: matrices of all of them, one below the other."""

    def __init__(
        self,
        experts: int,
        neurons: int,
        spec: NeuronSpec,
        gate: Matrix | None,
        up: Matrix | None,
        down: Matrix | None,
        gate_bias: NDArray[np.float32] | None = None,
        up_bias: NDArray[np.float32] | None = None,
        down_bias: NDArray[np.float32] | None = None,
        bundled: NeuronSum | None = None,
        predictor: Predictor | None = None,
        recall_every: int = 0,
        slots: Slots | None = None,
    ) -> None:
        """
        neurons: of each; rows of each are padded to LANES. spec: without biases, which are [experts, rows]. bundled:
        all neurons, one expert after another, in place of up and down; their gates are not read, but with a predictor,
        which selects among all of these neurons and takes the place of the matrix of gates. recall_every: steps between
        samples of its recall, 0: none. slots: the experts rest on disk, their matrices are the parts; the three are
        of `disk_matrix` then, [experts * rows, k].
        """

class Experts(Operator):
    """An FFN of experts."""

    def set_whole(self, on: bool) -> None:
        """Whether steps compute every neuron of the selected experts, where they could skip some."""

    def record(self, on: bool, fired: bool = False) -> None:
        """Start or stop keeping what steps select; fired: and which neurons of it fired, of whole experts."""

    def selected(self) -> tuple[list[int], bool]:
        """
        The experts of the last step's tokens, [tokens * top_k], those of a token ascending; empty before the
        first recorded one. And whether a weight was NaN or infinite.
        """

    def fired(self, out: NDArray[np.uint8]) -> None:
        """
        out [tokens * top_k, bytes of an expert's neurons] = the neurons that fired in the last step, a bit each, in
        the order of `selected`.
        """

    def counts(self) -> dict[str, int]:
        """As of NeuronSum; sampled_tokens, sampled_active, sampled_found; rows of the predictor's outer read."""

    def clear(self) -> None:
        """Reset the counters."""

    def foresee(self, after: Experts, router: Matrix) -> None:
        """
        Small steps begin to read what `router`, about that of `after`, whose experts rest on disk, would select of
        this one's input.
        """

    @property
    def uses(self) -> NDArray[np.int32]:
        """Of experts on disk: the tokens that selected each since someone wrote zeros; not while a step runs."""

    @property
    def elsewhere(self) -> NDArray[np.uint8]:
        """The same: not 0 for those that the caller computes elsewhere, which are not expected; to be written."""

    def disk_counts(self) -> dict[str, int]:
        """
        Of experts on disk, not while a step runs: wanted, hits; guessed: read because they were expected;
        right: of these, needed.
        """

    def sum(
        self,
        program: Program,
        x: NDArray[np.float32],
        selected: NDArray[np.int32],
        weights: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> bool:
        """
        out = the weighted sum of each token's experts; x and out: [tokens, d_model].

        selected, weights: [tokens, top_k]; -1 selects none. False where no expert is selected: out is zero, and
        nothing was computed.
        """

    def order(self, program: Program, selected: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """The first part of `sum`, which does not need x; nothing else of the program may run before sum_ordered."""

    def fetch(self, program: Program) -> bool:
        """Between the two: read a part of the weights into the caches. False once they hold what they can."""

    def sum_ordered(self, program: Program, x: NDArray[np.float32], out: NDArray[np.float32]) -> bool:
        """The second part of `sum`."""

class EarlyRouter(Operator):
    """Selects experts before attention."""

    def foresee(self, of: Experts) -> None:
        """Begin to read what it selects, of experts on disk."""

class Watch:
    """Records of a program's FFNs: views of its own memory, overwritten when the next FFN runs."""

    def __init__(self, program: Program) -> None: ...
    @property
    def gate(self) -> bool: ...
    @gate.setter
    def gate(self, arg: bool, /) -> None: ...
    @property
    def silence(self) -> bool: ...
    @silence.setter
    def silence(self, arg: bool, /) -> None: ...
    @property
    def measure(self) -> bool: ...
    @measure.setter
    def measure(self, arg: bool, /) -> None: ...
    @property
    def threshold(self) -> float: ...
    @threshold.setter
    def threshold(self, arg: float, /) -> None: ...
    def clear(self) -> None: ...
    @property
    def damaged(self) -> bool: ...
    @property
    def counts(self) -> NDArray[np.int64]: ...
    @property
    def magnitudes(self) -> NDArray[np.int64]: ...
    def active(self, tokens: int) -> NDArray[np.uint8]: ...

    BINS_PER_OCTAVE: int = 16

    LOWEST_OCTAVE: int = -30

class Program:
    def __init__(
        self,
        workspace: Workspace,
        cache: Cache,
        max_tokens: int,
        d_model: int,
        d_ff: int,
        heads: Sequence[int],
        embed_dim: int | None = None,
        states: States | None = None,
    ) -> None:
        """heads: query heads of each layer of the cache."""

    def add_rope(self, frequencies: NDArray[np.float32], factor: float) -> int:
        """Add a table of rotary frequencies, radians per position; factor multiplies sine and cosine. Its index."""

    def embed(
        self,
        table: Table,
        positions: Table | None = None,
        offset: int = 0,
        project: Matrix | None = None,
        scale: float = 1.0,
    ) -> None:
        """x = project . scale * row of the token + row of the position; that of position 0 is row `offset`."""

    def attention_input(
        self,
        layer: int,
        norm: Norm | None,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        q_bias: NDArray[np.float32] | None = None,
        k_bias: NDArray[np.float32] | None = None,
        v_bias: NDArray[np.float32] | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rope: int = -1,
        scale: float | None = None,
    ) -> None:
        """
        q, cache = rope(norm(x) . q, k, v).

        q_norm, k_norm: over each head, or as wide as all heads of q (k) together. rope: an index from `add_rope`,
        -1: q and k are not rotated. scale: of the scores, None: head_dim ** -0.5.
        """

    def attention(self, layer: int, window: int, sinks: NDArray[np.float32] | None = None) -> None:
        """attended = softmax(q k) v; window 0: none. sinks: of each head, a score more, which belongs to no value."""

    def delta_net(
        self,
        layer: int,
        state: int,
        norm: Norm | None,
        matrices: Sequence[Matrix],
        taps: NDArray[np.float32],
        decay: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        out_norm: Norm,
        key_heads: int,
        tiled: bool,
    ) -> None:
        """
        attended = Gated DeltaNet of norm(x).

        layer, state: of the cache and of the states; matrices: query, key, value, gate, beta, alpha; taps: of the
        convolution, [taps, channels]; decay: the logarithm of a head's decay is decay * softplus(alpha + dt_bias);
        tiled: value head i has key head i % key_heads, else i // (value heads / key_heads).
        """

    def gate_attended(self, layer: int, norm: Norm | None, w: Matrix) -> None:
        """attended *= sigmoid(w . norm(x))."""

    def project(self, layer: int, w: Matrix, bias: NDArray[np.float32] | None = None, norm: Norm | None = None) -> None:
        """x += norm(w . attended + bias)."""

    def latent_input(
        self,
        layer: int,
        norm: Norm | None,
        q_latent: Matrix | None,
        q_norm: Norm | None,
        q: Matrix,
        kv: Matrix,
        kv_norm: Norm,
        k_b: Matrix,
        rope: int,
        scale: float,
    ) -> None:
        """
        q, cache = (rope(q . q_norm(q_latent . n)) . k_b, rope(kv_norm(kv . n))), n = norm(x), of latent attention.

        q: of all heads; without q_latent of n itself. k_b: of all heads, one below the other, each padded to LANES.
        """

    def latent_project(self, layer: int, v_b: Matrix, o: Matrix, norm: Norm | None = None) -> None:
        """x += norm(o . each head's v_b . attended), of latent attention."""

    def ffn(
        self,
        spec: FfnSpec,
        dense: DenseNeurons | None = None,
        bundled: NeuronSum | None = None,
        predictor: Predictor | None = None,
    ) -> Ffn:
        """
        x += out_norm(sum of the neurons of norm(x) + down_bias).

        The neurons as matrices, as bundles, or both. predictor: selects among bundles, in steps of up to
        NEURON_TOKENS tokens.
        """

    def experts(
        self,
        spec: FfnSpec,
        router: RouterSpec,
        scores: Matrix | None,
        experts: ExpertMatrices,
        shared: DenseNeurons | None = None,
        shared_gate: NDArray[np.float32] | None = None,
    ) -> Experts:
        """
        x += out_norm(sum of the weighted experts of norm(x) + shared expert + down_bias).

        scores: the router, [experts, d_model], None: `early_router` comes before; shared_gate: [d_model], whose
        product with norm(x), a sigmoid of it, is the shared expert's weight.
        """

    def expert_sum(self, experts: ExpertMatrices, router: RouterSpec) -> Experts:
        """
        Experts that the caller selects, at most router.top_k for a token. Not while a step runs. router: how they
        are selected, for those that are guessed.
        """

    def early_router(self, router: RouterSpec, scores: Matrix) -> EarlyRouter:
        """Select the experts of the next operator `experts` from x as it is; scores: [experts, d_model]."""

    def normalise(self, norm: Norm) -> None:
        """x = norm(x)."""

    def head(self, norm: Norm | None, w: Matrix, project: Matrix | None = None, scale: float = 1.0) -> None:
        """logits = scale * w . project . norm(x)."""

    def set_watch(self, watch: Watch | None) -> None: ...
    def residual(self, tokens: int) -> NDArray[np.float32]:
        """The residual stream x, [tokens, d_model]: the program's own memory, which may be written."""

    def hidden_states(self, rows: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """out [rows, d_model] = norm(x) with the head's norm: rows of the last step."""

    def set_window(self, window: Window) -> None:
        """
        What matrices on disk pass through; once, when all operators are there. Then `run` raises ReadError if one
        could not be read: what it computed is void.
        """

    def forget(self) -> None:
        """Between steps: give back the memory of the rows of a step, until one needs it."""

    @property
    def size(self) -> int: ...
    @property
    def timed(self) -> bool: ...
    @timed.setter
    def timed(self, arg: bool, /) -> None: ...
    def take_times(self) -> list[tuple[str, float]]:
        """Seconds spent in each operator since the last call, while `timed`."""

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        rows: NDArray[np.int32],
        page_table: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        first: int,
        last: int,
        vocab: int,
        read_states: NDArray[np.int32] | None = None,
        states: NDArray[np.int32] | None = None,
        stop: NDArray[np.int32] | None = None,
    ) -> bool:
        """
        Run operators [first, last) on a step: tokens, their positions and rows of the page table; the logits of
        logit_rows go to logits [rows, vocab rounded up to LANES]. read_states, states: for each row of the page
        table the slots of its state before the step, not read at position 0, and after it. stop: one number;
        once it is not 0 the run ends with the operator that is under way. False if that was not the last one.
        """

class ExpertCall(HostCall):
    """
    Experts.sum, of arrays that it keeps: of those that the CPU has.

    selected: [tokens, top_k], with the layer's numbers; places: [experts], of each its
    number among the CPU's, -1: it is not there; tally: int64 [experts + 1], added to:
    tokens that select each, and selections that the CPU does not have. part: "all", or
    "order" and "sum_ordered" as of Experts, of which the first fetches, too.
    """

    def __init__(
        self,
        calls: HostCalls,
        experts: Experts,
        program: Program,
        x: NDArray[np.float32],
        selected: NDArray[np.int32],
        weights: NDArray[np.float32],
        out: NDArray[np.float32],
        places: NDArray[np.int32],
        tally: NDArray[np.int64],
        part: str,
    ) -> None: ...
