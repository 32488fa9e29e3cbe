"""Pushes: an outer gradient (or, when seeding, a fragment) on its way up, resumable."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import torch

from decoupled_diloco.codecs import Payload, get_codec, iter_chunks, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.fault_points import FaultPoint, crosses_half, reach
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import incarnation_to, version_to
from learner_client.captures import PushWork
from learner_client.transport.base import Transport


def outer_gradient(base: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``v = base - local`` (design section 4): fp32, one dimension, freshly allocated."""
    return base - local


def encode(vector: torch.Tensor, codec: str) -> tuple[types_pb2.Encoding, Payload]:
    """Encodes a vector, and says how."""
    payload = get_codec(codec).encode(vector)
    encoding = types_pb2.Encoding(
        codec=codec,
        num_elements=vector.numel(),
        payload_bytes=len(payload),
        digest=payload_digest(payload),
    )
    return encoding, payload


def push_header(
    work: PushWork,
    *,
    learner_id: str,
    incarnation: Incarnation,
    encoding: types_pb2.Encoding,
    clock: types_pb2.Clock,
) -> synchronizer_pb2.PushHeader:
    """Header of an outer gradient."""
    pull, stamp, counters = work.answer.pull, work.answer.stamp, work.answer.counters
    return synchronizer_pb2.PushHeader(
        kind=synchronizer_pb2.PUSH_KIND_OUTER_GRADIENT,
        learner_id=learner_id,
        incarnation=incarnation_to(incarnation),
        term=pull.term,
        group=pull.group,
        global_step=pull.global_step,
        fragment=pull.fragment,
        base=version_to(stamp.base),
        local_step=stamp.local_step,
        num_tokens=counters.num_tokens,
        num_steps=counters.num_steps,
        encoding=encoding,
        clock=clock,
    )


def seed_header(
    fragment: int,
    *,
    learner_id: str,
    incarnation: Incarnation,
    term: int,
    encoding: types_pb2.Encoding,
    clock: types_pb2.Clock,
) -> synchronizer_pb2.PushHeader:
    """Header of the first parameters of a fragment."""
    return synchronizer_pb2.PushHeader(
        kind=synchronizer_pb2.PUSH_KIND_SEED,
        learner_id=learner_id,
        incarnation=incarnation_to(incarnation),
        term=term,
        fragment=fragment,
        encoding=encoding,
        clock=clock,
    )


async def send(
    transport: Transport, header: synchronizer_pb2.PushHeader, payload: Payload, offset: int
) -> synchronizer_pb2.PushResponse:
    """Sends a push from byte ``offset`` on.

    Raises:
        DilocoError: where the call failed, or the answer makes no sense (``MALFORMED``).
    """
    sent = synchronizer_pb2.PushHeader()
    sent.CopyFrom(header)
    sent.offset_bytes = offset
    response = await transport.push(_requests(sent, payload, offset))
    if response.outcome == synchronizer_pb2.PUSH_OUTCOME_UNSPECIFIED:
        raise DilocoError(Reason.MALFORMED, "a push was answered without an outcome")
    if response.outcome == synchronizer_pb2.PUSH_OUTCOME_RESUME and not (
        0 <= response.staged_bytes <= len(payload)
    ):
        raise DilocoError(
            Reason.MALFORMED,
            f"asked to resume at byte {response.staged_bytes} of a push of {len(payload)}",
        )
    return response


async def _requests(
    header: synchronizer_pb2.PushHeader, payload: Payload, offset: int
) -> AsyncGenerator[synchronizer_pb2.PushRequest, None]:
    yield synchronizer_pb2.PushRequest(header=header)
    for chunk in iter_chunks(payload, offset):
        if crosses_half(offset, len(chunk), len(payload)):
            reach(FaultPoint.MID_PUSH)
        yield synchronizer_pb2.PushRequest(
            chunk=types_pb2.Chunk(offset_bytes=offset, data=bytes(chunk))
        )
        offset += len(chunk)
