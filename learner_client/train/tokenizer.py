"""Tokenizers: raw UTF-8 bytes by default, a Hugging Face ``tokenizer.json`` as an extra."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from decoupled_diloco.errors import Reason, UsageError

BYTES: Final = "bytes"
"""The setting that chooses the byte tokenizer."""

TOKENIZER_FILE: Final = "tokenizer.json"
"""Name under which a Hugging Face tokenizer is kept beside a corpus or a model."""

TokenArray = npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Identity that goes into the corpus hash; equal names mean equal tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is below it."""

    def encode(self, text: str) -> TokenArray:
        """Returns the token ids of ``text``, without special tokens added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids``; bytes that are not text become U+FFFD."""

    def save(self, folder: Path) -> None:
        """Writes into ``folder`` what ``load_tokenizer`` needs to rebuild this tokenizer."""


class ByteTokenizer:
    """One token per byte of UTF-8: ids 0 to 255, no file, no training."""

    @property
    def name(self) -> str:
        """Identity that goes into the corpus hash."""
        return BYTES

    @property
    def vocab_size(self) -> int:
        """Always 256."""
        return 256

    def encode(self, text: str) -> TokenArray:
        """Returns the bytes of ``text``, one id each."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids``; a cut or foreign byte becomes U+FFFD."""
        return bytes(map(int, ids)).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Writes nothing: bytes need no file."""


class HFTokenizer:
    """A tokenizer of the ``tokenizers`` library, read from its ``tokenizer.json``.

    Args:
        path: the file.

    Raises:
        UsageError: CONFIG_INVALID when the ``tokenizers`` extra is not installed, or the file
            is missing or is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"tokenizer file {path} cannot be read ({error.strerror}); "
                f"give the path of a tokenizer.json, or '{BYTES}'",
                path=path,
            ) from error
        self._content = content
        self._tokenizer = _parse(path, content)
        self._name = f"hf:{hashlib.sha256(content).hexdigest()}"

    @property
    def name(self) -> str:
        """``hf:`` and the SHA-256 of the file."""
        return self._name

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> TokenArray:
        """Returns the token ids of ``text``, without special tokens added."""
        return np.asarray(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids``."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Writes a copy of the file as ``tokenizer.json``."""
        (folder / TOKENIZER_FILE).write_bytes(self._content)


def _parse(path: Path, content: bytes) -> Any:  # noqa: ANN401 - a class of an optional package
    try:
        import tokenizers  # noqa: PLC0415 - an optional extra, needed by few runs
    except ImportError as error:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"tokenizer {path} needs the 'tokenizers' extra: "
            f"pip install 'decoupled-diloco[tokenizers]', or use tokenizer '{BYTES}'",
            path=path,
        ) from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and ValueError
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"{path} is not a Hugging Face tokenizer.json: {error}",
            path=path,
        ) from error


def build_tokenizer(setting: str) -> Tokenizer:
    """Builds the tokenizer that the setting names: ``bytes`` or the path of a tokenizer.json.

    Raises:
        UsageError: CONFIG_INVALID, see ``HFTokenizer``.
    """
    return ByteTokenizer() if setting == BYTES else HFTokenizer(Path(setting))


def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Rebuilds a tokenizer saved beside a corpus or a model.

    Args:
        name: the ``name`` it had.
        folder: where ``Tokenizer.save`` wrote.

    Raises:
        UsageError: CONFIG_INVALID (see ``HFTokenizer``), DATA_MISMATCH when the file in
            ``folder`` is not the tokenizer of that name.
    """
    if name == BYTES:
        return ByteTokenizer()
    tokenizer = HFTokenizer(folder / TOKENIZER_FILE)
    if tokenizer.name != name:
        raise UsageError(
            Reason.DATA_MISMATCH,
            f"{folder / TOKENIZER_FILE} is not the tokenizer of this folder "
            f"({tokenizer.name} where {name} is recorded); restore the file",
            path=folder / TOKENIZER_FILE,
        )
    return tokenizer
