"""The default corpus: English text that every Python installation carries.

The topics of ``pydoc_data`` and the docstrings of the standard library, read from source files
with ``ast``; no module is imported, so nothing runs and the order is always the same.
"""

from __future__ import annotations

import ast
import inspect
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from decoupled_diloco.errors import Reason, UsageError

_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "idle_test",
        "lib-dynload",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_MIN_CHARACTERS = 40
"""Shorter docstrings ("See base class.") teach a model nothing."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_docs(folder: Path | None = None) -> Iterator[str]:
    """Yields the documents of the default corpus: one per topic, one per module.

    Args:
        folder: a standard library; that of this Python where None.

    Raises:
        UsageError: DATA_MISSING when this Python carries no sources.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"
    seen: set[str] = set()
    for path in [topics, *_modules(root)]:
        tree = _tree(path)
        if tree is None:
            continue
        texts = _topics(tree) if path == topics else _docstrings(tree)
        fresh = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(fresh)
        if path == topics:
            yield from fresh
        elif fresh:
            yield "\n\n".join(fresh)
    if not seen:
        raise UsageError(
            Reason.DATA_MISSING,
            f"the standard library at {root} carries no documentation sources; "
            "give your own text with --data",
            path=root,
        )


def _modules(root: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(("config-", "."))
        )
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def _tree(path: Path) -> ast.Module | None:
    """Parses a source file; None for what this Python cannot read or parse."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            values = (value.value for value in node.values if isinstance(value, ast.Constant))
            yield from (value.strip() for value in values if isinstance(value, str))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in _documented(tree):
        text = ast.get_docstring(node, clean=False)
        if text and len(text) >= _MIN_CHARACTERS:
            yield inspect.cleandoc(text)


def _documented(node: ast.AST) -> Iterator[_Documented]:
    """Yields what can have a docstring, in the order of the source; expressions are not entered."""
    if isinstance(node, _Documented):
        yield node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield from _documented(child)
