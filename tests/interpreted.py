"""Triton's interpreter as the tests use it: it goes through kernels operation by operation, program by program.

Import it before a kernel runs; on a GPU, where kernels are compiled, it does nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from gpu_device import CUDA


def _prepare() -> None:
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    from powerinfer.kernels import triton_kernels, triton_words

    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes indices of arrays of one element with int(), which numpy 2.4 refuses."""
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot_bytes(a: Any, b: Any, c: Any) -> Any:
        """What an instruction of the GPU does, and the interpreter in fifty operations."""
        left, right = (
            np.ascontiguousarray(one.handle.data)[..., None].view(np.int8).astype(np.int32) for one in (a, b)
        )
        sums = c.handle.data + (left * right).sum(-1, dtype=np.int32)
        return tl.core.tensor(interpreter.TensorHandle(sums, c.handle.dtype), c.type)

    def permuted(a: Any, b: Any, selector: Any) -> Any:
        """The same, in sixty."""
        parts = np.stack(np.broadcast_arrays(a.handle.data, b.handle.data), axis=-1).view(np.uint8)
        numbers = selector.handle.data[..., None] >> np.arange(0, 16, 4) & 7
        word = np.ascontiguousarray(np.take_along_axis(parts, numbers, -1)).view(np.int32)[..., 0]
        return tl.core.tensor(interpreter.TensorHandle(word, selector.handle.dtype), selector.type)

    plain_launch, patched_for = interpreter.GridExecutor.__call__, set[int]()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched_for.clear()
        plain_launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As it is, but the language is patched once a launch for each module, not at every call of a function."""
        module = id(self.fn.__globals__)
        if module not in patched_for:
            interpreter._patch_lang(self.fn)
            patched_for.add(module)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    @cache
    def shaped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.core.constexpr(math.prod(shape)), tl.core.tuple([tl.core.constexpr(size) for size in shape])

    plain_dtype = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = plain_dtype(kind.scalar)
        return dtypes[name]

    def init(self: Any, handle: Any, kind: Any) -> None:
        """As it is, but shapes are made once."""
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shaped(tuple(kind.shape) if kind.is_block() else ())

    # Types of blocks are made by the hundred thousand: each shape is made once, so that types are compared by it alone,
    # and they are named when somebody asks.
    @cache
    def block_shape(sizes: tuple[int, ...]) -> tuple[Any, int]:
        block = object.__new__(tl.core.block_type)
        plain_block(block, tl.core.int1, list(sizes))
        return block.shape, block.numel

    plain_block, plain_broadcast = tl.core.block_type.__init__, TritonSemantic.broadcast_impl_value

    def block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        self.element_ty, (self.shape, self.numel) = element, block_shape(sizes)

    def equal(self: Any, other: Any) -> bool:
        same_shape = isinstance(other, tl.core.block_type) and other.shape is self.shape
        return same_shape and self.element_ty == other.element_ty

    @cache
    def joined(*shapes: tuple[int, ...]) -> list[int] | None:
        """The shape to which blocks are broadcast; None: they have not as many dimensions, or do not fit."""
        dimensions = list(zip(*shapes, strict=False))
        fit = len({len(shape) for shape in shapes}) == 1 and all(1 in both or len({*both}) == 1 for both in dimensions)
        return [max(both) for both in dimensions] if fit else None

    def spread(given: Any, shape: list[int]) -> Any:
        """A copy, which takes numpy less time than a view."""
        kind = tl.core.block_type(given.dtype, shape)
        if given.type.shape is kind.shape:
            return given
        data = np.empty(shape, given.handle.data.dtype)
        data[...] = given.handle.data
        return tl.core.tensor(interpreter.TensorHandle(data, given.handle.dtype.scalar), kind)

    def broadcast(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        if one.type.is_block() and other.type.is_block():
            if one.type.shape is other.type.shape:
                return one, other
            shape = joined(one.handle.data.shape, other.handle.data.shape)
            if shape is not None:
                return spread(one, shape), spread(other, shape)
        return plain_broadcast(self, one, other)

    # Operands that agree are most, and so are a block and a number: what that becomes is made once.
    plain_check, made = TritonSemantic.binary_op_type_checking_impl, dict[Any, Any]()
    Tensor = tl.core.tensor

    def check(self: Any, left: Any, right: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        """As it is, with fewer questions."""
        if type(left) is Tensor and type(right) is Tensor:
            divides = named or any(given[3:])  # float16 becomes float32 then
            if left.dtype == right.dtype and not divides and not left.dtype.is_ptr():
                return (left, right) if left.shape is right.shape else broadcast(self, left, right)
        elif type(left) is Tensor or type(right) is Tensor:
            first = type(left) is Tensor
            block, number = (left, right) if first else (right, left)
            key = (type(number), number, block.dtype.name, id(block.shape), first, given, *named.items())
            if key in made:
                return (block, made[key]) if first else (made[key], block)
            checked = plain_check(self, left, right, *given, **named)
            if checked[not first] is block:
                made[key] = checked[first]
                made[key].handle.data.flags.writeable = False
            return checked
        return plain_check(self, left, right, *given, **named)

    plain_unwrap, constexpr = tl.core._unwrap_if_constexpr, tl.core.constexpr
    several = frozenset((list, tuple, tl.core.tuple))

    def unwrap(given: Any) -> Any:
        """As it is, with fewer questions."""
        kind = type(given)
        return given.value if kind is constexpr else plain_unwrap(given) if kind in several else given

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """As it is, but members are looked for once."""
        for name, member in builtins_of(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    TritonSemantic.binary_op_type_checking_impl = check
    tl.core._unwrap_if_constexpr = unwrap
    interpreter._patch_builtin = patch_builtin
    tl.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    tl.core.block_type.__init__ = block
    tl.core.block_type.__eq__ = equal
    TritonSemantic.broadcast_impl_value = broadcast
    # Of every sum of integers in 64 bits, which it asserts of nothing unless it debugs.
    assert not interpreter.InterpreterOptions.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None
    tl.core.tensor.__init__ = init
    interpreter._get_np_dtype = np_dtype
    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patched
    triton_kernels._dot_bytes = dot_bytes
    triton_words._permuted = permuted
    triton_kernels.NEARLY = 0  # programs run one after the other: the fewest


if find_spec("triton") is not None and not CUDA:
    _prepare()


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched within this context, one after another."""
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []
    plain = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        plain(self, *args, **kwargs)

    GridExecutor.__call__ = noted
    try:
        yield names
    finally:
        GridExecutor.__call__ = plain
