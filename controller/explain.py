"""Plans and programs as text: the one table that all of them print, and a program's nodes in it.

Owns how they look. Must not know what plans or nodes mean beyond their fields. Pure. Called by `transfer_plan`, the client's
programs and `waypath plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waypath.controller.graph import Program
from waypath.controller.nodes import Node, Pool

GAP = "  "


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    """Returns the lines of a table, as wide as its cells; columns in `numbers` are set to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for row in (headings, *rows):
        cells = [
            cell.rjust(width) if k in numbers else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(GAP.join(cells).rstrip())
    return lines


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns lines of a name and a text each, the texts below each other."""
    return table(pairs[0], pairs[1:]) if pairs else []


def program_rows(program: Program, members: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str, str]]:
    """Node ids, what they call, where they run, and what they read; nodes that differ in nothing but their number share a row.

    `members` are the workers of each slice and pool: all of a slice run a node, one of a pool does.
    """
    alike: dict[tuple[str, str, str], list[Node]] = {}
    for node in program.nodes:
        alike.setdefault((f"{node.service} {node.kind}", node.method, str(node.place)), []).append(node)
    label = {node.node_id: _label(nodes) for nodes in alike.values() for node in nodes}
    rows = []
    for nodes in alike.values():
        first = nodes[0]
        call = f"{first.service}.{first.method}" if first.service else f"{first.kind} {first.method}"
        at = members.get(first.place.name, ())
        where = ", ".join(at) or str(first.place)
        if isinstance(first.place, Pool) and len(at) > 1:
            where = f"one of {where}"
        reads = ", ".join(dict.fromkeys(label.get(name, name) for node in nodes for name in node.inputs))
        if len(nodes) > 1 and reads and all(len(node.inputs) == 1 for node in nodes):
            reads += ", one each"
        rows.append((label[first.node_id], call, where, reads or "–"))
    return rows


def explain_program(program: Program, members: Mapping[str, Sequence[str]]) -> str:
    """Returns a program as a table of its nodes."""
    return "\n".join(table(("node", "call", "runs on", "reads"), program_rows(program, members)))


def _label(nodes: Sequence[Node]) -> str:
    ids = [node.node_id for node in nodes]
    return ids[0] if len(ids) == 1 else f"{ids[0]} … {ids[-1]}" if len(ids) > 2 else ", ".join(ids)
