"""What contracts read of source files."""

import ast
from collections.abc import Iterator


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and all statements in it, without their expressions, which are nine of ten nodes.

    Args:
        tree: of a module, or of a part of one.
    """
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += (
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )
