"""Functions of Python source, and who calls whom, as far as the text tells.

A function is a node, whether it is a method or not; one within another belongs to that one. A call
is resolved by its name, without running anything:

    f(…)             what the function or its module imports as f, or the module's own f; a class
                     stands for its __new__ and __init__
    self.f(…)        f of the same class or of the nearest base that has one; super().f too
    module.f(…)      f of an imported module or class
    anything.f(…)    every function with that name, if they are few
"""

import ast
import builtins
import gc
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

FEW = 3
"""So many functions may share a name that is all that is known of a call."""
_OWN = ("self", "cls")
_SUPER = "super()"
_MADE_BY = ("__new__", "__init__")
_BUILTIN = frozenset(dir(builtins))
_OF_BUILTINS = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind)
)
"""`x.append(…)` is hardly ever the one function of a program that has this name, too."""

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef)
_Imports = dict[str, tuple[str | None, str]]
"""By local name: the module, None for one of another package, and the name in it; "" for the module
itself."""


@dataclass(frozen=True)
class Function:
    """A function or method."""

    path: str
    """Of its file within the package, with / as separator."""
    module: str
    """Dotted, within the package: "core.add", and "core" for core/__init__.py."""
    owner: str
    """Dotted name of the class; "" for a function of a module."""
    name: str
    first: int
    """Number of the first line, that of the first decorator, from 1."""
    last: int
    imports: _Imports
    """What its own body imports."""
    import_lines: frozenset[int]
    """Numbers of the lines of these imports."""
    calls: tuple[tuple[str | None, str], ...]
    """Of what and which: (None, "f") for f(), ("self", "f") for self.f(), ("", "f") for f of some
    expression. In the order of the text, without repetition."""

    @property
    def qualified(self) -> str:
        """Module, class and name; overloads share it."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


@dataclass
class _Class:
    module: "_Module"
    bases: list[str]
    methods: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Module:
    functions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, _Class] = field(default_factory=dict)
    imports: _Imports = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    """Modules of which all names are imported."""


_Found = list[int] | _Class | _Module
"""What a name means: functions, a class or a module."""


class Program:
    """A package's modules.

    Args:
        package: its name, with which its absolute imports begin.
        texts: the modules' source by their paths in the package, with / as separator.
    Raises:
        SyntaxError: a text is no Python.
    """

    def __init__(self, package: str, texts: Mapping[str, str]) -> None:
        self.package = package
        self.functions: list[Function] = []
        """In the order of the paths and of the text."""
        self._modules: dict[str, _Module] = {}
        self._named: dict[str, list[int]] = defaultdict(list)
        with _cycles_left_alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in somebody else's strings
            for path, text in sorted(texts.items()):
                _Reader(self, path).read(ast.parse(text))

    def calls(self) -> Iterator[tuple[int, int]]:
        """Yield (caller, called) for every call that is resolved; pairs may recur."""
        for number, function in enumerate(self.functions):
            for whose, name in function.calls:
                yield from ((number, called) for called in self._called(function, whose, name))

    def add(self, function: Function, module: _Module, owner: _Class | None) -> None:
        """For `_Reader`: take a function, and give it a number."""
        number = len(self.functions)
        self.functions.append(function)
        self._named[function.name].append(number)
        (module.functions if owner is None else owner.methods)[function.name].append(number)

    def module(self, name: str) -> _Module:
        """For `_Reader`: a new module."""
        self._modules[name] = _Module()
        return self._modules[name]

    def _called(self, function: Function, whose: str | None, name: str) -> list[int]:
        module = self._modules[function.module]
        if whose is None:
            found = self._meant(function, name)
            if found is not None:
                return self._as_functions(found)
            known = name in function.imports or name in module.imports or name in _BUILTIN
            return [] if known else self._few(name)
        owner = module.classes.get(function.owner)
        if owner is not None and (whose == _SUPER or whose in _OWN):
            return self._method(owner, name, whose == _SUPER) or self._few(name)
        if whose:
            origin = function.imports.get(whose) or module.imports.get(whose)
            if origin is not None and origin[0] is None:
                return []  # of another package
            found = self._meant(function, whose)
            if isinstance(found, _Module):
                inner = self._look_up(found, name)
                return [] if inner is None else self._as_functions(inner)
            if isinstance(found, _Class):
                return self._method(found, name) or self._few(name)
        return self._few(name)

    def _few(self, name: str) -> list[int]:
        named = [] if name in _OF_BUILTINS else self._named.get(name, [])
        return named if len(named) <= FEW else []

    def _as_functions(self, found: _Found) -> list[int]:
        if isinstance(found, _Class):
            return [number for name in _MADE_BY for number in self._method(found, name)]
        return found if isinstance(found, list) else []

    def _meant(self, function: Function, name: str) -> _Found | None:
        """What a name means in a function."""
        if name in function.imports:
            return self._imported(*function.imports[name], frozenset())
        return self._look_up(self._modules[function.module], name)

    def _look_up(
        self, module: _Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> _Found | None:
        """What a name means in a module, through whatever imports it comes; `seen` are the names
        whose meaning waits for this one."""
        if name in module.functions:
            return module.functions[name]
        if name in module.classes:
            return module.classes[name]
        if name in module.imports:
            return self._imported(*module.imports[name], seen)
        stars = (self._imported(star, name, seen) for star in module.stars)
        return next((found for found in stars if found is not None), None)

    def _imported(
        self, origin: str | None, name: str, seen: frozenset[tuple[str, str]]
    ) -> _Found | None:
        """What `name` of the module `origin` means; see `_Imports`."""
        if origin is None or (origin, name) in seen:
            return None
        if name and origin in self._modules:
            found = self._look_up(self._modules[origin], name, seen | {(origin, name)})
            if found is not None:
                return found
        return self._modules.get(".".join(part for part in (origin, name) if part))

    def _method(
        self, owner: _Class, name: str, above: bool = False, seen: tuple[int, ...] = ()
    ) -> list[int]:
        """A method of a class or, from left to right, of its bases; with `above` of bases alone."""
        if not above and name in owner.methods:
            return owner.methods[name]
        if id(owner) in seen:
            return []
        for base in owner.bases:
            found = self._look_up(owner.module, base)
            if isinstance(found, _Class):
                inherited = self._method(found, name, seen=(*seen, id(owner)))
                if inherited:
                    return inherited
        return []


class _Reader:
    """Reads one module into a program. The tree itself is not kept: 16 MB of source have several
    million nodes."""

    def __init__(self, program: Program, path: str) -> None:
        self._program, self._path = program, path
        parts = path.removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
            self._parent = parts
        else:
            self._parent = parts[:-1]
        self._name = ".".join(parts)
        self._module = program.module(self._name)

    def read(self, tree: ast.Module) -> None:
        self._define(tree.body, None, "")

    def _define(self, body: Iterable[ast.stmt], owner: _Class | None, called: str) -> None:
        """Take the functions, classes and imports of a block of a module or of the class `owner`,
        whose name is `called`."""
        for node in body:
            if isinstance(node, _Definition):
                self._program.add(self._function(node, called), self._module, owner)
            elif isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                name = f"{called}.{node.name}" if called else node.name
                own = self._module.classes.setdefault(name, _Class(self._module, bases))
                self._define(node.body, own, name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, self._module.imports, self._module.stars)
            else:
                self._define(_inner(node), owner, called)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Function:
        local, lines = set[str](), set[int]()
        imports: _Imports = {}
        calls: dict[tuple[str | None, str], None] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                if (call := _read_call(inner.func)) is not None:
                    calls[call] = None
            elif isinstance(inner, ast.arg):
                local.add(inner.arg)
            elif isinstance(inner, _Definition) and inner is not node:
                local.add(inner.name)
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                self._import(inner, imports, [])
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
        local.difference_update(_OWN)
        return Function(
            self._path,
            self._name,
            owner,
            node.name,
            min([node.lineno, *(mark.lineno for mark in node.decorator_list)]),
            node.end_lineno or node.lineno,
            imports,
            frozenset(lines),
            tuple(
                (("" if whose in local else whose), name)
                for whose, name in calls
                if whose is not None or name not in local
            ),
        )

    def _import(self, node: ast.Import | ast.ImportFrom, names: _Imports, stars: list[str]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = (self._within(whole), "")
            return
        origin = self._within(node.module or "")
        if node.level:
            kept = self._parent[: len(self._parent) - (node.level - 1)]
            origin = ".".join([*kept, *filter(None, [node.module])])
        for alias in node.names:
            if alias.name != "*":
                names[alias.asname or alias.name] = (origin, alias.name)
            elif origin is not None:
                stars.append(origin)

    def _within(self, dotted: str) -> str | None:
        """The name of a module within the package; None for a module of another one."""
        head, _, rest = dotted.partition(".")
        return rest if head == self._program.package else None


@contextmanager
def _cycles_left_alone() -> Iterator[None]:
    """Trees have many objects and no cycles: to look for some takes longer than to read them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_call(called: ast.expr) -> tuple[str | None, str] | None:
    """What is called, as in `Function.calls`; None where it has no name."""
    if isinstance(called, ast.Name):
        return None, called.id
    if not isinstance(called, ast.Attribute):
        return None
    whose = called.value
    if isinstance(whose, ast.Name):
        return whose.id, called.attr
    if (
        isinstance(whose, ast.Call)
        and isinstance(whose.func, ast.Name)
        and whose.func.id == "super"
    ):
        return _SUPER, called.attr
    return "", called.attr


def _inner(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements in the blocks of an `if`, a `try` or a `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler):
            yield from child.body
