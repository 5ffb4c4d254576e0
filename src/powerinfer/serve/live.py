"""The route `LIVE`: the neurons as they fire, counted only while somebody looks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.formats.profile_file import open_profile
from powerinfer.runtime.live import DisplayRanking, Live, LiveLayer

if TYPE_CHECKING:
    from powerinfer.neurons import Profile
    from powerinfer.runtime.driver import EngineStats
    from powerinfer.runtime.engine import LLM

LIVE = "/v1/engine/live"
BINS = 128  # of a layer's neurons
FRAME_SECONDS = 0.4  # between two frames at least; who asks earlier gets the last one
HOT = 0.2  # of each layer's neurons, whose share of all activations is told
LEAVE_SECONDS = 5.0  # without a question, after which counting ends


class LiveView:
    """Frames of a model for all who look. Thread-safe; `frame` waits for a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._ranking: DisplayRanking | None = None  # kept while nobody looks: the longer, the better it is known
        self._timer: threading.Timer | None = None
        self._frame: dict[str, Any] = {}
        self._stats: EngineStats | None = None
        self._at = self._asked = 0.0
        self._number = 0

    def frame(self, llm: LLM) -> dict[str, Any]:
        """Counts between the last two frames. The first has none: counting begins with it."""
        with self._lock:
            now = self._asked = time.monotonic()
            if self._live is None:
                self._ranking = self._ranking or DisplayRanking(_profile(llm))
                self._live, self._frame = llm.live(), {}
                self._watch(LEAVE_SECONDS)
            if not self._frame or now - self._at >= FRAME_SECONDS:
                assert self._ranking is not None
                self._frame = self._new(llm, self._live, self._ranking, now)
            return self._frame

    def _new(self, llm: LLM, live: Live, ranking: DisplayRanking, now: float) -> dict[str, Any]:
        stats, before = llm.stats(), self._stats
        seconds = now - self._at if self._frame and before else 0.0
        self._stats, self._at = stats, now
        self._number += 1
        look = live.look(BINS, ranking)
        layers = [_layer(one) for one in look]
        step_s = stats.step_s - before.step_s if before and seconds else 0.0
        layer_bytes = [one["ffn_bytes_per_token"] for one in layers if one["ffn_bytes_per_token"] is not None]
        tokens = stats.answer_tokens - before.answer_tokens if before and seconds else 0
        return {
            "object": "engine.live",
            "frame": self._number,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else None,
            "busy": min(1.0, step_s / seconds) if seconds else None,
            "overlap": _overlap(look, step_s),
            "drafts": _drafts(stats, before) if before and seconds else None,
            "running": stats.running,
            "waiting": stats.waiting,
            "bytes_per_token": llm.bytes_per_token,
            "ffn_bytes_per_token": sum(layer_bytes) if len(layer_bytes) == len(layers) else None,
            "ranking": {
                "tokens": ranking.tokens,
                "profile_tokens": ranking.profile_tokens,
                "hot": HOT,
                "carried": ranking.carried(HOT),
            },
            "layers": layers,
        }

    def _watch(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._leave)
        self._timer.daemon = True
        self._timer.start()

    def _leave(self) -> None:
        """Count no more if nobody has asked for a while."""
        with self._lock:
            left = self._asked + LEAVE_SECONDS - time.monotonic()
            if left > 0:
                self._watch(left)
            else:
                self._end()

    def close(self) -> None:
        """Count no more, until the next frame, which may be of a model loaded anew."""
        with self._lock:
            self._end()
            self._ranking = None

    def _end(self) -> None:
        timer, live, self._timer, self._live = self._timer, self._live, None, None
        if timer is not None:
            timer.cancel()
        if live is not None:
            live.close()


def _profile(llm: LLM) -> Profile | None:
    """The profile beside the model, if there is one that matches it."""
    if llm.checkpoint is None:
        return None
    try:
        return open_profile(llm.checkpoint, llm.engine.prepared)
    except ModelError:
        return None


def _overlap(layers: list[LiveLayer], step_s: float) -> dict[str, float] | None:
    """Shares of the time in steps: that the CPU sums cold neurons beside the GPU, and waits for it. None: nothing is
    split, or no step ran."""
    if not step_s or all(one.device != "both" for one in layers):
        return None
    wait, cpu = (sum(one.seconds[part] for one in layers) / step_s for part in (0, 1))
    return {"cpu": min(1.0, cpu), "wait": min(1.0, wait)}


def _layer(live: LiveLayer) -> dict[str, Any]:
    """Shares of bins are whole thousandths: they are drawn, and a frame stays small."""
    return {
        "layer": live.layer,
        "neurons": live.neurons,
        "way": live.way,
        "device": live.device,
        "gpu_neurons": live.gpu,
        "tokens": live.tokens,
        "active_fraction": live.active,
        "ffn_bytes_per_token": live.ffn_bytes,
        "fired": None if live.fired is None else (1000 * live.fired).round().astype(int).tolist(),
        "on_gpu": None if live.device != "both" else (1000 * live.placed).round().astype(int).tolist(),
        "why_not": live.reason,
    }


def _drafts(now: EngineStats, before: EngineStats) -> dict[str, Any] | None:
    """Drafts since the frame before: the share that was right, and the tokens of a step that had some; None: none had
    any."""
    new, old = now.speculation, before.speculation
    steps, drafted = new.steps - old.steps, new.drafted - old.drafted
    if not steps or not drafted:
        return None
    return {"accepted": (new.accepted - old.accepted) / drafted, "tokens_per_step": (new.tokens - old.tokens) / steps}
