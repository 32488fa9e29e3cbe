"""Finding the newest complete cut in a store, and refusing what is damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.envelope import Envelope, FileRef, decode_fragment, decode_record
from synchronizer_server.store.files import read_if_exists
from synchronizer_server.store.paths import StorePaths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A record file: readable, or the reason why not."""

    term: int
    global_step: int
    path: Path
    content: Envelope | DilocoError


def load_lineage(
    paths: StorePaths, run_id: str, group: int
) -> tuple[list[Envelope], dict[int, FragmentState]]:
    """Reads the lineage of the highest term that has a record.

    Returns:
        The readable records, oldest first, up to the newest complete one, and that one's
        fragments, every byte checked. Both empty in a store without a record.

    Raises:
        DilocoError: ``STORE_CORRUPT`` or ``STORE_LOST`` when a record that was complete once is
            not any more; ``STORAGE_FAILED``.
    """
    found = [_examine(run_id, group, *item) for item in paths.records()]
    tip = _newest_complete(paths, found)
    if tip is None:
        _refuse_rounds_without_record(paths)
        return [], {}
    envelope, fragments = tip
    kept: list[Envelope] = []
    for item in found:
        if isinstance(item.content, Envelope):
            kept.append(item.content)
            if item.content is envelope:
                break
        else:
            logger.warning("%s cannot be read, and is not needed", item.path)
    return kept, fragments


def newest_of(kept: list[Envelope], num_terms: int, num_rounds: int) -> list[Envelope]:
    """The last records of each of the newest terms, in the order in which they are given."""
    terms = sorted({envelope.record.term for envelope in kept})[-num_terms:]
    return [
        envelope
        for term in terms
        for envelope in [e for e in kept if e.record.term == term][-num_rounds:]
    ]


def _newest_complete(
    paths: StorePaths, found: list[_Found]
) -> tuple[Envelope, dict[int, FragmentState]] | None:
    """Walks back from the newest record to the first complete one.

    Only a record that was not forced out may be passed over: it can be torn by a crash of the
    machine. Any other was complete once, and passing it over would lose published rounds.
    """
    newest_error: DilocoError | None = None
    for index in reversed(range(len(found))):
        item = found[index]
        try:
            if isinstance(item.content, DilocoError):
                raise item.content
            return item.content, read_fragments(item.content, item.path, paths.file_of)
        except DilocoError as error:
            newest_error = newest_error or error
            damaged = error.reason in (Reason.STORE_CORRUPT, Reason.STORE_LOST)
            if not damaged or not _may_be_torn(found, index):
                raise
            logger.warning(
                "round %d of term %d was not complete when the machine stopped, going back to the "
                "round before it: %s",
                item.global_step,
                item.term,
                error.message,
            )
    if newest_error is not None:
        raise newest_error
    return None


def _may_be_torn(found: list[_Found], index: int) -> bool:
    """Tells whether a record may have been left incomplete by a crash of the machine.

    The first record of a term here never is. An unreadable record cannot say how it was written;
    the nearest readable one before it in its term does.
    """
    own = found[index]
    if isinstance(own.content, Envelope):
        return not own.content.forced
    before = [
        item.content
        for item in found[:index]
        if item.term == own.term and isinstance(item.content, Envelope)
    ]
    return bool(before) and before[-1].durability != "disk"


def _examine(run_id: str, group: int, term: int, global_step: int, path: Path) -> _Found:
    """Reads one record file; damage is returned, not raised."""
    content: Envelope | DilocoError
    try:
        content = decode_record(read_if_exists(path) or b"")
        record = content.record
        if (record.run_id, record.group) != (run_id, group):
            content = _unusable(path, path, "it belongs to another run or group")
        elif (record.term, record.global_step) != (term, global_step):
            content = _unusable(path, path, "it is not the round of its name")
    except DilocoError as error:
        if error.reason is not Reason.STORE_CORRUPT:
            raise
        content = _unusable(path, path, error.message)
    return _Found(term=term, global_step=global_step, path=path, content=content)


def read_fragments(
    envelope: Envelope, record_path: Path, file_of: Callable[[int, FileRef], Path]
) -> dict[int, FragmentState]:
    """Reads and checks every fragment of a cut.

    Args:
        envelope: the cut.
        record_path: where its record lies, for messages.
        file_of: tells where the file of a fragment is.

    Raises:
        DilocoError: ``STORE_CORRUPT`` or ``STORE_LOST``.
    """
    result = {}
    for fragment, ref in enumerate(envelope.files):
        path = file_of(fragment, ref)
        data = read_if_exists(path)
        if data is None:
            raise _unusable(path, record_path, None)
        if (damage := ref.damage(data)) is not None:
            raise _unusable(path, record_path, damage)
        try:
            tensors = decode_fragment(data)
        except DilocoError as error:
            raise _unusable(path, record_path, error.message) from error
        if tensors.digest() != envelope.record.versions[fragment].digest:
            raise _unusable(path, record_path, "the published copy has another digest")
        result[fragment] = tensors
    return result


def _unusable(path: Path, record_path: Path, damage: str | None) -> DilocoError:
    """The error for a file that is damaged, or missing when ``damage`` is None."""
    what = "is missing" if damage is None else f"is damaged: {damage}"
    return DilocoError(
        Reason.STORE_LOST if damage is None else Reason.STORE_CORRUPT,
        f"{path} {what}; restore it from a backup, or give this round up: move {record_path} "
        "out of the store, and the run goes on from the record before it",
        path=path,
    )


def _refuse_rounds_without_record(paths: StorePaths) -> None:
    """A fragment of t > 0 is written only when a record is there, but for a first install."""
    if paths.unfinished.exists():
        return
    for global_step, path in paths.fragments():
        if global_step > 0:
            raise DilocoError(
                Reason.STORE_LOST,
                f"{path} is there, but no round record is; restore the records (round-*.json) "
                "from a backup, or begin a new run in an empty directory",
                path=path,
            )
