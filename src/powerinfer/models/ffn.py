"""Wiring of `FfnConfig`: a sum of neurons, from the checkpoint's matrices or as its owner has it."""

from __future__ import annotations

from powerinfer.models.builder import Builder, Matrix, Norm, OwnFfn, Tensors, vector
from powerinfer.neurons import FfnVectors


def sum_neurons(
    builder: Builder[Matrix, Norm],
    checkpoint: Tensors,
    layer: int,
    norm: Norm | None,
    out_norm: Norm | None,
    own: OwnFfn[Norm] | None,
) -> None:
    """x += out_norm(the neurons' sum of norm(x)); own: wires the FFN in the checkpoint's place."""
    name, parts = f"layers.{layer}.", checkpoint.config.layers[layer].ffn.matrices
    own_vectors = ("gate_bias", "up_bias", "down_bias", "threshold", "product_threshold", "inner_norm")
    vectors = FfnVectors(*(vector(checkpoint, name + one) for one in own_vectors))
    if own is not None:
        for part in parts:
            checkpoint.skip(name + part)
        own(norm, vectors, out_norm)
        return
    *gate, up, down = (builder.matrix(checkpoint.take(name + part)) for part in parts)
    builder.ffn(layer, norm, gate[0] if gate else None, up, down, vectors, out_norm)
