"""Reads the text that ``--data`` names: files, folders, glob patterns, ``.jsonl``."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import Reason, UsageError

logger = logging.getLogger(__name__)

JSONL_SUFFIXES: Final = frozenset({".jsonl", ".ndjson"})

TEXT_SUFFIXES: Final = JSONL_SUFFIXES | {
    ".adoc",
    ".htm",
    ".html",
    ".markdown",
    ".md",
    ".org",
    ".py",
    ".rst",
    ".tex",
    ".text",
    ".txt",
}
"""What a folder is searched for; a file named outright is read whatever its suffix."""

_PIECE_CHARACTERS = 1 << 20


def find_files(sources: Sequence[str]) -> list[Path]:
    """Lists the files that the sources name, each once, in a deterministic order.

    Args:
        sources: paths of files or folders (searched recursively), or glob patterns (``**`` is
            any depth). Sources keep their order; within one, files are sorted by path.

    Raises:
        UsageError: DATA_MISSING for a source that names nothing, DATA_EMPTY for a folder
            without text files.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        try:
            for path in _files_of(source):
                found.setdefault(path.resolve(), path)
        except OSError as error:
            raise UsageError(
                Reason.DATA_MISSING,
                f"data source {source} cannot be read: {error.strerror} ({error.filename}); "
                "check the path and its permissions",
                path=source,
            ) from error
    return list(found.values())


def _files_of(source: str) -> list[Path]:
    if not source:
        raise UsageError(
            Reason.DATA_MISSING, "a data source is empty; give text files, folders or patterns"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _files_under(path)
    if path.is_file():
        return [path]
    if path.exists():
        raise UsageError(
            Reason.DATA_MISSING,
            f"data source {source} is neither a file nor a folder; give text files or folders",
            path=source,
        )
    if glob.has_magic(source):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if files:
            return files
        raise UsageError(
            Reason.DATA_MISSING,
            f"pattern {source} matches no file; quote it, and check it with ls",
            path=source,
        )
    raise UsageError(
        Reason.DATA_MISSING,
        f"data source {source} does not exist; check the path",
        path=source,
    )


def _files_under(folder: Path) -> list[Path]:
    found, num_others = [], 0
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith(".") or not path.is_file():
                continue
            if path.suffix.lower() in TEXT_SUFFIXES:
                found.append(path)
            else:
                num_others += 1
    if not found:
        raise UsageError(
            Reason.DATA_EMPTY,
            f"folder {folder} holds no text file among {num_others} files (text is "
            f"{' '.join(sorted(TEXT_SUFFIXES))}); name other files outright or by a pattern",
            path=folder,
        )
    if num_others:
        logger.info("data folder %s: %d files of other suffixes skipped", folder, num_others)
    return found


def _raise(error: OSError) -> None:
    raise error


def read_pieces(path: Path, *, text_field: str = "text") -> Iterator[str]:
    r"""Yields the text of a file in pieces that fit into memory.

    A plain file comes in pieces of about a million characters, a ``.jsonl`` file as the texts
    of its records, each ended by a blank line. Line ends become ``\n``.

    Args:
        path: the file.
        text_field: the field of a JSON record that holds the text.

    Raises:
        UsageError: DATA_MISSING when the file cannot be read, DATA_BINARY for NUL bytes, for
            what is not UTF-8, and for a ``.jsonl`` line that is not a JSON object, DATA_EMPTY
            for a record without the text field.
    """
    is_jsonl = path.suffix.lower() in JSONL_SUFFIXES
    try:
        with path.open(encoding="utf-8-sig") as file:
            if is_jsonl:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _without_nul(path, _record_text(path, number, line, text_field))
            else:
                while piece := file.read(_PIECE_CHARACTERS):
                    yield _without_nul(path, piece)
    except UnicodeDecodeError as error:
        raise _binary(path, f"byte 0x{error.object[error.start]:02x} is not UTF-8") from error
    except OSError as error:
        raise UsageError(
            Reason.DATA_MISSING,
            f"data file {path} cannot be read: {error.strerror}; check its permissions",
            path=path,
        ) from error


def _without_nul(path: Path, text: str) -> str:
    if "\0" in text:
        raise _binary(path, "it holds NUL bytes")
    return text


def _binary(path: Path, why: str) -> UsageError:
    return UsageError(
        Reason.DATA_BINARY,
        f"data file {path} is not text: {why}; remove it from the sources or convert it to UTF-8",
        path=path,
    )


def _record_text(path: Path, number: int, line: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _not_a_record(path, number, f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _not_a_record(path, number, "is not a JSON object")
    text = record.get(text_field)
    if not isinstance(text, str):
        fields = ", ".join(sorted(record)) or "none"
        raise UsageError(
            Reason.DATA_EMPTY,
            f"line {number} of {path} has no text in field '{text_field}' (fields: {fields}); "
            "name the field that holds the text",
            path=path,
            line=number,
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _not_a_record(path, number, "holds half a surrogate pair") from error
    return f"{text}\n\n"


def _not_a_record(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        Reason.DATA_BINARY,
        f"line {number} of {path} {why}; a .jsonl file has one JSON object per line",
        path=path,
        line=number,
    )
