"""Faults in native code, and in what the build keeps apart."""

from __future__ import annotations

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "every kernel, at every level, computes what the reference in numpy does",
        "src/powerinfer/csrc/rows.cpp",
        "row_mean<true>(x, n) + eps)",
        "row_mean<true>(x, n - 1) + eps)",
        "tests/test_program.py",
    ),
    Mutation(
        "every kernel, at every level, computes what the reference in numpy does: rows in an order of their own",
        "src/powerinfer/csrc/weights.cpp",
        "moved[(size_t)i] = x[order[(size_t)i]]",
        "moved[(size_t)i] = x[i]",
        "tests/test_program.py -k order",
    ),
    Mutation(
        "what stays on disk gives the same bits, whatever was in memory: factors beside blocks",
        "src/powerinfer/csrc/workspace.cpp",
        "own.factors.assign((size_t)disk.stored, disk.factors[0]);",
        "own.factors.assign((size_t)disk.stored, 1.0f);",
        "tests/test_disk_experts.py -k factors",
    ),
    Mutation(
        "dense: the same bits whatever the batch, chunk or thread count, of products that threads take parts of, too",
        "src/powerinfer/csrc/pool.cpp",
        "*end = std::min(*begin + length * unit, n);",
        "*end = std::min(*begin + length * unit - (i == 1), n);",
        "tests/test_dealt.py",
    ),
    Mutation(
        "layers with states on the CPU compute what numpy does: the convolution's history",
        "src/powerinfer/csrc/recurrent.cpp",
        "    from = to;\n",
        "",
        "tests/test_mamba.py tests/test_delta_net.py -k 'numpy'",
    ),
    Mutation(
        "layers with states on the CPU compute what numpy does: the state before a chunk",
        "src/powerinfer/csrc/mamba.cpp",
        "i ? stretch.state : at ? stretch.read_state : -1",
        "at ? stretch.read_state : -1",
        "tests/test_mamba.py -k numpy",
    ),
    Mutation(
        "layers with states on the CPU compute what numpy does: a short convolution's state before a tile",
        "src/powerinfer/csrc/short_conv.cpp",
        "    if (i) tile.read_state = run.state;\n",
        "",
        "tests/test_short_conv.py -k numpy",
    ),
    Mutation(
        "a state after a step of which only the first tokens were accepted is that of these: its chunk",
        "src/powerinfer/csrc/mamba.cpp",
        "in_replay = in_run + run.replayed;",
        "in_replay = in_run;",
        "tests/test_undone_states.py -k 'random and mamba'",
    ),
    Mutation(
        "reads give the file's bytes or fail; what is in slots is what was asked for",
        "src/powerinfer/csrc/reads.cpp",
        "std::min(end, (at / PIECE + 1) * PIECE), needed = stop - at;",
        "std::min(end, (at / PIECE + 1) * PIECE), needed = stop - at - (stop < end);",
        "tests/test_reads.py",
    ),
    Mutation(
        "neurons computed in parts, in any order, add up to the dense answer",
        "src/powerinfer/csrc/neuron_lists.cpp",
        "for (int64_t j = skipped; j < last && left; j++, left &= left - 1)",
        "for (int64_t j = skipped; j < last - (at > 0) && left; j++, left &= left - 1)",
        "tests/test_partial_ffn.py tests/test_neuron_kernels.py",
    ),
    Mutation(
        "some of a layer's neurons, compacted, give their sum, for the tokens that select them",
        "src/powerinfer/csrc/neuron_lists.cpp",
        "const int64_t first = std::max(begin - at, (int64_t)0),",
        "const int64_t first = std::max(begin - at, (int64_t)(taken == 0)),",
        "tests/test_bundled_ffn.py",
    ),
    Mutation(
        "neurons in bundles: the same bits whoever computes them, while other programs need the cores, too",
        "src/powerinfer/csrc/neuron_sum.cpp",
        "lists.clear_part(sums, tokens);",
        "if (!aside) lists.clear_part(sums, tokens);",
        "tests/test_dealt.py -k neurons_in_bundles",
    ),
    Mutation(
        "a router selects what its rule says, and valid experts; the sum of experts is numpy's at every level",
        "src/powerinfer/csrc/router.cpp",
        "scratch[i] += spec.correction[i];",
        "scratch[i] -= spec.correction[i];",
        "tests/test_experts.py",
    ),
    Mutation(
        "a profile counts what plain loops count, whatever the calls and threads",
        "src/powerinfer/csrc/watch.cpp",
        "sum += (int64_t)(planes[plane] >> bit & 1) << plane;",
        "sum += (int64_t)(planes[plane] >> bit & 1) << (plane & 3);",
        "tests/test_watch.py",
    ),
    Mutation(
        "a level's instructions do not leak into common code",
        "src/powerinfer/csrc/rows.cpp",
        "PI_KERNELS(rows) {",
        "__attribute__((used)) inline int shared_by_levels() { return 1; }\nPI_KERNELS(rows) {",
        "tests/test_native_symbols.py",
    ),
    Mutation(
        "no kernel, at any level, touches what is not its own, nor do reads of files",
        "src/powerinfer/csrc/rows.cpp",
        "{ f_store_n(p, v, n); }",
        "{ f_store(p, v); }",
        "make test-native LEVELS=scalar",
    ),
    Mutation(
        "a GPU's streams call the CPU in their order, and a call that fails fails its step alone",
        "src/powerinfer/csrc/host_calls.cpp",
        "std::fill(out_, out_ + tokens_ * sum_->bundles->up.k, 0.0f);",
        "std::fill(out_, out_ + (tokens_ - 1) * sum_->bundles->up.k, 0.0f);",
        "tests/test_host_calls.py -k writes_zeros",
    ),
]
