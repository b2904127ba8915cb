"""Draft trees with repeated tokens, in which only the parent distinguishes some nodes."""

from collections.abc import Sequence

from foretoken.core.draft import Draft


def repeating(parents: Sequence[int], first: int = 5) -> Draft:
    """The tree of these parents. Siblings differ; a node's first child has the token of the node's next sibling.

    (-1, 0, -1) is 5, below it 6, and beside both another 6.
    """
    shape = Draft.tree([0] * len(parents), parents)
    ranks = [siblings.index(node) for node, siblings in enumerate(shape.children[p + 1] for p in shape.parents)]
    tokens = [first + rank + depth - 1 for rank, depth in zip(ranks, shape.depths, strict=True)]
    return Draft.tree(tokens, shape.parents)
