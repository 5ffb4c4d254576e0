"""Wiring of `ExpertsConfig`: experts that a router selects, and a shared one."""

from __future__ import annotations

import numpy as np

from powerinfer.config import SEPARATE_NORMS, ExpertsConfig
from powerinfer.formats.tensors import ExpertWeights, RawTensor, SeparateNorms
from powerinfer.models.builder import ExpertBuilder, Matrix, Norm, OwnFfn, Tensors, Vector, vector


def select_early(
    executor: ExpertBuilder[Matrix, Norm], checkpoint: Tensors, layer: int, own: OwnFfn[Norm] | None
) -> None:
    """The layer's experts are selected from x as it is, where its router reads that; own: does so by itself."""
    about = checkpoint.config.layers[layer].ffn
    assert isinstance(about, ExpertsConfig)
    if about.early_router and own is None:
        name = f"layers.{layer}.router"
        router = executor.matrix(_float32(checkpoint.take(name)))
        executor.early_router(layer, router, vector(checkpoint, f"{name}_correction_bias"))


def sum_experts(
    executor: ExpertBuilder[Matrix, Norm],
    checkpoint: Tensors,
    layer: int,
    norm: Norm | None,
    out_norm: Norm | None,
    own: OwnFfn[Norm] | None,
) -> None:
    """x += out_norm(the selected experts' weighted sum of norm(x), and the shared expert's); own: wires it instead."""
    about = checkpoint.config.layers[layer].ffn
    assert isinstance(about, ExpertsConfig)
    name = f"layers.{layer}."
    separate = None
    if about.separate:
        assert norm is not None and out_norm is not None
        of_router, *weights_of_norms = (checkpoint.take(name + one).float32() for one in SEPARATE_NORMS)
        router = executor.norm(of_router * np.float32(checkpoint.config.d_model**-0.5))
        of_experts, shared_out, experts_out = map(executor.norm, weights_of_norms)
        separate, norm = SeparateNorms(router, norm, shared_out, experts_out), of_experts
    weights = ExpertWeights(
        _float32(checkpoint.take(f"{name}router")),
        about.early_router,
        lambda: (checkpoint.take(f"{name}experts_{part}") for part in about.matrices),
        [checkpoint.take(f"{name}shared_{part}") for part in about.matrices if about.shared_size],
        vector(checkpoint, f"{name}router_correction_bias"),
        vector(checkpoint, f"{name}shared_weight"),
        vector(checkpoint, f"{name}router_bias"),
        [vector(checkpoint, f"{name}experts_{part}_bias") for part in about.matrices],
        _weights_of_norm(checkpoint, layer),
        [checkpoint.take(f"{name}latent_{part}") for part in ("in", "out") if about.latents],
        lambda index: (checkpoint.take_some(f"{name}experts_{part}", index) for part in about.matrices),
        lambda: [checkpoint.rest(f"{name}experts_{part}") for part in about.matrices],
        checkpoint.check_unchanged,
        vector(checkpoint, f"{name}router_factors"),
        separate,
    )
    if own is not None:
        own(norm, weights, out_norm)
    else:
        executor.experts(layer, norm, weights, out_norm)


def _weights_of_norm(checkpoint: Tensors, layer: int) -> Vector:
    """Of the norm that an FFN's input has, where it is an RMS norm."""
    config, name = checkpoint.config, f"layers.{layer}.ffn_norm"
    ffn, before = config.layers[layer].ffn, config.layers[layer].norms in ("pre", "both")
    if isinstance(ffn, ExpertsConfig) and ffn.separate:
        return None  # nobody guesses by it what their router selects
    return vector(checkpoint, name) if before and config.norm != "layer" else None


def _float32(tensor: RawTensor) -> RawTensor:
    """A router's scores decide: they are computed exactly, whatever type a file has them in."""
    if tensor.type == "F32":
        return tensor
    return RawTensor("F32", tensor.shape, tensor.float32().view(np.uint8).reshape(-1))
