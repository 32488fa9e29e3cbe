"""What only the synchronizer reads from messages, and how it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.wire import malformed
from synchronizer_server.core.effects import Outcome

MAX_ID_CHARS: Final = 128
MAX_TENSORS: Final = 20_000
MAX_DIMENSIONS: Final = 8
MAX_FRAGMENTS: Final = 20_000
_MAX_REASON_CHARS: Final = 200

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


def one_line(text: str) -> str:
    """A reason in somebody's words, as one line that is not too long."""
    return " ".join(text[:_MAX_REASON_CHARS].split())


def check_tensors(messages: Sequence[types_pb2.TensorSpec]) -> None:
    """Refuses a list of tensors that no model has, before anything is done with it.

    Raises:
        DilocoError: MALFORMED.
    """
    if len(messages) > MAX_TENSORS:
        raise malformed(f"{len(messages)} tensors, at most {MAX_TENSORS} can be")
    for message in messages:
        if len(message.shape) > MAX_DIMENSIONS:
            raise malformed(
                f"tensor {message.name[:40]!r} has {len(message.shape)} dimensions, at most "
                f"{MAX_DIMENSIONS} can be"
            )


def loss_from(message: pb.InnerStep) -> float | None:
    """The loss of a report, where it told one that is a number."""
    has_loss = message.HasField("loss") and math.isfinite(message.loss)
    return message.loss if has_loss else None
