"""Change functions of a loaded module in place, and put everything back.

`rewrite` makes module globals local to a thread and edits functions, by compiling the module's own source again with small changes and
exchanging code objects. Functions keep their identity, so every reference bound earlier follows: closure cells, `from m import f`, tables
keyed by the function. What other modules read and write as attributes of the module goes to the same thread-local values.

Before anything is changed, the unchanged source is compiled and must equal the running code, function by function; a module that was
patched, whose source is missing, or that uses the names in a way that cannot be followed raises `UnknownLayout`.
`Changes.undo` restores the very objects that were there. Cost: one parse of the module, milliseconds to tenths of a second.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

Edit = Callable[[ast.FunctionDef], None]
_HOLDER = "_dflash_mp_thread_local"
_FUTURES = functools.reduce(int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names))


class UnknownLayout(Exception):
    """The module is not written in a way that is understood; nothing of it was changed."""


class Changes:
    """Everything that was changed, to be undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Restore all objects. Safe to repeat."""
        while self._undo:
            self._undo.pop()()

    def code(self, function: types.FunctionType, code: types.CodeType) -> None:
        """Give `function` other code."""
        before = function.__code__
        function.__code__ = code
        self._undo.append(lambda: setattr(function, "__code__", before))

    def entry(self, namespace: dict[str, Any], key: str, value: Any) -> None:
        """Set or add a global."""
        if key in namespace:
            before = namespace[key]
            self._undo.append(lambda: namespace.__setitem__(key, before))
        else:
            self._undo.append(lambda: namespace.__delitem__(key))
        namespace[key] = value

    def kind(self, module: types.ModuleType, kind: type[types.ModuleType]) -> None:
        """Give `module` another class."""
        before = type(module)
        module.__class__ = kind
        self._undo.append(lambda: setattr(module, "__class__", before))


def rewrite(
    changes: Changes,
    module: types.ModuleType,
    *,
    local: Mapping[str, Callable[[], Any]],
    edits: Mapping[str, Edit] | None = None,
    provide: Mapping[str, Any] | None = None,
) -> list[str]:
    """Make the globals `local` of `module` local to a thread and apply `edits` to functions; qualified names of what was rewritten.

    `local` gives each name's value in a thread that has not set it, the calling one included: nothing changes what the present objects hold.
    `edits`, by qualified name, change a function's syntax tree; `provide` are new globals that they use. Raises `UnknownLayout`, with the
    module as it was.
    """
    edits, provide, names = edits or {}, provide or {}, set(local)
    source = _Source(module)
    found = {f.__qualname__: f for f in functions_of(module) if mentioned(f.__code__) & names}
    for name in edits:
        found[name] = _function(module, name)
    unreached = source.users(names) - set(found)
    if unreached or not found:
        who = ", ".join(sorted(unreached)) or "what uses " + ", ".join(sorted(names))
        raise UnknownLayout(f"{module.__name__}: {who} cannot be reached")
    for key in (_HOLDER, *provide):
        if key in vars(module):
            raise UnknownLayout(f"{module.__name__}.{key} exists: another copy of this shim is installed")
    codes = source.rewritten(list(found.values()), names, edits)

    holder = _holder(local)
    for key, value in {_HOLDER: holder, **provide}.items():
        changes.entry(vars(module), key, value)
    for function, code in codes:
        changes.code(function, code)
    if names:
        changes.kind(module, _routing(module, names, holder))
    return sorted(found)


def run_under(context: str) -> Edit:
    """An edit: the body runs under the context manager that the global `context` holds."""

    def edit(node: ast.FunctionDef) -> None:
        start = _after_docstring(node)
        (block,) = ast.parse(f"with {context}: pass").body
        _relocate(block, node.body[start])
        block.body = node.body[start:]  # type: ignore[attr-defined]
        node.body[start:] = [block]

    return edit


def begin_with(statement: str) -> Edit:
    """An edit: `statement` runs first."""

    def edit(node: ast.FunctionDef) -> None:
        start = _after_docstring(node)
        (new,) = ast.parse(statement).body
        _relocate(new, node.body[start])
        node.body.insert(start, new)

    return edit


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions that `module` defines, in it or in its classes, without the wrappers around them."""
    seen: set[int] = set()
    for value in list(vars(module).values()):
        inside = isinstance(value, type) and value.__module__ == module.__name__
        for candidate in vars(value).values() if inside else (value,):
            function = innermost(candidate)
            ours = isinstance(function, types.FunctionType) and function.__module__ == module.__name__
            if ours and id(function) not in seen:
                seen.add(id(function))
                yield function


def innermost(value: Any) -> Any:
    """What decorators were wrapped around: Dynamo, for one, wraps `Tracer.trace` at its first compilation."""
    while True:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            return value


def mentioned(code: types.CodeType) -> set[str]:
    """Global and attribute names that `code`, or a function inside it, uses."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= mentioned(constant)
    return found


class _Source:
    """The source of a loaded module, function by function. Code is compiled, never run."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module.__name__
        try:
            self._tree = ast.parse(inspect.getsource(module))
        except (OSError, SyntaxError) as error:
            raise UnknownLayout(f"{self._module}: the source cannot be read ({error})") from None

    def users(self, names: set[str]) -> set[str]:
        """Functions whose source mentions one of `names`."""
        return {
            name
            for (name, _), node in _definitions(self._tree).items()
            if any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))
        }

    def rewritten(
        self, functions: Iterable[types.FunctionType], names: set[str], edits: Mapping[str, Edit]
    ) -> list[tuple[types.FunctionType, types.CodeType]]:
        """Each function with its code where `names` are thread-local attributes, and edited."""
        plain, tree = _codes(self._tree, functions), copy.deepcopy(self._tree)
        nodes = _definitions(tree)
        for function in functions:
            where, place = f"{self._module}.{function.__qualname__}", _place(function)
            if plain.get(place) != function.__code__ or place not in nodes:
                raise UnknownLayout(f"{where} is not what its source says")
            if names & _bound(function.__code__):
                raise UnknownLayout(f"{where} has a variable of its own with the name of a global")
            _ToAttribute(names).generic_visit(nodes[place])
            if function.__qualname__ in edits:
                edits[function.__qualname__](nodes[place])
        changed = _codes(ast.fix_missing_locations(tree), functions)
        found = [(function, changed[_place(function)]) for function in functions]
        for function, code in found:
            if _interface(code) != _interface(function.__code__):
                raise UnknownLayout(f"{self._module}.{function.__qualname__}: its signature or closure would change")
        return found


_Place = tuple[str, int]  # qualified name and first line, decorators included


def _place(function: types.FunctionType) -> _Place:
    return function.__qualname__, function.__code__.co_firstlineno


def _definitions(tree: ast.Module) -> dict[_Place, ast.FunctionDef]:
    """The functions of a module and of its classes, those under a condition included."""
    found: dict[_Place, ast.FunctionDef] = {}

    def collect(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found[path + child.name, first] = child
            elif isinstance(child, (ast.ClassDef, ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                collect(child, f"{path}{child.name}." if isinstance(child, ast.ClassDef) else path)

    collect(tree, "")
    return found


def _codes(tree: ast.Module, functions: Iterable[types.FunctionType]) -> dict[_Place, types.CodeType]:
    """The code of every function of `tree`, compiled as the module of `functions` was."""
    like = next(iter(functions)).__code__
    found: dict[_Place, types.CodeType] = {}

    def collect(code: types.CodeType, path: str) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_flags & inspect.CO_OPTIMIZED:  # a function; the body of a class is not optimized
                    found[path + constant.co_name, constant.co_firstlineno] = constant
                else:
                    collect(constant, f"{path}{constant.co_name}.")

    collect(compile(tree, like.co_filename, "exec", flags=like.co_flags & _FUTURES, dont_inherit=True), "")
    return found


def _interface(code: types.CodeType) -> tuple[object, ...]:
    arguments = code.co_argcount + code.co_kwonlyargcount
    return code.co_argcount, code.co_kwonlyargcount, code.co_varnames[:arguments], code.co_freevars, code.co_flags


class _ToAttribute(ast.NodeTransformer):
    """Turns global names into attributes of the thread-local holder."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._names:
            return node
        holder = ast.copy_location(ast.Name(_HOLDER, ast.Load()), node)
        return ast.copy_location(ast.Attribute(holder, node.id, node.ctx), node)

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        kept = [name for name in node.names if name not in self._names]
        return ast.copy_location(ast.Global(kept) if kept else ast.Pass(), node)


def _bound(code: types.CodeType) -> set[str]:
    found = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _bound(constant)
    return found


def _function(module: types.ModuleType, name: str) -> types.FunctionType:
    value: Any = module
    for part in name.split("."):
        value = vars(value).get(part)
        if value is None:
            raise UnknownLayout(f"{module.__name__} has no {name}")
    function = innermost(value)
    if not isinstance(function, types.FunctionType):
        raise UnknownLayout(f"{module.__name__}.{name} is not a function")
    return function


def _holder(local: Mapping[str, Callable[[], Any]]) -> threading.local:
    class Holder(threading.local):
        def __init__(self) -> None:
            for name, fresh in local.items():
                setattr(self, name, fresh())

    return Holder()


def _routing(module: types.ModuleType, names: set[str], holder: threading.local) -> type[types.ModuleType]:
    """A class for `module` whose attributes `names` are the holder's."""

    def route(name: str) -> property:
        return property(lambda self: getattr(holder, name), lambda self, value: setattr(holder, name, value))

    routes = {name: route(name) for name in names}
    kind = _LikeItsBase(f"{type(module).__name__}WithThreadLocals", (type(module),), routes)
    return cast("type[types.ModuleType]", kind)


class _LikeItsBase(type):
    """Classes that equal what they derive from. Up to 2.11 Dynamo traces `from m import f` only where m's class equals `ModuleType`.

    2.13 asks for a subclass, which such a class is, too, so that equality changes nothing there: it is not made to depend on the version.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other == cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


def _after_docstring(node: ast.FunctionDef) -> int:
    first = node.body[0]
    return int(
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )


def _relocate(node: ast.AST, like: ast.AST) -> None:
    for part in ast.walk(node):
        ast.copy_location(part, like)
