"""What only the synchronizer reads from messages, and how it answers."""

from __future__ import annotations

import math
from typing import Final

from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.wire import malformed
from synchronizer_server.core.effects import Outcome

MAX_ID_CHARS: Final = 128

OUTCOMES: Final = {
    Outcome.ACCEPTED: pb.PUSH_OUTCOME_ACCEPTED,
    Outcome.DROPPED: pb.PUSH_OUTCOME_DROPPED,
    Outcome.REFUSED: pb.PUSH_OUTCOME_REFUSED,
}


def check_id(text: str, what: str) -> str:
    """Returns an id that is short and printable.

    Raises:
        DilocoError: MALFORMED.
    """
    if not text or len(text) > MAX_ID_CHARS or not text.isprintable() or " " in text:
        raise malformed(
            f"{what} is {text[:40]!r}: give 1 to {MAX_ID_CHARS} printable characters, no spaces"
        )
    return text


def loss_from(message: pb.InnerStep) -> float | None:
    """The loss of a report, where it told one that is a number."""
    has_loss = message.HasField("loss") and math.isfinite(message.loss)
    return message.loss if has_loss else None
