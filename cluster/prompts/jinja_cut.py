"""Rewrites a Jinja2 template so that rendering stops where it first depends on a tainted variable.

Whatever a template has put out before it mentions a variable, in a value, a condition or a loop, cannot depend on it.
The rewritten template calls `__cut__()` at every such place that execution can reach. Runs in the sandbox process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jinja2 import nodes

CUT_FUNCTION = "__cut__"


class CutReachedError(Exception):
    """Raised by `__cut__()`; what was put out before is untainted."""


def cut_at(template: nodes.Template, tainted: frozenset[str]) -> nodes.Template:
    """A template that ends at the first dependence on `tainted`. Errs on the side of ending too early."""
    tainted = _closure(template, tainted)
    rewritten = nodes.Template(_cut_body(template.body, tainted), lineno=1)
    assert template.environment is not None
    return rewritten.set_environment(template.environment)  # type: ignore[return-value]


def _closure(template: nodes.Template, tainted: frozenset[str]) -> frozenset[str]:
    """Adds names that are assigned from tainted ones, and macros that mention them, until nothing changes."""
    while True:
        grown = tainted | {
            name
            for kind in (nodes.Assign, nodes.AssignBlock, nodes.Macro)
            for statement in template.find_all(kind)
            if _mentions(statement, tainted)
            for name in _defined_names(statement)
        }
        if grown == tainted:
            return tainted
        tainted = frozenset(grown)


def _defined_names(statement: nodes.Node) -> Iterator[str]:
    if isinstance(statement, nodes.Macro):
        yield statement.name
        return
    assert isinstance(statement, nodes.Assign | nodes.AssignBlock)
    for node in (statement.target, *statement.target.find_all((nodes.Name, nodes.NSRef))):
        if isinstance(node, nodes.Name | nodes.NSRef):
            yield node.name


def _mentions(node: nodes.Node, tainted: frozenset[str]) -> bool:
    if isinstance(node, nodes.Name | nodes.NSRef) and node.name in tainted:
        return True
    return any(_mentions(child, tainted) for child in node.iter_child_nodes())


def _cut_body(body: Sequence[nodes.Node], tainted: frozenset[str]) -> list[nodes.Node]:
    kept: list[nodes.Node] = []
    for node in body:
        if not _mentions(node, tainted):
            kept.append(node)
            continue
        replacement, is_end = _cut_statement(node, tainted)
        kept += replacement
        if is_end:
            break
    return kept


def _cut_statement(node: nodes.Node, tainted: frozenset[str]) -> tuple[list[nodes.Node], bool]:
    """What stands in for a statement that mentions a tainted name, and whether nothing after it can run."""
    match node:
        case nodes.Assign() | nodes.AssignBlock() | nodes.Macro():
            return [], False  # puts out nothing; what it defines is tainted itself
        case nodes.Output():
            clean = []
            for part in node.nodes:
                if _mentions(part, tainted):
                    break
                clean.append(part)
            return [nodes.Output(clean, lineno=node.lineno), _cut(node.lineno)], True
        case nodes.If() if not _mentions(node.test, tainted):
            return [_cut_if(node, tainted)], False
        case nodes.For() if not (_mentions(node.iter, tainted) or (node.test and _mentions(node.test, tainted))):
            loop = nodes.For(
                node.target,
                node.iter,
                _cut_body(node.body, tainted),
                _cut_body(node.else_, tainted),
                node.test,
                node.recursive,
                lineno=node.lineno,
            )
            return [loop], False
        case _:
            return [_cut(node.lineno)], True


def _cut_if(node: nodes.If, tainted: frozenset[str]) -> nodes.If:
    branches: list[nodes.If] = []
    otherwise = _cut_body(node.else_, tainted)
    for branch in node.elif_:
        if _mentions(branch.test, tainted):
            otherwise = [_cut(branch.lineno)]
            break
        branches.append(nodes.If(branch.test, _cut_body(branch.body, tainted), [], [], lineno=branch.lineno))
    return nodes.If(node.test, _cut_body(node.body, tainted), branches, otherwise, lineno=node.lineno)


def _cut(lineno: int) -> nodes.Output:
    call = nodes.Call(nodes.Name(CUT_FUNCTION, "load"), [], [], None, None)
    return nodes.Output([call], lineno=lineno).set_lineno(lineno)  # type: ignore[return-value]
