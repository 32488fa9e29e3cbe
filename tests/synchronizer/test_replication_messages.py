"""Records as messages and back: bit for bit, and whatever a stranger sends has one reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.codecs import CHUNK_BYTES, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server.replication.messages import (
    RecordStager,
    Transfer,
    check_settings,
    description_from,
    run_message,
)
from tests.synchronizer.fake_learner import make_settings
from tests.synchronizer.replication_kit import (
    DESCRIPTION,
    LAYOUT,
    SETTINGS,
    Lineage,
    bits,
    claim_of,
    messages_of,
)

Messages = list[pb.ReplicateResponse]


def stage(messages: Iterable[pb.ReplicateResponse]) -> list[Transfer]:
    """What a standby makes of messages."""
    stager = RecordStager(LAYOUT, claim_of(1))
    found: list[Transfer | None] = []
    for message in messages:
        match message.WhichOneof("kind"):
            case "record":
                found.append(stager.record(message.record))
            case "tensor":
                stager.tensor(message.tensor)
            case "chunk":
                if stager.chunk(message.chunk):
                    found.append(stager.decode())
    return [transfer for transfer in found if transfer is not None]


@pytest.mark.parametrize("codec", ["fp32", "fp32+zstd"])
@settings(max_examples=15)
@given(which=st.sets(st.integers(0, LAYOUT.num_fragments - 1)))
def test_records_survive_the_wire_bit_for_bit(codec: str, which: set[int]) -> None:
    lineage = Lineage()
    lineage.round()
    cut = Transfer(record=lineage.record, fragments={p: lineage.states[p] for p in which})
    sent = [*messages_of(claim_of(1), cut, codec)]
    assert all(message.ByteSize() < CHUNK_BYTES + 1024 for message in sent)
    received = stage([*sent, *sent])
    for transfer in received:
        assert transfer.record == cut.record
        assert bits(transfer.fragments) == bits(cut.fragments)
    assert len(received) == 2


def whole() -> Messages:
    return [*messages_of(claim_of(1), Lineage().whole())]


def small() -> Messages:
    """A record with two fragments of one chunk per tensor."""
    lineage = Lineage()
    cut = Transfer(record=lineage.record, fragments={p: lineage.states[p] for p in (1, 2)})
    return [*messages_of(claim_of(1), cut)]


def big(messages: Messages) -> int:
    """The header of the first tensor that takes two chunks."""
    return next(
        i
        for i, m in enumerate(messages)
        if m.WhichOneof("kind") == "tensor" and m.tensor.encoding.payload_bytes > CHUNK_BYTES
    )


def with_json(old: str, new: str) -> Callable[[Messages], None]:
    def change(messages: Messages) -> None:
        record = messages[0].record
        assert old in record.record_json
        record.record_json = record.record_json.replace(old, new)

    return change


def set_record(**values: object) -> Callable[[Messages], None]:
    def change(messages: Messages) -> None:
        for name, value in values.items():
            setattr(messages[0].record, name, value)

    return change


def set_tensor(**values: object) -> Callable[[Messages], None]:
    def change(messages: Messages) -> None:
        for name, value in values.items():
            setattr(messages[1].tensor, name, value)

    return change


def set_encoding(**values: object) -> Callable[[Messages], None]:
    def change(messages: Messages) -> None:
        for name, value in values.items():
            setattr(messages[1].tensor.encoding, name, value)

    return change


def other_claim(messages: Messages) -> None:
    messages[0].record.claim.CopyFrom(claim_of(1, "leader-2").to_proto())


def flipped_bit(messages: Messages) -> None:
    chunk = messages[2].chunk
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]


def payload_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def replace_payload(messages: Messages, at: int, payload: bytes) -> None:
    messages[at].tensor.encoding.digest = payload_digest(payload)
    messages[at + 1].chunk.data = payload


def other_copy(messages: Messages) -> None:
    """A payload that fits its own digest, but is not the version of the record."""
    data = bytearray(messages[2].chunk.data)
    data[8] ^= 1
    replace_payload(messages, 1, bytes(data))


def not_a_number(messages: Messages) -> None:
    num_elements = messages[3].tensor.encoding.num_elements
    replace_payload(messages, 3, payload_of(torch.full((num_elements,), float("nan"))))


def drop(at: int) -> Callable[[Messages], None]:
    return lambda messages: messages.pop(at) and None


def swap(a: int, b: int) -> Callable[[Messages], None]:
    def change(messages: Messages) -> None:
        messages[a], messages[b] = messages[b], messages[a]

    return change


def drop_second_chunk(messages: Messages) -> None:
    del messages[big(messages) + 2]


def swap_chunks(messages: Messages) -> None:
    at = big(messages)
    swap(at + 1, at + 2)(messages)


def overlong_chunk(messages: Messages) -> None:
    chunk = messages[big(messages) + 1].chunk
    chunk.data = chunk.data + b"\0"


def chunk_past_the_end(messages: Messages) -> None:
    chunk = messages[2].chunk
    chunk.data = chunk.data + b"\0" * 8


def empty_chunk(messages: Messages) -> None:
    messages.insert(2, pb.ReplicateResponse(chunk=types_pb2.Chunk(offset_bytes=0)))


def fragments_swapped(messages: Messages) -> None:
    messages[1:] = [*messages[7:], *messages[1:7]]


HOSTILE: list[tuple[Callable[[Messages], None], Reason]] = [
    (with_json('"term":1', '"term":"1"'), Reason.MALFORMED),
    (with_json("{", "{{"), Reason.MALFORMED),
    (with_json('"quorum":1', '"quorum":1,"more":1'), Reason.MALFORMED),
    (with_json(f'"run_id":"{SETTINGS.run_id}"', '"run_id":"other"'), Reason.MALFORMED),
    (with_json('"group":0', '"group":1'), Reason.MALFORMED),
    (with_json('"term":1,"tokens', '"term":2,"tokens'), Reason.MALFORMED),
    (with_json(LAYOUT.fingerprint, "0" * 64), Reason.MALFORMED),
    (set_record(group=1), Reason.MALFORMED),
    (set_record(global_step=5), Reason.MALFORMED),
    (set_record(num_tensors=8), Reason.MALFORMED),
    (set_record(num_tensors=12), Reason.MALFORMED),
    (set_record(num_tensors=2**31), Reason.MALFORMED),
    (set_record(num_tensors=0), Reason.MALFORMED),
    (other_claim, Reason.BAD_CLAIM),
    (drop(0), Reason.MALFORMED),
    (drop(1), Reason.MALFORMED),
    (drop(2), Reason.TRUNCATED),
    (swap(1, 3), Reason.MALFORMED),
    (fragments_swapped, Reason.MALFORMED),
    (set_tensor(fragment=3), Reason.UNKNOWN_FRAGMENT),
    (set_tensor(name="residual"), Reason.MALFORMED),
    (set_tensor(name="weights"), Reason.MALFORMED),
    (set_encoding(codec="bf16"), Reason.CODEC_MISMATCH),
    (set_encoding(codec="no such codec"), Reason.CODEC_MISMATCH),
    (set_encoding(num_elements=2**40), Reason.MALFORMED),
    (set_encoding(payload_bytes=2**40), Reason.OVERSIZED),
    (set_encoding(payload_bytes=0), Reason.MALFORMED),
    (set_encoding(digest=b"\0" * 32), Reason.CORRUPT),
    (flipped_bit, Reason.CORRUPT),
    (other_copy, Reason.DIGEST_MISMATCH),
    (not_a_number, Reason.NON_FINITE),
    (chunk_past_the_end, Reason.OVERSIZED),
    (empty_chunk, Reason.MALFORMED),
]
TORN: list[tuple[Callable[[Messages], None], Reason]] = [
    (drop_second_chunk, Reason.TRUNCATED),
    (swap_chunks, Reason.OFFSET_MISMATCH),
    (overlong_chunk, Reason.MALFORMED),
]


@pytest.mark.parametrize(("change", "reason"), HOSTILE)
def test_what_a_stranger_sends_is_refused_with_one_reason(
    change: Callable[[Messages], None], reason: Reason
) -> None:
    messages = small()
    assert stage(messages)
    change(messages)
    with pytest.raises(DilocoError) as caught:
        stage([*messages, *small()])
    assert caught.value.reason is reason


@pytest.mark.parametrize(("change", "reason"), TORN)
def test_a_tensor_of_many_chunks_comes_whole_or_not_at_all(
    change: Callable[[Messages], None], reason: Reason
) -> None:
    messages = whole()
    change(messages)
    with pytest.raises(DilocoError) as caught:
        stage(messages)
    assert caught.value.reason is reason


@settings(max_examples=50)
@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    """Messages lost, doubled or swapped never make another record of what was sent."""
    messages = small()
    at, to = (data.draw(st.integers(0, len(messages) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["lost", "doubled", "swapped"])):
        case "lost":
            del messages[at]
        case "doubled":
            messages.insert(to, messages[at])
        case "swapped":
            messages[at], messages[to] = messages[to], messages[at]
    try:
        received = stage(messages)
    except DilocoError:
        return
    for transfer in received:
        held = bits(Lineage().states)
        assert bits(transfer.fragments) == {p: held[p] for p in (1, 2)}


def test_settings_that_differ_are_named() -> None:
    run = run_message(claim_of(1), DESCRIPTION, SETTINGS, proof=b"").run
    check_settings(run.settings_json, SETTINGS)
    assert description_from(run.description_json) == DESCRIPTION
    other = make_settings(num_fragments=3, quorum=2, overlap=1)
    with pytest.raises(
        DilocoError, match="overlap is 1 here and 2 at the leader; quorum"
    ) as caught:
        check_settings(run.settings_json, other)
    assert caught.value.reason is Reason.CONFIG_CONFLICT


def test_settings_of_another_release_are_named() -> None:
    with pytest.raises(DilocoError, match="shape is not known here and round at the leader"):
        check_settings('{"shape":"round"}', SETTINGS)


def test_settings_without_end_travel_too() -> None:
    endless = dataclasses.replace(SETTINGS, startup_wait_s=float("inf"))
    run = run_message(claim_of(1), None, endless, proof=b"").run
    check_settings(run.settings_json, endless)
    assert description_from(run.description_json) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":1,"a":2}', "NaN"])
def test_what_is_no_object_is_malformed(text: str) -> None:
    with pytest.raises(DilocoError) as caught:
        check_settings(text, SETTINGS)
    assert caught.value.reason is Reason.MALFORMED
