"""What a mutant does to the package, and where: a clause of a function, found by syntax tree.

A **place** is the dotted end of a function's, class's or constant's name (``Claim.check``, ``claim.check``,
``ERROR_ACTIONS``), so that files can move. A **clause** is an expression or some statements, compared as syntax: line
breaks, comments and brackets do not count. In it

* ``...`` stands for any expression, any run of arguments (of keywords, too) or any run of statements (and ``else``),
* ``{key: value}`` stands for a dictionary that has this entry among others.

A clause that is not there as it is written may have other names for its variables, if only one place of the function is
like that. It is looked for nowhere else: the same clause of another function may keep another rule.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

#: what a ``...`` takes along, where the clause itself has none
_TAKEN_ALONG = ("keywords", "orelse", "handlers", "finalbody")
_WITHOUT_MEANING = ("ctx", "type_comment", "kind")


@dataclass(frozen=True, slots=True)
class Change:
    """A clause and what stands there instead.

    :param by: None: nothing. The names and the ``...`` in it are those of the clause.
    :param text: both are parts of a string, not syntax.
    """

    clause: str
    by: str | None
    text: bool = False


def never(clause: str) -> Change:
    """The condition is not fulfilled."""
    return Change(clause, "False")


def always(clause: str) -> Change:
    """The condition is fulfilled."""
    return Change(clause, "True")


def drop(clause: str) -> Change:
    """Without the statements, the operand of ``and`` and ``or``, the argument or the element."""
    return Change(clause, None)


def swap(clause: str, by: str) -> Change:
    return Change(clause, by)


def text(old: str, new: str) -> Change:
    """Another text within one string, such as a query."""
    return Change(old, new, text=True)


class Gone(AssertionError):
    """The clause is nowhere, or at several places."""


@dataclass(slots=True)
class _Taken:
    """What the clause's ``...`` and variables stand for.

    :param local: the variables of the function; None: names are compared as they are written.
    """

    local: frozenset[str] | None = None
    holes: list[tuple[Any, dict[str, list[Any]]]] = field(default_factory=list)
    variables: dict[str, ast.expr] = field(default_factory=dict)
    kept: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    """``count`` nodes from ``index`` on of a list, or the node that a field has (index -1)."""

    path: Path
    parent: ast.AST
    field: str
    index: int
    count: int
    taken: _Taken


def mutated(package: Path, place: str, change: Change) -> tuple[Path, str]:
    """The file and its source with the change (without comments).

    :raises Gone: saying why.
    """
    found = _find(package, place, change)
    tree = _trees(package)[found.path]
    old = getattr(found.parent, found.field)
    new: Any = _text_replaced(old, change) if change.text else _replacement(change, found)
    if found.index >= 0 and not change.text:
        new = [*old[: found.index], *new, *old[found.index + found.count :]]
        if not new and found.field == "body":
            new = [ast.Pass()]
    setattr(found.parent, found.field, new)
    try:
        return found.path, ast.unparse(tree) + "\n"
    finally:
        setattr(found.parent, found.field, old)


# ------------------------------------------------------------------ places


@cache
def _trees(package: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


@cache
def _places(package: Path) -> dict[str, list[tuple[tuple[str, ...], Path, ast.AST]]]:
    """What has a name on the first level of a module or of a class: by its name, with its dotted one."""
    found: dict[str, list[tuple[tuple[str, ...], Path, ast.AST]]] = {}
    for path, tree in _trees(package).items():
        module = tuple(part for part in path.relative_to(package).with_suffix("").parts if part != "__init__")
        for name, node in _named(tree, module):
            found.setdefault(name[-1], []).append((name, path, node))
    return found


def _named(tree: ast.AST, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef():
                yield (*before, node.name), node
                yield from _named(node, (*before, node.name))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield (*before, node.name), node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield (*before, name), node
            case ast.If() | ast.Try() | ast.With():
                yield from _named(node, before)


def ending(package: Path, place: tuple[str, ...]) -> list[tuple[Path, ast.AST]]:
    """What has a dotted name with this end."""
    named = _places(package).get(place[-1], ())
    return [(path, node) for name, path, node in named if name[-len(place) :] == place]


def _find(package: Path, place: str, change: Change) -> _Found:
    parts = tuple(place.split("."))
    for begin in range(len(parts)):
        scopes = ending(package, parts[begin:])
        for renamed in (False, True):
            if found := _only([each for path, node in scopes for each in _matches(path, node, change, renamed)], place):
                return found
    raise Gone(f"{place} has no clause like this any more: {change.clause}")


def _only(found: list[_Found], place: str) -> _Found | None:
    if len(found) > 1:
        raise Gone(f"this clause of {place} stands at several places: {', '.join(str(each.path) for each in found)}")
    return found[0] if found else None


# ------------------------------------------------------------------ clauses


@cache
def _parsed(code: str, statements: bool) -> ast.expr | list[ast.stmt]:
    if not statements:
        with contextlib.suppress(SyntaxError):
            # an element with a star is no expression by itself
            elements = ast.parse(f"[\n{code}\n]", mode="eval").body
            if isinstance(elements, ast.List) and len(elements.elts) == 1:
                return elements.elts[0]
    return ast.parse(code).body


def _is_expression(code: str | None) -> bool:
    return code is None or isinstance(_parsed(code, False), ast.expr)


def _clause(change: Change) -> ast.expr | list[ast.stmt]:
    return _parsed(change.clause, not _is_expression(change.by))


def _matches(path: Path, scope: ast.AST, change: Change, renamed: bool) -> Iterator[_Found]:
    if change.text:
        yield from () if renamed else _texts(path, scope, change.clause)
        return
    pattern = _clause(change)
    local = _locals(scope) if renamed else None
    tried: Iterable[tuple[int, int, list[Any], list[Any]]]
    for parent in ast.walk(scope):
        for name, value in ast.iter_fields(parent):
            if isinstance(pattern, list):
                runs = range(len(value) - len(pattern) + 1) if isinstance(value, list) else ()
                tried = ((i, len(pattern), pattern, value[i : i + len(pattern)]) for i in runs)
            elif isinstance(value, list):
                # to be dropped: an expression that is a whole statement, too
                plain = [each.value if change.by is None and isinstance(each, ast.Expr) else each for each in value]
                tried = ((i, 1, [pattern], [each]) for i, each in enumerate(plain))
            elif change.by is None:
                continue
            else:
                tried = [(-1, 1, [pattern], [value])]
            for index, count, wanted, nodes in tried:
                taken = _Taken(local)
                if _same_each(wanted, nodes, taken) and (local is None or taken.kept):
                    yield _Found(path, parent, name, index, count, taken)


def _texts(path: Path, scope: ast.AST, wanted: str) -> Iterator[_Found]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for _ in range(node.value.count(wanted)):
                yield _Found(path, node, "value", -1, 1, _Taken())


def _locals(scope: ast.AST) -> frozenset[str]:
    names = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(names | {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)})


def _is_hole(node: Any) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _same_each(patterns: list[Any], nodes: list[Any], taken: _Taken) -> bool:
    return len(patterns) == len(nodes) and all(_same(*pair, taken) for pair in zip(patterns, nodes, strict=True))


def _same(pattern: Any, node: Any, taken: _Taken) -> bool:
    if _is_hole(pattern) and isinstance(node, ast.expr):
        taken.holes.append((node, {}))
        return True
    if _is_variable(pattern) and taken.local is not None and _is_chain(node, taken.local):
        key, known = ast.unparse(pattern), ast.unparse(node)
        others = [ast.unparse(other) for name, other in taken.variables.items() if name != key]
        return ast.unparse(taken.variables.setdefault(key, node)) == known and known not in others
    if not isinstance(pattern, ast.AST):
        taken.kept += isinstance(pattern, str)
        return type(pattern) is type(node) and bool(pattern == node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Dict) and isinstance(node, ast.Dict) and all(pattern.keys):
        return _has_entries(pattern, node, taken)
    along: set[str] = set()
    for name in pattern._fields:
        if name in _WITHOUT_MEANING or name in along:
            continue
        mine, theirs = getattr(pattern, name), getattr(node, name)
        if isinstance(mine, list):
            if any(map(_is_hole, mine)):
                along = {each for each in _TAKEN_ALONG if getattr(pattern, each, None) == []}
            if not _same_run(mine, theirs, taken, {each: getattr(node, each) for each in along}):
                return False
        elif not _same(mine, theirs, taken):
            return False
    return True


def _same_run(patterns: list[Any], nodes: list[Any], taken: _Taken, along: dict[str, list[Any]]) -> bool:
    hole = next((i for i, each in enumerate(patterns) if _is_hole(each)), None)
    if hole is None:
        return _same_each(patterns, nodes, taken)
    after = len(patterns) - hole - 1
    if len(nodes) < hole + after or not _same_each(patterns[:hole], nodes[:hole], taken):
        return False
    taken.holes.append((nodes[hole : len(nodes) - after], along))
    return _same_each(patterns[hole + 1 :], nodes[len(nodes) - after :], taken)


def _has_entries(pattern: ast.Dict, node: ast.Dict, taken: _Taken) -> bool:
    theirs = _entries(node)
    mine = _entries(pattern)
    if not all(key in theirs and _same(value, theirs[key], taken) for key, value in mine.items()):
        return False
    taken.holes.append((node, {"keys": [*mine]}))
    return True


def _entries(node: ast.Dict) -> dict[str, ast.expr]:
    return {ast.unparse(key) if key else "": value for key, value in zip(node.keys, node.values, strict=True)}


def _is_variable(node: Any) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id[:1].islower() and node.id != "self" and not hasattr(builtins, node.id)


def _is_chain(node: Any, local: frozenset[str]) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in local


# ------------------------------------------------------------------ what stands there instead


def _replacement(change: Change, found: _Found) -> Any:
    if change.by is None:
        return []
    by = copy.deepcopy(_parsed(change.by, isinstance(_clause(change), list)))
    filler = _Filler(found.taken)
    if isinstance(by, list):
        return filler.each(by, {})
    filled = filler.node(by)
    return filled if found.index < 0 else [filled]


class _Filler:
    """Puts in what was taken."""

    def __init__(self, taken: _Taken) -> None:
        self._holes, self._variables = iter(taken.holes), taken.variables

    def node(self, node: Any) -> Any:
        if _is_hole(node):
            return next(self._holes)[0]
        if _is_variable(node) and (known := self._variables.get(ast.unparse(node))) is not None:
            return known
        if isinstance(node, ast.Dict) and all(node.keys):
            return self._entries(node)
        along: dict[str, list[Any]] = {}
        for name, value in ast.iter_fields(node) if isinstance(node, ast.AST) else ():
            if isinstance(value, list):
                setattr(node, name, along.get(name) or self.each(value, along))
            else:
                setattr(node, name, self.node(value))
        return node

    def each(self, nodes: list[Any], along: dict[str, list[Any]]) -> list[Any]:
        out: list[Any] = []
        for node in nodes:
            if _is_hole(node):
                taken, others = next(self._holes)
                out += taken if isinstance(taken, list) else [taken]
                along.update(others)
            else:
                out.append(self.node(node))
        return out

    def _entries(self, node: ast.Dict) -> ast.expr:
        """The dictionary that was found, with this one's entries instead of the clause's."""
        whole, along = next(self._holes, (None, {}))
        if not isinstance(whole, ast.Dict):
            return node
        values = {key: value for key, value in _entries(whole).items() if key not in along["keys"]} | _entries(node)
        kept = [(key, values[name]) for key, name in zip(whole.keys, _entries(whole), strict=True) if name in values]
        return ast.Dict([key for key, _ in kept], [value for _, value in kept])


def _text_replaced(old: str, change: Change) -> str:
    return old.replace(change.clause, change.by or "")
