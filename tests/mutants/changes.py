"""Small changes of a program, each of which a test should notice.

A change has a name that survives edits elsewhere in the file: module, function, the piece of code and what becomes of
it, and which of several equal pieces it is. Line numbers are only shown.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One piece of code of one file, `[start, stop)` in its text, and what takes its place."""

    path: str
    line: int
    start: int
    stop: int
    new: str
    name: str

    def applied(self, text: str) -> str:
        """The changed file; the text is as UTF-8 counts it."""
        raw = text.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.stop :]).decode()


_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
_NAMES = {
    "all": "any", "any": "all", "max": "min", "min": "max", "ceil": "floor", "floor": "ceil", "amax": "amin",
    "amin": "amax", "argmax": "argmin", "argmin": "argmax", "sqrt": "abs", "log1p": "log", "expm1": "exp",
    "upper": "lower", "lower": "upper", "maximum": "minimum", "minimum": "maximum",
}  # fmt: skip


def changes_of(path: Path, shown: str) -> list[Change]:
    """Every change of a file, in the order of its text. Types, documentation and messages stay as they are."""
    text = path.read_text(encoding="utf-8")
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    raw = text.encode()
    found: list[Change] = []
    seen: Counter[str] = Counter()

    def place(line: int, column: int) -> int:
        return lines[line - 1] + column

    def span(node: ast.AST) -> tuple[int, int]:
        stop = place(node.end_lineno or 0, node.end_col_offset or 0)  # type: ignore[attr-defined]
        return place(node.lineno, node.col_offset), stop  # type: ignore[attr-defined]

    def add(owner: str, node: ast.AST, start: int, stop: int, new: str) -> None:
        old = raw[start:stop].decode()
        around = " ".join(raw[slice(*span(node))].decode().split())
        what = f"{shown} {owner}: {old.strip()} -> {new.strip() or 'nothing'} in {around}"
        seen[what] += 1
        name = what if seen[what] == 1 else f"{what} (number {seen[what]})"
        found.append(Change(shown, node.lineno, start, stop, new, name))  # type: ignore[attr-defined]

    for owner, node in _walk(ast.parse(text)):
        for start, stop, new in _of_node(node, span, raw):
            add(owner, node, start, stop, new)
    return found


def _walk(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Nodes with the function they are in; no annotations, no docstrings, no arguments of exceptions."""

    def visit(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            owner = f"{owner}.{node.name}".lstrip(".")
        yield owner or "module", node
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_text(child):
                    yield from visit(child, owner)

    yield from visit(tree, "")


def _is_for_types(test: ast.expr) -> bool:
    """Whether a branch is never run, but read by those who check types."""
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


Span = Callable[[ast.AST], tuple[int, int]]


def _of_node(node: ast.AST, span: Span, raw: bytes) -> Iterator[tuple[int, int, str]]:
    """Where a node may be changed, and into what."""
    if isinstance(node, ast.Compare):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in _COMPARISONS:
                yield *_between(span(left)[1], span(right)[0], raw), f" {_COMPARISONS[type(operator)]} "
            left = right
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield *_between(span(node.left)[1], span(node.right)[0], raw), f" {_ARITHMETIC[type(node.op)]} "
    elif isinstance(node, ast.BoolOp):
        new = " or " if isinstance(node.op, ast.And) else " and "
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield *_between(span(left)[1], span(right)[0], raw), new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        start = span(node)[0]
        yield start, start + (3 if isinstance(node.op, ast.Not) else 1), ""
    elif isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes, type(None), type(...))):
        yield *span(node), _constant(node.value)
    elif isinstance(node, ast.Call):
        yield from _renamed(node.func, span)
    elif isinstance(node, (ast.Raise, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield *span(node), "pass"
    elif isinstance(node, ast.If) and not isinstance(node.test, ast.BoolOp) and not _is_for_types(node.test):
        yield *span(node.test), "False"


def _constant(value: complex) -> str:
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1) if isinstance(value, int) or not value else f"({value!r} * 10)"


def _renamed(function: ast.expr, span: Span) -> Iterator[tuple[int, int, str]]:
    if isinstance(function, ast.Name) and function.id in _NAMES:
        yield *span(function), _NAMES[function.id]
    elif isinstance(function, ast.Attribute) and function.attr in _NAMES:
        stop = span(function)[1]
        yield stop - len(function.attr), stop, _NAMES[function.attr]


def _between(start: int, stop: int, raw: bytes) -> tuple[int, int]:
    """The operator between two operands, without brackets that belong to them."""
    while start < stop and raw[start : start + 1] in b") \n":
        start += 1
    while stop > start and raw[stop - 1 : stop] in b"( \n":
        stop -= 1
    return start, stop
