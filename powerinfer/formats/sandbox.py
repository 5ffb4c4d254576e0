"""Renders a chat template, a program out of a model file, with bounded time and memory.

Jinja's sandbox keeps a template from reaching Python's internals, but not from looping for ever or from doubling a
string sixty times. Two ways close that:

- here, in this process: a template that only uses what is known to grow no faster than its input (nearly every chat
  template) runs under a deadline, and what it makes is counted;
- in a process of its own with limits set by the system: every other template, 0.1 s slower.

This file is also the program of that process, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SECONDS = 1.0  # of processor time for a rendering; real templates need milliseconds
WORKER_SECONDS = 2  # of processor time of a process, its start included
WORKER_WAIT = 10.0  # seconds by the clock, on a machine however busy
WORKER_BYTES = 512 << 20  # address space of that process
MAX_SOURCE = 1 << 16  # characters, compiled in 2 s at worst; the longest template in use has a quarter of it
MAX_OUTPUT = 1 << 22  # characters, and as many times the input as below
MAX_GROWTH = 16
MAX_WORK = 1 << 24  # characters of all strings that one rendering makes, and as many times the input
GENERATOR = 0x20  # inspect.CO_GENERATOR
FILENAME = "<template>"  # what Jinja calls code compiled from a string

_TEXT_METHODS = """strip lstrip rstrip split rsplit splitlines startswith endswith removeprefix removesuffix lower upper
title capitalize find rfind count index isdigit isalpha isspace isupper islower replace join"""
_TEXT_FILTERS = "trim tojson length count string first last lower upper capitalize title default d int float abs safe"
SAFE_METHODS = frozenset((*_TEXT_METHODS.split(), "items", "keys", "values", "get"))
SAFE_FILTERS = frozenset((*_TEXT_FILTERS.split(), "list", "items", "dictsort", "join", "replace", "map"))
SAFE_FILTERS |= {"select", "reject", "selectattr", "rejectattr"}
SAFE_FUNCTIONS = frozenset(("range", "namespace", "raise_exception", "strftime_now"))
_SMALL = 1 << 31


class Refused(Exception):
    """The template called raise_exception: it does not take these messages."""


class Failed(Exception):
    """The template is broken, or does not fit these messages."""


class Limit(BaseException):
    """The template went beyond its time or memory. Not an Exception, so that no filter can swallow it."""


class _Unknown(BaseException):
    """Something whose cost is not known in advance: the process with hard limits has to do it."""


def render(source: str, variables: dict[str, Any], isolate: bool | None = None) -> str:
    """The text of template `source` with `variables` (strings, numbers, lists, dicts). Keeps compiled templates.

    isolate: render in a process of its own; None: where the template asks for it. Raises Refused, Failed or Limit.
    """
    if len(source) > MAX_SOURCE:
        raise Limit(f"it is longer than {MAX_SOURCE} characters")
    if not isolate:
        try:
            return _compiled(source).render(variables)
        except _Unknown:
            if isolate is False:
                raise Failed("it needs a process of its own") from None
    return _in_worker(source, variables)


def prepare(source: str) -> None:
    """Compiles `source` ahead of its first rendering."""
    if len(source) <= MAX_SOURCE:
        with contextlib.suppress(_Unknown):
            _compiled(source)


_templates: dict[str, _Template | None] = {}
_lock = threading.Lock()


def _compiled(source: str) -> _Template:
    with _lock:
        if source not in _templates:
            while len(_templates) >= 8:
                _templates.pop(next(iter(_templates)))
            try:
                _templates[source] = _Template(source, guarded=True)
            except _Unknown:
                _templates[source] = None
        template = _templates[source]
    if template is None:
        raise _Unknown
    return template


def _bounded(work: Callable[[], Any]) -> Any:
    """What `work` returns; Limit when it takes longer than SECONDS.

    A trace function looks at the clock on calls, and on every line of the template, in this thread only.
    """
    deadline = time.thread_time() + SECONDS  # of computing: how busy the machine is must not decide

    def check() -> None:
        if time.thread_time() > deadline:
            raise Limit(f"it takes longer than {SECONDS:g} s")

    def trace(frame: Any, event: str, arg: Any) -> Any:
        ours = frame.f_code.co_filename == FILENAME
        if ours or not frame.f_code.co_flags & GENERATOR:  # what is raised in a generator that is closed gets lost
            check()
        return trace if ours else None

    before, limit = sys.gettrace(), None
    sys.settrace(trace)
    try:
        result = work()
    except Limit as error:
        limit = str(error)
    finally:
        sys.settrace(before)
    if limit is not None:
        raise Limit(limit)
    check()
    return result


class _Template:
    """A compiled template. `guarded`: refuse (by _Unknown) what is not known to be cheap, and count the rest."""

    def __init__(self, source: str, guarded: bool) -> None:
        self._lock = threading.Lock()
        self._env = _environment(guarded)
        tree = _failing(lambda: self._env.parse(source))
        if guarded and not _is_simple(tree):
            raise _Unknown
        self._env.spent, self._env.budget = 0, MAX_WORK
        code = _failing(lambda: self._env.compile(tree))
        self._template = self._env.template_class.from_code(self._env, code, self._env.make_globals(None))
        self._guarded = guarded

    def render(self, variables: dict[str, Any]) -> str:
        size = _size(variables)
        with self._lock:  # the counters belong to one rendering
            self._env.spent, self._env.budget = 0, MAX_WORK + MAX_GROWTH * size
            limit = MAX_OUTPUT + MAX_GROWTH * size
            run = _bounded if self._guarded else lambda work: work()
            text: str = run(lambda: _failing(lambda: self._text(variables, limit)))
        return text

    def _text(self, variables: dict[str, Any], limit: int) -> str:
        parts, length = [], 0
        for part in self._template.root_render_func(self._template.new_context(variables)):
            length += len(part)
            if length > limit:
                raise Limit(f"it writes more than {limit} characters")
            parts.append(part)
        return "".join(parts)


def _failing(work: Callable[[], Any]) -> Any:
    """What `work` returns, any error in it as Failed.

    The error that is raised knows nothing of the one that it stands for: a traceback would keep alive Jinja's frames,
    and closing a generator among them later, deep in another template, is an error of its own.
    """
    failure: BaseException
    try:
        return work()
    except Refused as error:
        failure = Refused(str(error))
    except (MemoryError, RecursionError):
        failure = Limit("it nests or grows too far")
    except Exception as error:
        failure = Failed(f"{type(error).__name__}: {error}")
    raise failure


def _size(value: Any) -> int:
    """Characters and entries of `value` with all it holds."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(1 + len(str(key)) + _size(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return sum(1 + _size(entry) for entry in value)
    return 1


def _is_simple(tree: Any) -> bool:
    """Whether every node of the tree is of a kind whose cost is known or counted."""
    from jinja2 import nodes

    plain = (
        nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem,
        nodes.Slice, nodes.If, nodes.Assign, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg,
        nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.FloorDiv, nodes.Div, nodes.Concat, nodes.CondExpr,
        nodes.Test, nodes.Pair, nodes.Keyword, nodes.Scope, nodes.Break, nodes.Continue, nodes.Template,
    )  # fmt: skip
    constant = (nodes.Const, nodes.Pair, nodes.List, nodes.Tuple, nodes.Dict, nodes.Neg)
    macros: set[str] = set()

    def is_constant(node: Any) -> bool:
        return isinstance(node, constant) and all(is_constant(child) for child in node.iter_child_nodes())

    def known_call(node: Any) -> bool:
        if isinstance(node.node, nodes.Getattr):
            return node.node.attr in SAFE_METHODS
        return isinstance(node.node, nodes.Name) and node.node.name in SAFE_FUNCTIONS | macros

    def known_filter(node: Any) -> bool:
        if node is None:
            return True
        if node.name == "map":  # by attribute, or by a filter that takes nothing
            named = [entry.key for entry in node.kwargs]
            return named == ["attribute"] or (not named and len(node.args) == 1)
        if node.name == "tojson":
            given = {entry.key: entry.value for entry in node.kwargs}
            indent = given.get("indent", nodes.Const(0))
            return not node.args and isinstance(indent, nodes.Const) and indent.value in (None, *range(9))
        return node.name in SAFE_FILTERS

    def known(node: Any) -> bool:
        if isinstance(node, plain):
            return True
        if isinstance(node, nodes.Call):
            return known_call(node) and node.dyn_args is None and node.dyn_kwargs is None
        if isinstance(node, nodes.Filter):
            return known_filter(node) and node.dyn_args is None and node.dyn_kwargs is None
        if isinstance(node, nodes.AssignBlock):
            return known_filter(node.filter)
        if isinstance(node, nodes.For):
            return not node.recursive
        if isinstance(node, nodes.Tuple) and node.ctx == "store":
            return True
        return is_constant(node)

    def walk(node: Any) -> bool:
        if isinstance(node, nodes.Macro):  # it may call those before it, not itself: no recursion
            if not all(walk(child) for child in node.iter_child_nodes()):
                return False
            macros.add(node.name)
            return True
        return known(node) and all(walk(child) for child in node.iter_child_nodes())

    return bool(_failing(lambda: walk(tree)))


def _environment(guarded: bool) -> Any:
    """Jinja as transformers sets it up for chat templates; `guarded`: with every growth counted."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote, for training: here its body is all there is to it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    kind: Any = _guarded_environment() if guarded else ImmutableSandboxedEnvironment
    env: Any = kind(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    if guarded:
        env.filters = {name: env.filters[name] for name in SAFE_FILTERS if name in env.filters}
        env.filters |= {"join": env.join_filter, "replace": env.replace}
    return env


def _guarded_environment() -> Any:
    from jinja2.compiler import CodeGenerator
    from jinja2.runtime import Macro, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generator(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:
            """a ~ b, through the counter."""
            self.write("environment.concat([str(environment.finalize(x)) for x in (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write(")])")

    class Guarded(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(("+", "*", "%"))
        spent = 0
        budget = MAX_WORK

        def __init__(self, **options: Any) -> None:
            super().__init__(finalize=self.counted, **options)
            self.functions = {_raise_exception, _strftime_now, self.globals["range"]}

        def spend(self, characters: int) -> None:
            self.spent += characters
            if self.spent > self.budget:
                raise Limit(f"it makes more than {self.budget} characters of text")

        def counted(self, value: Any) -> Any:
            text = value if type(value) is str else str(value)
            self.spend(1 + len(text))
            return text

        def concat(self, parts: Any) -> str:
            parts = list(parts)
            self.spend(sum(map(len, parts)))
            return "".join(parts)

        def join_filter(self, value: Any, d: Any = "", attribute: Any = None) -> str:
            if attribute is not None:
                raise _Unknown
            return self.joined(str(d), value)

        def joined(self, separator: str, value: Any) -> str:
            parts = [part if type(part) is str else str(part) for part in value]
            self.spend(len(separator) * len(parts) + sum(map(len, parts)))
            return separator.join(parts)

        def replace(self, s: Any, old: Any, new: Any, count: Any = -1) -> str:
            s, old, new = str(s), str(old), str(new)
            self.spend(len(s) + s.count(old) * len(new))
            return str(s.replace(old, new, -1 if count is None else count))

        def counted_arguments(self, owner: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
            """The arguments of a method of `owner`, counted where it makes more text than it is given."""
            if method == "join":
                parts = list(args[0])
                self.spend(len(owner) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
                return (parts, *args[1:])
            if method == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
                self.spend(len(owner) + owner.count(args[0]) * len(args[1]))
            return args

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if isinstance(left, Undefined) or isinstance(right, Undefined):
                return super().call_binop(context, operator, left, right)
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if operator == "+" and isinstance(left, str) and isinstance(right, str):
                self.spend(len(left) + len(right))
            elif not numbers or (operator != "+" and not (abs(left) < _SMALL and abs(right) < _SMALL)):
                if operator == "+" and (isinstance(left, str) or isinstance(right, str)):
                    return left + right  # Python says what is wrong
                raise _Unknown
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(__obj, "__self__", None)
            if type(owner) is str and args:
                args = __self.counted_arguments(owner, __obj.__name__, args)
            known = type(__obj) is Macro or __obj is Namespace or isinstance(__obj, Undefined)
            known = known or __obj in __self.functions
            if not known and not (isinstance(owner, (str, dict, list, tuple)) and __obj.__name__ in SAFE_METHODS):
                raise _Unknown
            return super().call(__context, __obj, *args, **kwargs)

    return Guarded


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


# ----------------------------------------------------------------------------------------------- a process of its own


def _in_worker(source: str, variables: dict[str, Any]) -> str:
    """Renders in a process that the system ends when it takes too much."""
    import subprocess

    question = json.dumps({"path": sys.path, "source": source, "variables": variables}).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-X", "utf8", __file__],
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WORKER_WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Limit(f"it takes longer than {WORKER_WAIT:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise Limit("it takes too much memory or time") from None
    kinds = {"refused": Refused, "failed": Failed, "limit": Limit}
    if answer["kind"] in kinds:
        raise kinds[answer["kind"]](answer["text"])
    text: str = answer["text"]
    return text


def _work() -> None:
    """The program of that process: a question on standard input, the answer on standard output."""
    data = sys.stdin.buffer.read()
    question = json.loads(data)
    sys.path[:] = question["path"]
    _limit_process(len(data))
    try:
        kind, text = "text", _Template(question["source"], guarded=False).render(question["variables"])
    except (Refused, Failed, Limit) as error:
        kind, text = type(error).__name__.lower(), str(error)[:1000]
    sys.stdout.buffer.write(json.dumps({"kind": kind, "text": text}).encode())


def _limit_process(input_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows: the time limit alone holds there
        return
    memory = WORKER_BYTES + MAX_GROWTH * input_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (WORKER_SECONDS, WORKER_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _work()
