"""The plans of a pass as arrays for the kernels."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from foretoken.models.runners.native.bindings import ReplaySpec
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.replay import ReplayPlan


def replay_pointer(plan: ReplayPlan) -> Any:
    """Returns a pointer to a plan's arrays, which must outlive it."""
    names = [field[0] for field in ReplaySpec._fields_ if field[1] is ctypes.c_void_p]
    places = {name: getattr(plan, name).buffer_info()[0] for name in names}
    counts = {"steps": len(plan.sources), "moves": len(plan.moved), "snapshot_count": len(plan.snapshots)}
    return ctypes.pointer(ReplaySpec(**places, **counts, copies=plan.copies))


def pass_arrays(plan: PassPlan) -> dict[str, array[int]]:
    """Returns the plan's arrays for the kernels: tokens, positions, cache rows, and the keys each row attends to."""
    places, prefix, branch_from, branches = array("i"), array("i"), array("i", [0]), array("i")
    sequence_from = array("i", [0])
    for part in plan.parts:
        rows = range(part.first, part.end)
        places.extend(rows)
        if part.mutual:
            prefix.extend([part.end] * part.count)
            branch_from.extend([len(branches)] * part.count)
        elif part.draft.is_chain:
            prefix.extend(range(part.first + 1, part.end + 1))
            branch_from.extend([len(branches)] * part.count)
        else:
            _add_tree(part, prefix, branch_from, branches)
        sequence_from.append(len(places))
    return {
        "tokens": array("i", plan.tokens),
        "positions": array("i", plan.positions),
        "places": places,
        "prefix": prefix,
        "branch_from": branch_from,
        "branches": branches,
        "sequence_from": sequence_from,
        "outputs": array("i", plan.outputs),
    }


def _add_tree(part: Part, prefix: array[int], branch_from: array[int], branches: array[int]) -> None:
    """Adds a tree's rows, which attend to the committed rows and to their ancestors."""
    for place in range(part.first, part.end):
        node = place - part.nodes_at
        prefix.append(min(place + 1, part.nodes_at))
        if node >= 0:
            branches.extend(part.nodes_at + above for above in part.draft.path(node))
        branch_from.append(len(branches))
