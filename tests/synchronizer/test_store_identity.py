"""Whether a store was in sync is what its file says, also where the disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.store.identity import StoreIdentity
from tests.synchronizer.store_faults import failing


def test_a_word_that_the_disk_did_not_take_does_not_count_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = StoreIdentity(tmp_path)
    with (
        failing(monkeypatch, "replace", 1, OSError(28, "full"), after=False),
        pytest.raises(DilocoError) as caught,
    ):
        identity.set_in_sync(False)
    assert caught.value.reason is Reason.DISK_FULL
    assert identity.in_sync is StoreIdentity(tmp_path).in_sync is True
    identity.set_in_sync(False)
    assert identity.in_sync is StoreIdentity(tmp_path).in_sync is False
