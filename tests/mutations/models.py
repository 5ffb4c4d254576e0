"""Faults in what makes models run: wiring, placement, disk, training and plans."""

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "logits equal those of `transformers` within derived rounding, for every family",
        "src/powerinfer/models/rope.py",
        "low, high = math.floor(low), math.ceil(high)",
        "low, high = math.floor(low), math.ceil(high) + 1",
        "tests/test_architectures.py -k 'test_logits and yarn'",
    ),
    Mutation(
        "dense: the same bits whatever the batch, chunk or thread count, of products that threads take parts of, too",
        "src/powerinfer/devices/cpu.py",
        "read_states, states = self.slots or (None, None)",
        "read_states, states = (self.slots or (None, None))[1:] * 2",
        "tests/test_architectures.py -k 'same_bits and qwen35'",
    ),
    Mutation(
        "the same, and the same bits for the same steps, launched or replayed, where layers are on a GPU",
        "src/powerinfer/devices/step_buffers.py",
        "numbers = positions, rows, batch.logit_rows, table[:, :width]",
        "numbers = positions, 0 * rows, batch.logit_rows, table[:, :width]",
        "tests/test_gpu_layers.py -k 'test_logits and qwen3'",
    ),
    Mutation(
        "layers that differ in heads, FFN size, activation and gate, dense, `exact`, and split between GPU and CPU",
        "src/powerinfer/models/attention.py",
        'about, name = checkpoint.config.layers[layer].heads, f"layers.{layer}."',
        'about, name = checkpoint.config.layers[0].heads, f"layers.{layer}."',
        "tests/test_unlike_layers.py -k dense",
    ),
    Mutation(
        "`exact` is the dense answer within rounding, `predicted` the dense answer without the same neurons",
        "src/powerinfer/models/ffn.py",
        'own_vectors = ("gate_bias", "up_bias", "down_bias", "threshold", "product_threshold")',
        'own_vectors = ("gate_bias", "down_bias", "up_bias", "threshold", "product_threshold")',
        "tests/test_sparse.py -k 'exact_is_the_dense_answer and opt'",
    ),
    Mutation(
        "wherever neurons, layers and the head are placed, the answer is the dense one; `predicted` selects the same",
        "src/powerinfer/hybrid/ffn.py",
        "self.cold = np.setdiff1d(np.arange(self._config.size, dtype=np.int32), hot)",
        "self.cold = np.setdiff1d(np.arange(self._config.size, dtype=np.int32), hot[1:])",
        "tests/test_hybrid.py -k 'every_split and llama-relu'",
    ),
    Mutation(
        "wherever experts, or neurons inside them, are placed, streamed, swapped or exchanged from step to step, the "
        "answer is that of the whole model",
        "src/powerinfer/hybrid/experts.py",
        "self._slot[expert] = slot\n                self._sums",
        "self._slot[expert] = swaps[0][0]\n                self._sums",
        "tests/test_hybrid_experts.py -k 'exchanged_from_step and lru'",
    ),
    Mutation(
        "what stays on disk gives the same bits, whatever was in memory; after a failed read the next step is right",
        "src/powerinfer/devices/disk.py",
        "return _native.disk_matrix(tensor.type, rows, cols, *place, row_map, tensor.scales)",
        "return _native.disk_matrix(tensor.type, rows, cols, *place, None, tensor.scales)",
        "tests/test_disk.py -k 'through_a_window and llama'",
    ),
    Mutation(
        "neurons that stream to a GPU give their sum; the crossing is measured once, and so is the faster kernel",
        "src/powerinfer/devices/stage.py",
        "index = cold.index[piece.first : piece.last]",
        "index = cold.index[: piece.last - piece.first]",
        "tests/test_stage.py -k 'biases_and_thresholds'",
    ),
    Mutation(
        "layers in RAM give the same answer on a GPU through which their matrices stream",
        "src/powerinfer/devices/passed_cache.py",
        "        for slot in range(BUFFERS):\n            self._write(slot)\n        self._batch = None",
        "        self._batch = None",
        "tests/test_streamed.py -k 'right_answer and llama3'",
    ),
    Mutation(
        "whenever a GPU's streams work, the bits are the same; without any of the waits between them and the host not",
        "src/powerinfer/devices/step_buffers.py",
        "        self._done.synchronize()\n",
        "",
        "tests/test_deferred.py -k 'test_every_order and neurons'",
    ),
    Mutation(
        "with a plan's seconds for its parts a step takes what the plan says, by clocks of a device that works later",
        "src/powerinfer/hybrid/terms.py",
        "        operators = self._gpu_sums()\n        if self._asks_cpu:\n"
        '            operators.append(self._host_operator(f"cold {self.terms}", self._sum_cold, self._join_cold))\n',
        "        operators = []\n        if self._asks_cpu:\n"
        '            operators.append(self._host_operator(f"cold {self.terms}", self._sum_cold, self._join_cold))\n'
        "        operators += self._gpu_sums()\n        if self._asks_cpu:\n",
        "tests/test_timeline.py -k both_parts",
    ),
    Mutation(
        "torch takes no more of a GPU than its models' budgets and what the program had there",
        "src/powerinfer/placement/shapes.py",
        "return batch * -(-context // cpu.PAGE) * cpu.PAGE * token\n\n    def state_bytes",
        "return batch * context // cpu.PAGE * cpu.PAGE * token // 2\n\n    def state_bytes",
        "tests/test_gpu_bytes.py -k 'plans_bytes and llama'",
    ),
    Mutation(
        "latent attention and Gated DeltaNet in training: logits, gradients beside plain definitions in float64, files",
        "src/powerinfer_train/torch_model.py",
        "inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps)).rsqrt_()",
        "inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])).rsqrt_()",
        "tests/test_sparsify_model.py -k test_logits",
    ),
    Mutation(
        "neurons that compete in banks: the same ones count in the engine, in torch, on a GPU and in training",
        "src/powerinfer_train/torch_model.py",
        ".sort(dim=-1, descending=True, stable=True).indices[..., :count]",
        ".flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]",
        "tests/test_topk.py -k 'dense_and_sparse or first_among'",
    ),
    Mutation(
        "a GGUF file's model written as a folder gives `transformers` the same tokens and logits",
        "src/powerinfer_train/as_folder.py",
        '"tie_word_embeddings": config.tied_embeddings,',
        '"tie_word_embeddings": True,',
        "tests/test_sparsify_folder.py -k 'as_folder and llama'",
    ),
    Mutation(
        "a model that was closed holds neither memory nor threads",
        "src/powerinfer/hybrid/terms.py",
        'for name in ("_gpu_part", "_cpu_part",',
        'for name in ("_gpu_part",',
        "tests/test_hybrid.py -k closing_frees",
    ),
    Mutation(
        "a plan holds its budgets to the byte; both objectives are optimal against brute force",
        "src/powerinfer/placement/solver.py",
        "optimal = best.cost - bound <= program.rounding",
        "optimal = True",
        "tests/test_solver.py",
    ),
    Mutation(
        "a policy is chosen where it is clearly faster than `static`, and kept; a trial that does not end leaves it",
        "src/powerinfer/sparsity/trials.py",
        "and sum(share >= 1 for share in shares) <= 1 < len(shares)",
        "and 1 < len(shares)",
        "tests/test_policy_trial.py -k clearly_faster",
    ),
    Mutation(
        "a profile counts what plain loops count, whatever the calls and threads; stopped and resumed, the same bytes",
        "src/powerinfer/prepare/counting.py",
        "state.counts[layer, self._corpus, : self._sizes[layer]] += fired.counts",
        "state.counts[layer, 0, : self._sizes[layer]] += fired.counts",
        "tests/test_profile.py -k plain_loops",
    ),
    Mutation(
        "embeddings are those of `transformers` within rounding, and the same bits whatever the batch and the chunk",
        "src/powerinfer/runtime/driver.py",
        "request.add(states[end - count : end])",
        "request.add(states[:count])",
        "tests/test_embeddings.py -k 'batch_and_chunk'",
    ),
    Mutation(
        "batch, chunk and cache reuse do not change an answer",
        "src/powerinfer/runtime/scheduler.py",
        "request.pages = pages + new",
        "request.pages = new + pages",
        "tests/test_engine.py",
    ),
]
