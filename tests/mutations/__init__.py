"""Faults planted in the package, by which the tests of each guarantee (docs/design.md) show that they can fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file`, `old` becomes `new`; then `tests`, arguments of pytest or a command of make, fail."""

    guarantee: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def native(self) -> bool:
        """Whether the native module has to be built for it."""
        return self.file.endswith((".cpp", ".h"))


def every_mutation() -> list[Mutation]:
    from mutations import kernels, models, native, others

    return [*models.MUTATIONS, *kernels.MUTATIONS, *others.MUTATIONS, *native.MUTATIONS]
