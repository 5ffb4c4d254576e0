"""The figures of /metrics, in Prometheus' text format. Nothing in a label comes from a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from powerinfer.runtime.driver import EngineStats

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """Counts requests and tokens. `stats`: the engine's figures, read when /metrics is; None while there is none."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "powerinfer_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self._duration = Histogram(
            "powerinfer_request_seconds", "From a request to the end of its answer", ["endpoint"],
            buckets=WHOLE, registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "powerinfer_first_token_seconds", "From submission to the first token", buckets=FIRST_TOKEN,
            registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "powerinfer_inter_token_seconds", "Between two tokens of an answer", buckets=BETWEEN_TOKENS,
            registry=registry,
        )  # fmt: skip
        registry.register(_EngineFigures(stats))

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. status 499: the client left."""
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(seconds)

    def token(self, seconds: float, first: bool) -> None:
        """A token came, that long after the one before it, or after the submission."""
        (self._first if first else self._between).observe(seconds)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """`EngineStats`; what only grows is a counter."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, text, value in (
            ("running_requests", "Requests being computed", stats.running),
            ("waiting_requests", "Requests in the queue", stats.waiting),
            ("kv_pages", "Pages of the KV cache", stats.pages),
            ("kv_used_pages", "Pages that running requests use", stats.used_pages),
            ("kv_reusable_pages", "Unused pages whose prefix may be found again", stats.reusable_pages),
        ):
            yield GaugeMetricFamily(f"powerinfer_{name}", text, value)
        for name, text, count in (
            ("prompt_tokens", "Tokens of the prompts started", stats.prompt_tokens),
            ("prefix_hit_tokens", "Those of them that the prefix cache had", stats.cached_tokens),
            ("generated_tokens", "Tokens generated", stats.answer_tokens),
            ("steps", "Steps computed", stats.steps),
            ("step_seconds", "Time in steps", stats.step_s),
            ("preemptions", "Requests put back to free pages", stats.preemptions),
            ("aborted_requests", "Requests ended before their end", stats.aborted),
            ("rejected_requests", "Requests refused because the queue was full", stats.rejected),
            ("timed_out_requests", "Requests that waited or took too long", stats.timed_out),
        ):
            yield CounterMetricFamily(f"powerinfer_{name}", text, count)
