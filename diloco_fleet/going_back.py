"""Going back to a snapshot on this machine: the store, and every learner's part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.run_files import RunFiles


def forget_resume(files: RunFiles) -> None:
    """Removes parts that an earlier start of the fleet was to go on from."""
    shutil.rmtree(files.resume_part("").parent, ignore_errors=True)


def resume_from(files: RunFiles, run_id: str, choice: str, say: Callable[[str], None]) -> None:
    """Makes a snapshot what the fleet goes on from; no process of the fleet runs.

    A learner whose part is missing starts like a new one.

    Args:
        files: the run directory.
        run_id: the run.
        choice: ``latest``, a name or a global step.
        say: takes lines for people.

    Raises:
        DilocoError: SNAPSHOT_NOT_FOUND, or as the store says it; nothing has changed then.
    """
    # Not at the top: they import torch, for which other commands do not wait.
    from learner_client.files import storage_errors
    from learner_client.snapshots import SnapshotDirectory
    from synchronizer_server.going_back import go_back
    from synchronizer_server.store.disk import DiskStore

    with ExitStack() as stack:
        # A standby's store goes back, too: both must agree before either leads.
        stores = [
            stack.enter_context(closing(DiskStore(path, run_id, snapshots=files.snapshots)))
            for path in (files.store_of(0), files.store_of(1))
            if path.exists()
        ]
        stores = [store for store in stores if store.read_run()]
        if not stores:
            raise UsageError(
                Reason.SNAPSHOT_NOT_FOUND,
                f"there is no snapshot in {files.root}: no learner of this run has ever joined; "
                "resume without --snapshot",
                snapshot=choice,
            )
        term = 1 + max(store.highest_term() for store in stores)
        backs = [go_back(store, choice, term=term) for store in stores]
    back = max(backs, key=lambda back: back.num_given_up or 0)
    say(back.describe())
    parts = SnapshotDirectory(files.snapshots)
    for learner_id in sorted(back.manifest.participants):
        part, target = parts.part(back.manifest.name, learner_id), files.resume_part(learner_id)
        if not part.is_file():
            say(f"{learner_id}: its part {part} is missing; it starts like a new learner")
            continue
        with storage_errors(target, "writing"):
            target.parent.mkdir(exist_ok=True)
            # A link is enough: parts are replaced, never changed.
            try:
                target.hardlink_to(part)
            except OSError:
                shutil.copyfile(part, target)


def list_snapshots(files: RunFiles) -> list[str]:
    """The complete snapshots of a run directory, in words, oldest first."""
    from synchronizer_server.store.paths import StorePaths
    from synchronizer_server.store.snapshots import DiskSnapshots

    found = DiskSnapshots(StorePaths(files.store, 0, files.snapshots)).complete()
    if not found:
        return [f"there is no complete snapshot in {files.snapshots}"]
    lines = []
    for manifest in found:
        line = f"{manifest.name}  {', '.join(sorted(manifest.participants))}"
        if manifest.left_out:
            out = ", ".join(f"{k} ({v})" for k, v in sorted(manifest.left_out.items()))
            line += f"  left out: {out}"
        lines.append(line)
    return lines
