"""Choices for a loaded model and this machine: values and reasons, made text only where they are shown.

    executor.choices.threads = Choice(4, "asked for")
    executor.choices.texts()["threads"]  # "4 (asked for)"
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from powerinfer.kernels import cpu

if TYPE_CHECKING:
    from powerinfer.config import EngineConfig

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value and the reason for it. more: text behind both, with the sign that separates it."""

    value: T
    reason: str = ""
    more: str = ""

    def __str__(self) -> str:
        value = "none" if self.value is None else self.value
        return f"{value}{f' ({self.reason})' if self.reason else ''}{self.more}"

    def add(self, more: str) -> Choice[T]:
        """The same choice with more text behind it."""
        return replace(self, more=self.more + more)


@dataclass(frozen=True)
class CachePages:
    """The size of a KV cache. nbytes: on the CPU."""

    pages: int
    kv_type: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.pages} pages of {cpu.PAGE} tokens, {self.kv_type}, {self.nbytes >> 20} MiB"


@dataclass(frozen=True)
class StateSlots:
    """Slots for the states of sequences; nbytes: of each."""

    slots: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.slots} of {self.nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class GpuPart:
    """The first layers of a model on a device, perhaps with the head."""

    layers: int
    head: bool
    device: str

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' * (self.layers > 1)}{' and the head' * self.head} on {self.device}"


@dataclass
class Choices:
    """Choices in the order in which they are shown. None: there was nothing to choose.

    memory: its NUMA nodes; gpu: its part of the model, whose value is None where the CPU has all; steps: who acts in
    steps on both devices; launches: whether a step is launched ahead of its tokens; prompts: whether chunks of these
    are replayed; neurons: the kernel that sums them; prefill: how prompts are computed; prefill_chunk: tokens of these
    in a step; experts: the policy over those on the GPU; drafts: where they come from; trial: the time of the
    selector's trial, or the file of an earlier one.
    """

    isa: Choice[str] | None = None
    threads: Choice[int] | None = None
    memory: Choice[str] | None = None
    disk: Choice[str] | None = None
    kv_cache: Choice[CachePages] | None = None
    states: Choice[StateSlots] | None = None
    gpu: Choice[GpuPart | None] | None = None
    steps: Choice[str] | None = None
    launches: Choice[str] | None = None
    prompts: Choice[str] | None = None
    neurons: Choice[str] | None = None
    prefill: Choice[str] | None = None
    prefill_chunk: Choice[int] | None = None
    experts: Choice[str] | None = None
    drafts: Choice[str] | None = None
    trial: Choice[str] | None = None
    selector: Choice[str] | None = None

    def texts(self) -> dict[str, str]:
        """The choices by name, each as a sentence for people."""
        choices = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: str(choice) for name, choice in choices if choice is not None}


def launched_afterwards(reason: str) -> Choice[str]:
    """The choice of `launches` where a step waits for the tokens of the last one."""
    return Choice("when the tokens are known", reason)


def machine_choices(engine: EngineConfig) -> Choices:
    """The choices for this machine's CPU. RequestError for options that it cannot meet."""
    return Choices(isa=Choice(*cpu.choose_isa(engine.isa)), threads=Choice(*cpu.choose_threads(engine.threads)))
