"""What ``diloco status`` says of the training data."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.v1 import admin_pb2

_MAX_SHOWN: Final = 8


def data_lines(status: admin_pb2.GetStatusResponse) -> list[str]:
    """Returns where leased data stands, and the tokens of every learner; nothing before any."""
    lines = []
    data = status.data
    if data.mode == "leases":
        lines.append(
            f"data: epoch {data.epoch}, {data.num_free:,} samples free, {data.num_leased:,} on "
            f"lease, {data.num_merged:,} merged, {data.num_returned:,} given back"
        )
    num_fragments = max(len(status.versions), 1)
    known = [x for x in status.learners if x.tokens_processed]
    shown = [_learner_text(x, num_fragments) for x in known[:_MAX_SHOWN]]
    if len(known) > _MAX_SHOWN:
        shown.append(f"and {len(known) - _MAX_SHOWN} more")
    if shown:
        lines.append(f"tokens trained / merged: {', '.join(shown)}")
    return lines


def _learner_text(learner: admin_pb2.LearnerStatus, num_fragments: int) -> str:
    merged = learner.tokens_merged // num_fragments
    text = f"{learner.learner_id} {learner.tokens_processed:,} / {merged:,}"
    if learner.data_stop:
        text += f" (sample {learner.data_position:,}, lease to {learner.data_stop:,})"
    return text
