"""The corpus of a run: tokens written once, read by every learner, known by its hash.

A corpus folder holds ``train.bin`` and ``held_out.bin`` (little-endian token ids),
``corpus.json`` (see ``CorpusInfo``) and, for a Hugging Face tokenizer, ``tokenizer.json``.
It appears whole or not at all. The hash covers tokens, tokenizer and format, not the paths.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.errors import Reason, UsageError
from learner_client.files import fsync_path, storage_errors
from learner_client.train.python_docs import python_docs
from learner_client.train.sources import find_files, read_pieces
from learner_client.train.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION: Final = 1
TRAIN_FILE: Final = "train.bin"
HELD_OUT_FILE: Final = "held_out.bin"
INFO_FILE: Final = "corpus.json"

_ALL_FILE = "all.tmp"
_HELD_OUT_PIECE = 4096
_MAX_HELD_OUT_PIECES = 64
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """What ``corpus.json`` holds.

    Attributes:
        hash: SHA-256 over format, tokenizer and all tokens; a setting of the run.
        num_tokens: tokens to train on.
        num_held_out_tokens: tokens kept for evaluation; never trained on.
        vocab_size: number of token ids.
        dtype: ``uint8``, ``uint16`` or ``uint32``, of both files.
        tokenizer: ``Tokenizer.name`` of what made the tokens.
        sources: where the text came from, for people.
        num_documents: files, or documents of the default corpus, read.
        format_version: of this folder's format.
    """

    hash: str
    num_tokens: int
    num_held_out_tokens: int
    vocab_size: int
    dtype: str
    tokenizer: str
    sources: tuple[str, ...]
    num_documents: int
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Returns the JSON text of ``corpus.json``."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """An opened corpus.

    Attributes:
        info: what is known about it.
        train: ``[num_tokens]`` token ids, a read-only memory map.
        held_out: ``[num_held_out_tokens]`` token ids, a read-only memory map.
        folder: where it lies.
    """

    info: CorpusInfo
    train: Tokens
    held_out: Tokens
    folder: Path

    def tokenizer(self) -> Tokenizer:
        """Rebuilds the tokenizer that made the tokens.

        Raises:
            UsageError: see ``load_tokenizer``.
        """
        return load_tokenizer(self.info.tokenizer, self.folder)


def write_corpus(
    sources: Sequence[str],
    destination: Path,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
) -> CorpusInfo:
    """Reads all sources and writes the corpus folder of a run.

    The held-out tokens are pieces spread evenly over the text, so that they resemble it.

    Args:
        sources: see ``find_files``; the default corpus where empty.
        destination: the folder to create; its parents are created too.
        tokenizer: makes the tokens.
        sequence_length: tokens per training sequence, to refuse a text that is too short.
        held_out_fraction: share of the tokens kept for evaluation, above 0 and below 1.
        text_field: the field of ``.jsonl`` records that holds the text.

    Raises:
        UsageError: DATA_MISSING, DATA_EMPTY, DATA_BINARY (see ``find_files`` and
            ``read_pieces``); CONFIG_INVALID for a fraction out of range; CONFIG_CONFLICT when
            ``destination`` already holds something.
        DilocoError: DISK_FULL, STORAGE_FAILED.
    """
    if not 0.0 < held_out_fraction < 1.0:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"held-out fraction {held_out_fraction} is not between 0 and 1; 0.05 is usual",
        )
    documents = _documents(sources, text_field)
    with storage_errors(destination, "writing"):
        _refuse_occupied(destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        try:
            dtype = _dtype_for(tokenizer.vocab_size)
            num_documents = _write_tokens(
                documents, building / _ALL_FILE, tokenizer, _DTYPES[dtype]
            )
            unsplit = CorpusInfo(
                hash="",
                num_tokens=0,
                num_held_out_tokens=0,
                vocab_size=tokenizer.vocab_size,
                dtype=dtype,
                tokenizer=tokenizer.name,
                sources=tuple(sources) or (f"python-docs {platform.python_version()}",),
                num_documents=num_documents,
            )
            num_held_out = _num_held_out(building, unsplit, held_out_fraction, sequence_length)
            info = _split(building, unsplit, num_held_out)
            tokenizer.save(building)
            _publish(building, destination)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return info


def _documents(sources: Sequence[str], text_field: str) -> Iterator[Iterator[str]]:
    """Finds the sources at once, and reads them, each in pieces, as they are asked for."""
    if not sources:
        return (iter((text,)) for text in python_docs())
    return (read_pieces(path, text_field=text_field) for path in find_files(sources))


def _refuse_occupied(destination: Path) -> None:
    occupied = any(destination.iterdir()) if destination.is_dir() else destination.exists()
    if occupied:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"{destination} already exists; a corpus is written once: open it, "
            "or choose another folder",
            path=destination,
        )


def _dtype_for(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def _write_tokens(
    documents: Iterable[Iterator[str]], path: Path, tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> int:
    """Writes the tokens of all documents, a blank line after each; returns how many were read."""
    num_documents = 0
    separator = tokenizer.encode("\n\n").astype(dtype)
    with path.open("wb") as file:
        for pieces in documents:
            num_documents += 1
            wrote = False
            for piece in pieces:
                if wrote or piece.strip():
                    file.write(tokenizer.encode(piece).astype(dtype).tobytes())
                    wrote = True
            if wrote:
                file.write(separator.tobytes())
    return num_documents


def _num_held_out(
    building: Path, info: CorpusInfo, held_out_fraction: float, sequence_length: int
) -> int:
    """Returns how many tokens to hold out; refuses a text too short to train on the rest."""
    num_all = (building / _ALL_FILE).stat().st_size // _DTYPES[info.dtype].itemsize
    if num_all == 0:
        raise UsageError(
            Reason.DATA_EMPTY,
            f"no text in {', '.join(info.sources)} ({info.num_documents} files read); "
            "give files that are not empty",
        )
    num_held_out = max(2, round(num_all * held_out_fraction))
    if num_all - num_held_out < sequence_length + 1:
        raise UsageError(
            Reason.DATA_EMPTY,
            f"the text is too short: {num_all} tokens, of which {num_held_out} are held out; "
            f"one training sequence takes {sequence_length + 1} (sequence_length + 1): "
            "give more text or lower sequence_length",
            num_tokens=num_all,
        )
    return num_held_out


def _split(building: Path, info: CorpusInfo, num_held_out: int) -> CorpusInfo:
    """Cuts all tokens into ``train.bin`` and ``held_out.bin`` and writes ``corpus.json``."""
    tokens = np.memmap(building / _ALL_FILE, dtype=_DTYPES[info.dtype], mode="r")
    num_all = len(tokens)
    num_pieces = min(max(num_held_out // _HELD_OUT_PIECE, 1), _MAX_HELD_OUT_PIECES)
    with (
        (building / TRAIN_FILE).open("wb") as train,
        (building / HELD_OUT_FILE).open("wb") as held_out,
    ):
        for index in range(num_pieces):
            start, stop = num_all * index // num_pieces, num_all * (index + 1) // num_pieces
            share = num_held_out * (index + 1) // num_pieces - num_held_out * index // num_pieces
            train.write(tokens[start : stop - share].data)
            held_out.write(tokens[stop - share : stop].data)
    del tokens
    (building / _ALL_FILE).unlink()
    info = dataclasses.replace(
        info, num_tokens=num_all - num_held_out, num_held_out_tokens=num_held_out
    )
    info = dataclasses.replace(info, hash=_hash(building, info))
    (building / INFO_FILE).write_text(info.to_json(), encoding="utf-8")
    return info


def _hash(folder: Path, info: CorpusInfo) -> str:
    header = [info.format_version, info.tokenizer, info.dtype, info.vocab_size, info.num_tokens]
    digest = hashlib.sha256(json.dumps(header).encode())
    for name in (TRAIN_FILE, HELD_OUT_FILE):
        with (folder / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _publish(building: Path, destination: Path) -> None:
    for path in building.iterdir():
        fsync_path(path)
    fsync_path(building)
    building.chmod(0o755)
    os.rename(building, destination)
    fsync_path(destination.parent)


def open_corpus(folder: Path, expected_hash: str | None = None) -> Corpus:
    """Opens a corpus folder and verifies every byte of it.

    Args:
        folder: what ``write_corpus`` wrote.
        expected_hash: the run's setting; not compared where None or empty.

    Raises:
        UsageError: DATA_MISSING when the folder or a file of it is missing, DATA_MISMATCH when
            the hash differs from the run's or the files differ from their own description.
        DilocoError: STORAGE_FAILED.
    """
    info = _read_info(folder)
    arrays: list[Tokens] = []
    for name, count in ((TRAIN_FILE, info.num_tokens), (HELD_OUT_FILE, info.num_held_out_tokens)):
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise _missing(folder, name) from error
        if size != count * _DTYPES[info.dtype].itemsize:
            raise _damaged(folder, f"{name} has {size} bytes where {count} tokens are recorded")
        with storage_errors(folder / name, "reading"):
            arrays.append(np.memmap(folder / name, dtype=_DTYPES[info.dtype], mode="r"))
    with storage_errors(folder, "reading"):
        found_hash = _hash(folder, info)
    if found_hash != info.hash:
        raise _damaged(folder, "its tokens do not have the recorded hash")
    if expected_hash and info.hash != expected_hash:
        raise UsageError(
            Reason.DATA_MISMATCH,
            f"corpus {folder} has hash {info.hash[:12]} where the run has {expected_hash[:12]}; "
            "every learner of a run trains on the same corpus: copy the run's corpus folder here",
            path=folder,
        )
    return Corpus(info=info, train=arrays[0], held_out=arrays[1], folder=folder)


def _read_info(folder: Path) -> CorpusInfo:
    try:
        text = (folder / INFO_FILE).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(folder, f"{INFO_FILE} is not text") from error
    except OSError as error:
        raise _missing(folder, INFO_FILE) from error
    try:
        values = json.loads(text)
        info = CorpusInfo(**{**values, "sources": tuple(values["sources"])})
        counts = (info.num_tokens, info.num_held_out_tokens, info.vocab_size)
        well_formed = info.dtype in _DTYPES and all(type(n) is int and n > 0 for n in counts)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(folder, f"{INFO_FILE} is not the description of a corpus") from error
    if not well_formed:
        raise _damaged(folder, f"{INFO_FILE} holds values that no corpus has")
    if info.format_version != FORMAT_VERSION:
        raise _damaged(
            folder, f"format {info.format_version} is not format {FORMAT_VERSION} of this version"
        )
    return info


def _missing(folder: Path, name: str) -> UsageError:
    return UsageError(
        Reason.DATA_MISSING,
        f"{folder} is not a corpus: {name} is missing; give the run's corpus folder",
        path=folder,
    )


def _damaged(folder: Path, why: str) -> UsageError:
    return UsageError(
        Reason.DATA_MISMATCH,
        f"corpus {folder} is damaged: {why}; write it again from its sources",
        path=folder,
    )
