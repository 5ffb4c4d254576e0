"""Exchange between two GPUs, for layers of the one whose experts are divided between both.

Cards for PCs cannot read each other's memory, so what the one sends the other goes through memory of the host.
"""

from __future__ import annotations

from powerinfer.config import ModelConfig
from powerinfer.devices.flags import FLAG_BYTES
from powerinfer.devices.link import EXPERT_BYTES


def card_link_bytes(tokens: int, config: ModelConfig) -> tuple[int, int]:
    """Bytes in RAM, and on the GPU that computes a part, of what sends it steps of up to that many tokens: inputs of
    experts and their sums, float32, and each token's selection."""
    width = max((one.latents or config.d_model for one in config.experts.values()), default=0)
    top_k = max((one.router.top_k for one in config.experts.values()), default=0)
    nbytes = tokens * (2 * 4 * width + EXPERT_BYTES * top_k)
    return nbytes + FLAG_BYTES, nbytes
