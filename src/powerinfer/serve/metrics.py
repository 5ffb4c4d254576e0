"""The figures of /metrics, in Prometheus' text format. Nothing in a label comes from a client: the server names its
models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from powerinfer.serve.served import ServedModel

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE_ANSWER = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """Counts requests and tokens. `models`: those of the server, whose figures are read when /metrics is."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "powerinfer_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self._duration = Histogram(
            "powerinfer_request_seconds", "From a request to the end of its answer", ["endpoint"],
            buckets=WHOLE_ANSWER, registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "powerinfer_first_token_seconds", "From submission to the first token", ["model"], buckets=FIRST_TOKEN,
            registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "powerinfer_inter_token_seconds", "Between two tokens of an answer", ["model"], buckets=BETWEEN_TOKENS,
            registry=registry,
        )  # fmt: skip
        registry.register(_EngineFigures(models))

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. status 499: the client left."""
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(seconds)

    def token(self, model: str, seconds: float, first: bool) -> None:
        """A token of a model came, that long after the one before it, or after the submission."""
        (self._first if first else self._between).labels(model).observe(seconds)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)


GAUGES = (
    ("running_requests", "Requests being computed", "running"),
    ("waiting_requests", "Requests in the queue", "waiting"),
    ("kv_pages", "Pages of the KV cache", "pages"),
    ("kv_used_pages", "Pages that running requests use", "used_pages"),
    ("kv_reusable_pages", "Unused pages whose prefix may be found again", "reusable_pages"),
)
COUNTERS = (
    ("prompt_tokens", "Tokens of the prompts started", "prompt_tokens"),
    ("prefix_hit_tokens", "Those of them that the prefix cache had", "cached_tokens"),
    ("generated_tokens", "Tokens generated", "answer_tokens"),
    ("steps", "Steps computed", "steps"),
    ("step_seconds", "Time in steps", "step_s"),
    ("preemptions", "Requests put back to free pages", "preemptions"),
    ("aborted_requests", "Requests ended before their end", "aborted"),
    ("rejected_requests", "Requests refused because the queue was full", "rejected"),
    ("timed_out_requests", "Requests that waited or took too long", "timed_out"),
    ("disk_read_bytes", "Bytes of weights read from disk", "disk_bytes"),
    ("disk_wanted", "Neurons and experts on disk that steps used", "disk_wanted"),
    ("disk_hits", "Those of them that RAM had when the step began", "disk_hits"),
    ("disk_stall_seconds", "Time that steps waited for the disk", "disk_stall_s"),
    ("draft_steps", "Steps that had drafts", "speculation.steps"),
    ("drafted_tokens", "Drafts that were computed", "speculation.drafted"),
    ("accepted_tokens", "Those of them that were right", "speculation.accepted"),
    ("draft_step_tokens", "Tokens that steps with drafts brought", "speculation.tokens"),
    ("draft_step_seconds", "Time in them, drafting included", "speculation.seconds"),
    ("draft_step_plain_seconds", "Time that their tokens take without drafts", "speculation.plain_seconds"),
    ("draft_failures", "Sources of drafts that failed", "speculation.failed"),
    ("drafts_ahead", "Drafts that were made while the step before was computed", "speculation.ahead"),
)
"""Name, description, name in `EngineStats.numbers`."""

PLACES = "speculation.places."


class _EngineFigures(Collector):
    """`EngineStats` of each model; what only grows is a counter, which goes on when a model is loaded again."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        read = [(model, *model.stats()) for model in self._models()]
        loaded = GaugeMetricFamily("powerinfer_model_loaded", "Whether the model is loaded", labels=["model"])
        loads = CounterMetricFamily("powerinfer_model_loads", "Times that it was loaded", labels=["model"])
        for model, stats, _ in read:
            loaded.add_metric([model.name], float(stats is not None))
            loads.add_metric([model.name], model.loads)
        yield from (loaded, loads)
        for name, text, field in GAUGES:
            gauge = GaugeMetricFamily(f"powerinfer_{name}", text, labels=["model"])
            for model, stats, _ in read:
                if stats is not None:
                    gauge.add_metric([model.name], getattr(stats, field))
            yield gauge
        asked = [one for one in read if one[1] is not None or one[2]]
        counted = [(model, {} if stats is None else stats.numbers(), past) for model, stats, past in asked]
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(f"powerinfer_{name}", text, labels=["model"])
            for model, now, past in counted:
                counter.add_metric([model.name], past.get(field, 0) + now.get(field, 0))
            yield counter
        places = CounterMetricFamily(
            "powerinfer_accepted_places", "Drafts that were right, by their place in a step", labels=["model", "place"]
        )
        for model, now, past in counted:
            for name in sorted(name for name in now.keys() | past.keys() if name.startswith(PLACES)):
                places.add_metric([model.name, name.removeprefix(PLACES)], past.get(name, 0) + now.get(name, 0))
        yield places
