"""Parses sources in a process in which other tests have left threads and finalizers behind."""

from __future__ import annotations

import ast
import gc


def parsed(text: str) -> ast.Module:
    """The syntax tree of a source.

    CPython 3.11 keeps the depth of the tree that it builds in one place per interpreter: whatever
    a collection of garbage runs in between (finalizers, other threads) may parse, too, and breaks
    it ("AST constructor recursion depth mismatch").
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
