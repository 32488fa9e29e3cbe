"""Payloads arrive whole, in order and as claimed, or are refused with the reason."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.codecs import CHUNK_BYTES, Stager, iter_chunks, payload_digest
from decoupled_diloco.errors import DilocoError, Reason


def stager_for(payload: bytes) -> Stager:
    return Stager(len(payload), payload_digest(payload), len(payload))


def reason_of_call(call, *arguments) -> Reason:
    with pytest.raises(DilocoError) as caught:
        call(*arguments)
    return caught.value.reason


def test_the_digest_is_sha_256():
    assert payload_digest(memoryview(b"abc")) == hashlib.sha256(b"abc").digest()


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1])
def test_chunks_join_to_the_payload_without_a_copy(num_bytes):
    payload = memoryview(bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
    chunks = list(iter_chunks(payload))
    assert b"".join(chunks) == payload
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert len(chunks) == -(-num_bytes // CHUNK_BYTES)
    assert all(chunk.obj is payload.obj for chunk in chunks)


@given(st.integers(0, 3000), st.data())
def test_chunks_resume_at_any_offset(num_bytes, data):
    payload = (b"0123456789" * 300)[:num_bytes]
    offset = data.draw(st.integers(0, num_bytes))
    assert b"".join(iter_chunks(payload, offset)) == payload[offset:]


@pytest.mark.parametrize("offset", [-1, 4, 2**63])
def test_an_offset_outside_the_payload_is_refused_at_the_call(offset):
    assert reason_of_call(iter_chunks, b"abc", offset) is Reason.OFFSET_MISMATCH


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_a_payload_staged_in_order_comes_out_whole(chunks):
    payload = b"".join(chunks)
    stager = stager_for(payload)
    for chunk in chunks:
        stager.add(stager.num_bytes, chunk)
    assert stager.num_bytes == len(payload)
    assert stager.finish() == payload
    assert stager.finish().readonly


@given(st.binary(min_size=1, max_size=50), st.integers(-5, 60), st.data())
def test_a_chunk_elsewhere_is_refused_and_changes_nothing(payload, offset, data):
    stager = stager_for(payload)
    have = data.draw(st.integers(0, len(payload)))
    stager.add(0, payload[:have])
    if offset != have:
        with pytest.raises(DilocoError) as caught:
            stager.add(offset, b"x")
        assert caught.value.reason is Reason.OFFSET_MISMATCH
        assert caught.value.details["expected"] == str(have)
    stager.add(have, payload[have:])
    assert stager.finish() == payload


def test_a_chunk_past_the_end_is_refused_and_changes_nothing():
    stager = stager_for(b"abcd")
    stager.add(0, b"ab")
    assert reason_of_call(stager.add, 2, b"cde") is Reason.OVERSIZED
    assert stager.num_bytes == 2
    stager.add(2, b"cd")
    assert reason_of_call(stager.add, 4, b"e") is Reason.OVERSIZED
    assert stager.finish() == b"abcd"


def test_a_payload_cut_short_is_truncated_and_may_go_on():
    stager = stager_for(b"abcd")
    stager.add(0, b"abc")
    assert reason_of_call(stager.finish) is Reason.TRUNCATED
    stager.add(3, b"d")
    assert stager.finish() == b"abcd"


@given(st.binary(min_size=1, max_size=60), st.data())
def test_any_flipped_bit_is_corrupt(payload, data):
    stager = stager_for(payload)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    stager.add(0, bytes(damaged))
    assert reason_of_call(stager.finish) is Reason.CORRUPT


@pytest.mark.parametrize("digest", [b"", b"\0" * 32, hashlib.sha256(b"a").digest()[:31]])
def test_a_digest_of_any_other_form_is_corrupt(digest):
    stager = Stager(1, digest, 1)
    stager.add(0, b"a")
    assert reason_of_call(stager.finish) is Reason.CORRUPT


def test_an_oversized_claim_is_refused_before_it_is_allocated():
    tracemalloc.start()
    try:
        assert reason_of_call(Stager, 2**30, bytes(32), 2**20) is Reason.OVERSIZED
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_negative_claim_is_malformed():
    assert reason_of_call(Stager, -1, bytes(32), 10) is Reason.MALFORMED
