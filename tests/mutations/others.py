"""Faults in profiles, plans and the pipeline of prepared files."""

from __future__ import annotations

from mutations import Mutation

MUTATIONS = [
    Mutation(
        "every kind of layer on a GPU, dense or as parts, computes what the reference does",
        "src/powerinfer/devices/gpu_layer.py",
        "return [*ahead, *begin, *self._before, *finish]",
        "return [*ahead, *self._before, *begin, *finish]",
        "tests/test_gpu_wiring.py",
    ),
    Mutation(
        "a plan of experts keeps both budgets to the byte, and a load holds what it planned",
        "src/powerinfer/placement/experts.py",
        "budget -= sum(n * nbytes[layer] for layer, n in slots.items())",
        "budget -= sum((n - 1) * nbytes[layer] for layer, n in slots.items())",
        "tests/test_expert_plan.py tests/test_expert_policies.py",
    ),
    Mutation(
        "quantised matrices keep their codes when their scales are trained",
        "src/powerinfer/formats/block_scales.py",
        "unit_scales[..., number] = 1",
        "unit_scales[..., number] = 2",
        "tests/test_scales.py",
    ),
    Mutation(
        "what routers select is what `transformers` selects; profiles of experts that do not add up are refused",
        "src/powerinfer/formats/expert_files.py",
        "(rows[:, 1:] <= rows[:, :-1]).any()",
        "(rows[:, 1:] < rows[:, :-1]).any()",
        "tests/test_expert_profile.py",
    ),
    Mutation(
        "a policy over experts keeps its books",
        "src/powerinfer/placement/experts.py",
        "self._outside[layer][of_slot] = False",
        "self._outside[layer][of_slot[1:]] = False",
        "tests/test_expert_policies.py",
    ),
    Mutation(
        "where neurons are left out, each token of a step with drafts has the bits of a step of it alone",
        "src/powerinfer/runtime/scheduler.py",
        "batch.alone = len(self._work) == 1 and len(self._work[0][0].drafts) > 0",
        "batch.alone = False",
        "tests/test_steps_alone.py -k answers",
    ),
    Mutation(
        "`prepare` does only what is not up to date",
        "src/powerinfer/prepare/pipeline.py",
        "file = None if work.force else training.current(work.checkpoint, prepared, config)",
        "file = None",
        "tests/test_prepare.py",
    ),
    Mutation(
        "replicas answer, stream, notice clients that leave, and come back",
        "src/powerinfer/serve/ray_app.py",
        '{"num_replicas": fewest}',
        '{"num_replicas": 1}',
        "tests/test_serve_ray.py",
    ),
    Mutation(
        "automatic threads are those that were the fastest on this kind of machine",
        "src/powerinfer/hybrid/thread_trial.py",
        "return self.threads in counts and (not self.seconds",
        "return self.threads in counts and (bool(self.seconds)",
        "tests/test_thread_trial.py",
    ),
    Mutation(
        "what is loaded on a machine with several NUMA nodes is spread over them, or a line says what is lost",
        "src/powerinfer/numa.py",
        "_set_policy(_INTERLEAVE, nodes)",
        "_set_policy(_DEFAULT, ())",
        "tests/test_numa.py",
    ),
    Mutation(
        "a quantised folder's matrices have the values that codes and scales say",
        "src/powerinfer/formats/int_weights.py",
        "(fields if self.order is None else fields.take(self.order, axis=1))",
        "fields",
        "tests/test_quantised_folders.py -k act_order",
    ),
    Mutation(
        "a quantised folder's matrices have the values that codes and scales say, neurons in the order of down",
        "src/powerinfer/formats/column_order.py",
        "data.reshape(rows, -1)[order].reshape(-1)",
        "data.reshape(-1)",
        "tests/test_quantised_folders.py -k act_order",
    ),
    Mutation(
        "a quantised folder's matrices have the values that codes and scales say: permutations without repeats",
        "src/powerinfer/formats/int_weights.py",
        "if (np.bincount(index, minlength=groups) != group).any():",
        "if len(index) == 0:",
        "tests/test_quantised_folders.py -k gptq_that_is_refused",
    ),
    Mutation(
        "a damaged or hostile file is one line and exit status 2: quantised folders",
        "src/powerinfer/formats/int_weights.py",
        "if tensor.shape != shape:",
        "if len(tensor.shape) != len(shape):",
        "tests/test_fuzz_folders.py",
    ),
    Mutation(
        "calls by flags are made when they are asked for: a step that is broken off leaves no GPU that waits",
        "src/powerinfer/devices/gpu.py",
        """        if self.link is not None:
            self.link.release()
""",
        "",
        "tests/test_flags.py -k broken_off",
    ),
    Mutation(
        "tokens that pad a chunk of a prompt store no key or value",
        "src/powerinfer/devices/step_buffers.py",
        "            places.slots[len(batch.positions) :] = -1\n",
        "            places.slots[len(batch.positions) :] = 0\n",
        "tests/test_prompt_recordings.py -k 'bits and qwen3'",
    ),
    Mutation(
        "layers on several GPUs have the bits of one that has them all: the one behind waits",
        "src/powerinfer/devices/step_buffers.py",
        "            self._streams.current().wait_event(passed.ready)\n",
        "",
        "tests/test_several_gpus.py -k waits_for_the_one_before",
    ),
    Mutation(
        "a step that is launched before the tokens of the one before are known: it waits for their rows",
        "src/powerinfer/devices/next_step.py",
        "        self._streams.wait_value(self._stream, self._answered, self._number)\n",
        "",
        "tests/test_deferred.py -k 'every_order and ahead'",
    ),
    Mutation(
        "a step that is launched before the tokens of the one before are known: one that ends is not in the next",
        "src/powerinfer/runtime/scheduler.py",
        "        self._successor = None\n        self.running.remove(request)\n",
        "        self.running.remove(request)\n",
        "tests/test_next_step.py -k ends_an_answer",
    ),
    Mutation(
        "calls by flags are made when they are asked for: each step begins anew",
        "src/powerinfer/devices/link.py",
        "self.flags.begin()",
        "pass",
        "tests/test_flags.py -k same_bits",
    ),
    Mutation(
        "calls by flags are made when they are asked for: where flags do not work they are not used",
        "src/powerinfer/devices/flags.py",
        "self._try(record, device, EXCHANGES, in_place)",
        "pass",
        "tests/test_flags.py -k without_flags",
    ),
]
