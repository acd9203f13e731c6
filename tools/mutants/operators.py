"""What may be changed in a source file: small edits of its text, found in its syntax tree.

An edit replaces a span of bytes, so that every other line keeps its number and its comments. What only people
read is left alone: docstrings and other strings, annotations, what an exception or a warning is given, logging,
`__all__`, blocks for the type checker. So are `assert` and `zip(strict=...)`, which state what can't happen.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest

Edit = tuple[int, int, str]
"""Start and end of the replaced bytes, and the text that takes their place."""

SWAPPED: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
    "+": ("-",),
    "-": ("+",),
    "*": ("//",),
    "/": ("*",),
    "//": ("*",),
    "%": ("//",),
    "**": ("*",),
    "&": ("|",),
    "|": ("&",),
    "<<": (">>",),
    ">>": ("<<",),
    "and": ("or",),
    "or": ("and",),
}
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.And: "and",
    ast.Or: "or",
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
SYMMETRIC = {"min", "max", "minimum", "maximum", "add", "mul", "equal", "allclose", "gcd", "hypot", "logaddexp"}
UNREAD = {"warn", "debug", "info", "warning", "exception", "TypeVar", "NewType"}
"""Calls whose arguments are for people or for the type checker, beside those of exceptions."""


Lines = int
"""A set of lines: bit `n` is set for line `n`."""

IMPORTED: Lines = 1
"""No line, but that the file is imported by name."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change in one file.

    `near` are lines that somebody runs who tests it, the nearest first: its statement, or those that read the constant
    that it may change; its function; the classes around that; the file, and who imports it by name. Lines that run at
    import aren't among them, since everybody runs those. A mutant `at_import` stands in no function's body.
    """

    path: str
    line: int
    near: tuple[Lines, ...]
    at_import: bool
    kind: str
    edit: Edit

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it from every other mutant of this tree."""
        return self.path, self.edit[0], self.edit[2]

    def apply(self, source: bytes) -> bytes:
        """The file with the change in it."""
        start, end, text = self.edit
        return source[:start] + text.encode() + source[end:]

    def is_real(self, source: bytes) -> bool:
        """Whether the changed file is Python, and another program than before."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def difference(self, source: bytes) -> tuple[str, str]:
        """The first line that differs, before and after, without its indentation."""
        before, after = source.decode().splitlines(), self.apply(source).decode().splitlines()
        return next((old.strip(), new.strip()) for old, new in zip_longest(before, after, fillvalue="") if old != new)


def find(source: bytes, path: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its syntax tree. Some may not be real."""
    tree, text = ast.parse(source), _Text(source)
    bodies, uses = _bodies(tree), _uses(tree)
    for node, within, at_import in _live(tree, (lines_between(1, len(source.splitlines())),), at_import=True):
        own = uses.get(node.lineno, 0) if at_import else within[0]
        *inner, file = (lines & bodies for lines in (own, *within[1:]))
        near = (*inner, file | IMPORTED)
        for kind, edit in _edits(node, text):
            yield Mutant(path=path, line=node.lineno, near=near, at_import=at_import, kind=kind, edit=edit)


def lines_between(first: int, last: int) -> Lines:
    """The lines from the first to the last."""
    return (1 << (last + 1)) - (1 << first)


def _bodies(tree: ast.Module) -> Lines:
    """The lines in functions."""
    bodies = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            bodies |= lines_between(node.body[0].lineno, node.end_lineno or 0)
    return bodies


def _uses(tree: ast.Module) -> dict[int, Lines]:
    """For each line with an assignment to a name, the lines that read the name."""
    read: dict[str, Lines] = defaultdict(int)
    assigned: dict[int, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
                read[_name(node)] |= 1 << node.lineno
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                assigned |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), name)
    return {line: read[name] for line, name in assigned.items()}


class _Text:
    """A source by the positions of its nodes."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def between(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.between(self.start(node), self.end(node))

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return self.start(node), self.end(node), text


# ------------------------------------------------------------------------------- what may be touched


def _live(
    node: ast.AST, within: tuple[Lines, ...], *, at_import: bool
) -> Iterator[tuple[ast.expr | ast.stmt, tuple[Lines, ...], bool]]:
    """Nodes that run and that a program depends on, with the lines they stand in and whether they run at import.

    The lines are those of the statement, or of its head where it has a body; of the functions and the classes around
    it; of the file.
    """
    for child in _children(node):
        if isinstance(child, ast.stmt):
            outer = within if isinstance(node, ast.Module) else within[1:]  # without the head of what it stands in
            body, end = getattr(child, "body", None), child.end_lineno or 0
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                outer = (lines_between(child.lineno, end), *outer)
            head = lines_between(child.lineno, max(child.lineno, body[0].lineno - 1) if body else end)
            runs = at_import and not isinstance(node, ast.FunctionDef)
            yield child, (head, *outer), runs
            yield from _live(child, (head, *outer), at_import=runs)
        else:
            if isinstance(child, ast.expr):
                yield child, within, at_import
            yield from _live(child, within, at_import=at_import)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.Global() | ast.Nonlocal():
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (*node.decorator_list, *node.args.defaults)
            yield from (default for default in node.args.kw_defaults if default is not None)
            yield from node.body
        case ast.AnnAssign():
            if node.value is not None and not _is_alias(node.annotation):
                yield node.value
        case ast.Assign(targets=[ast.Name(id="msg" | "message" | "__all__")]):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield from node.orelse
        case ast.Call(func=func) if _is_unread(_name(func)):
            return
        case ast.Call(func=ast.Name(id="zip")):
            yield from (*node.args, *(k for k in node.keywords if k.arg != "strict"))
        case _:
            yield from ast.iter_child_nodes(node)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_unread(name: str) -> bool:
    return name in UNREAD or name.endswith(("Error", "Exception", "Warning"))


def _is_alias(annotation: ast.expr) -> bool:
    return _name(annotation) == "TypeAlias"


# ----------------------------------------------------------------------------------------- the edits


def _edits(node: ast.expr | ast.stmt, text: _Text) -> Iterator[tuple[str, Edit]]:
    for edits in (_operators, _constants, _calls_and_slices, _conditions, _statements):
        yield from edits(node, text)


def _operators(node: ast.AST, text: _Text) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
            for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
                yield from _swap_operator("comparison", operator, text.end(left), text.start(right), text)
        case ast.BinOp():
            yield from _swap_operator("arithmetic", node.op, text.end(node.left), text.start(node.right), text)
        case ast.BoolOp():
            for left, right in pairwise(node.values):
                yield from _swap_operator("and/or", node.op, text.end(left), text.start(right), text)
        case ast.UnaryOp(op=ast.Not()):
            gap = text.between(text.start(node), text.start(node.operand)).removeprefix("not").lstrip()
            yield "not", (text.start(node), text.start(node.operand), gap)


def _swap_operator(kind: str, operator: ast.AST, start: int, end: int, text: _Text) -> Iterator[tuple[str, Edit]]:
    symbol, gap = SYMBOLS.get(type(operator), ""), text.between(start, end)
    for other in SWAPPED.get(symbol, ()):
        yield kind, (start, end, gap.replace(symbol, other, 1))


def _constants(node: ast.AST, text: _Text) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "boolean", text.replace(node, str(not value))
        case ast.Constant(value=int(value)):
            yield "off by one", text.replace(node, str(value + 1))
            if value > 0:
                yield "off by one", text.replace(node, str(value - 1))


def _calls_and_slices(node: ast.AST, text: _Text) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Slice():
            yield from (("slice", text.replace(bound, "")) for bound in (node.lower, node.upper) if bound is not None)
        case ast.Call() if not _is_unread(_name(node.func)):
            name, end = _name(node.func), text.end(node.func)
            if name in OPPOSITE:
                yield "min/max", (end - len(name), end, OPPOSITE[name])
            for left, right in pairwise(node.args if name not in SYMMETRIC else ()):
                if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                    gap = text.between(text.end(left), text.start(right))
                    yield "swapped arguments", (text.start(left), text.end(right), text.of(right) + gap + text.of(left))


def _conditions(node: ast.AST, text: _Text) -> Iterator[tuple[str, Edit]]:
    tests: list[ast.expr] = []
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If() | ast.While() | ast.IfExp():
            tests = [node.test]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            tests = [test for clause in node.generators for test in clause.ifs]
    for test in tests:
        # A lone comparison has its opposite among its own mutants, `not x` and `True` have theirs.
        is_covered = (isinstance(test, ast.Compare) and len(test.ops) == 1) or isinstance(test, ast.Constant)
        if not is_covered and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield "not", text.replace(test, f"not ({text.of(test)})")


def _statements(node: ast.AST, text: _Text) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.AugAssign():
            symbol = SYMBOLS[type(node.op)]
            start, end = text.end(node.target), text.start(node.value)
            gap = text.between(start, end)
            yield "arithmetic", (start, end, gap.replace(f"{symbol}=", f"{SWAPPED[symbol][0]}=", 1))
            yield "dropped", text.replace(node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped", text.replace(node, "pass")
        case ast.Expr(value=ast.Call(func=func)) if _name(func) not in UNREAD - {"warn"}:
            yield "dropped", text.replace(node, "pass")
        case ast.If(orelse=[], body=[*before, ast.Raise()]) if all(isinstance(s, ast.Assign) for s in before):
            yield "dropped guard", text.replace(node, "pass")
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "returns None", text.replace(value, "None")
