"""Who a store is: a stable id, and whether it had every published round when it was last told."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.store.files import make_directory, read_if_exists, sync_path, write_atomic

_ID: Final = re.compile(r"[0-9a-f]{16}")


class StoreIdentity:
    """The file ``identity.json`` of a store; made when it is missing.

    Args:
        root: directory of the store.

    Raises:
        DilocoError: ``STORE_CORRUPT`` for a file that is not ours, ``STORAGE_FAILED``,
            ``DISK_FULL``.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "identity.json"
        make_directory(root)
        data = read_if_exists(self._path)
        if data is None:
            self.store_id, self._in_sync = secrets.token_hex(8), True
            self._write(in_sync=True)
        else:
            self.store_id, self._in_sync = self._read(data)

    @property
    def in_sync(self) -> bool:
        """Whether nothing published was missing here; true of a store that never followed."""
        return self._in_sync

    def set_in_sync(self, in_sync: bool) -> None:
        """Keeps what a standby is told, or a leader knows.

        Raises:
            DilocoError: ``STORAGE_FAILED``, ``DISK_FULL``.
        """
        if in_sync != self._in_sync:
            self._write(in_sync=in_sync)
            self._in_sync = in_sync  # not before: what failed is tried again

    def _write(self, *, in_sync: bool) -> None:
        text = json.dumps({"store_id": self.store_id, "in_sync": in_sync})
        write_atomic(self._path, text.encode(), sync=True)
        sync_path(self._path.parent)

    def _read(self, data: bytes) -> tuple[str, bool]:
        try:
            value = json.loads(data)
            store_id, in_sync = value["store_id"], value["in_sync"]
            if not (isinstance(in_sync, bool) and _ID.fullmatch(store_id)):
                raise ValueError("not the fields of an identity")
        except (ValueError, KeyError, TypeError) as error:
            raise DilocoError(
                Reason.STORE_CORRUPT,
                f"{self._path} is damaged ({error}); remove it where this store was never out of "
                "sync, or begin with an empty store, which is filled by the leader",
                path=self._path,
            ) from error
        return store_id, in_sync
