"""Launches of Triton's kernels that cost the host little: in prompts, and until steps are recorded, every one does.

For each launch Triton binds the arguments to the parameters, says of each how it is specialised, and makes a text of
that, by which it looks for what it has compiled. Here a kernel has a function of its own, generated from its
parameters, that makes a tuple of the same facts, and the first arguments of a kind are left to Triton. What it compiled
is called with addresses: of a tensor its launcher would ask for the address, and the driver what lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    Grid = tuple[int, ...]
    Launch = Callable[..., None]

PLAIN = {type(None): None, bool: "u1", float: "fp32"}
"""Kinds of arguments that are neither tensors nor integers, and are not specialised by their value."""


def launched(kernel: Any) -> Any:
    """A decorator of a kernel: `kernel[grid](...)` as ever. One that is interpreted stays as it is."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else kernel


class Launcher:
    """A kernel that remembers what was compiled for which kind of arguments. compiled: its launch, function and
    metadata by a key of these."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, tuple[Any, Any, Any]] = {}
        self._launch = _generated(kernel, self.compiled, self._leave)

    def __getitem__(self, grid: Grid) -> Launch:
        return partial(self._launch, grid, *grid, *_PADDING[len(grid)])

    def _leave(self, grid: Grid, key: Any, arguments: dict[str, Any]) -> None:
        """Leave a launch to Triton, and remember what it has compiled. key: None: of a kind that is not remembered."""
        compiled = self.kernel[grid](**arguments)
        run = getattr(compiled, "run", None)
        if key is not None and run is not None and not hasattr(compiled, "result"):  # else it is still being compiled
            self.compiled[key] = run, compiled.function, compiled.packed_metadata


_PADDING = {1: (1, 1), 2: (1,), 3: ()}
_WIDE = {(key, high): f"{key} {high}" for key in (0, 1, 16) for high in (-1, 0)}
"""Keys of integers that have 64 bits and a sign; others are left to Triton."""


def _generated(kernel: Any, compiled: dict[Any, Any], leave: Callable[..., None]) -> Launch:
    """A function of a grid, its three sizes, the kernel's arguments and options, that launches what was compiled for
    equal ones: it makes their key, and passes the arguments in order, tensors as addresses."""
    lines, keys, values = [], [], []
    for param in kernel.params:
        name = param.name
        if param.is_constexpr:  # 1, 1.0 and True are equal
            keys += [name, f"{name}.__class__"]
            values.append(name)
            continue
        aligned = "1" if param.do_not_specialize or param.do_not_specialize_on_alignment else f"{name}_ & 15"
        number = "0" if param.do_not_specialize else f"1 if {name} == 1 else 0 if {aligned} else 16"
        address = f"({name}.dtype,) if {aligned} else {name}.dtype"
        lines += [
            f"{name}_ = {name}",
            f"if {name}.__class__ is Tensor:",
            f"    {name}_ = {name}.data_ptr()",
            f"    {name}_key = {address}",
            f"elif {name}.__class__ is int:",
            f"    {name}_key = {number}",
            f"    if not -0x80000000 <= {name} <= 0x7fffffff:",
            f"        {name}_key = WIDE[{name}_key, {name} >> 63]",
            "else:",
            f"    {name}_key = PLAIN[{name}.__class__]",
        ]
        keys.append(f"{name}_key")
        values.append(f"{name}_")
    arguments = [f"{param.name}=default_{param.name}" if param.has_default else param.name for param in kernel.params]
    names = ", ".join(f'"{param.name}": {param.name}' for param in kernel.params)
    text = "\n".join([
        f"def launch(_grid, _x, _y, _z, {', '.join(arguments)}, **_options):",
        "    _active = driver.active",
        "    _device = _active.get_current_device()",
        "    try:",
        *(f"        {line}" for line in lines),
        "    except KeyError:",  # an argument of a kind that Triton may know
        f"        return leave(_grid, None, {{{names}, **_options}})",
        f"    _key = _device, {', '.join(keys)}, *_options.items()",
        "    _found = get(_key)",
        "    if _found is None:",
        f"        return leave(_grid, _key, {{{names}, **_options}})",
        "    _run, _function, _metadata = _found",
        "    _run(_x, _y, _z, _active.get_current_stream(_device), _function, _metadata, None, None, None, "
        f"{', '.join(values)})",
    ])  # fmt: skip
    space: dict[str, Any] = {f"default_{param.name}": param.default for param in kernel.params if param.has_default}
    space |= {"Tensor": torch.Tensor, "PLAIN": PLAIN, "WIDE": _WIDE, "driver": driver, "leave": leave}
    space["get"] = compiled.get
    exec(text, space)
    return space["launch"]  # type: ignore[no-any-return]
