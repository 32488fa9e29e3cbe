"""Codecs give back what they promise, bit for bit, and refuse anything that is not theirs."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.codecs import codec_names, get_codec
from decoupled_diloco.errors import DilocoError, Reason, UsageError

NAMES = ("bf16", "bf16+zstd", "fp32", "fp32+zstd")
SPECIAL = (
    0x00000000,
    0x80000000,  # zeros
    0x7F800000,
    0xFF800000,  # infinities
    0x7FC00000,
    0x7F800001,
    0xFFC12345,  # NaNs with payloads
    0x00000001,
    0x807FFFFF,
    0x00800000,  # denormals and the least normal number
    0x3F808000,
    0x3F818000,
    0x3F808001,
    0x7F7FFFFF,  # ties, and what rounds up to infinity
)
words = st.lists(st.sampled_from(SPECIAL) | st.integers(0, 2**32 - 1), max_size=40)


def vector_of(patterns: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))


def bits(vector: torch.Tensor) -> list[int]:
    assert vector.dtype == torch.float32
    return [int(word) for word in vector.numpy().view(np.uint32)]


def gradient(num_elements: int, seed: int = 0) -> torch.Tensor:
    """Values spread like those of an outer gradient: they pack."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_elements, generator=generator) * 1e-3


def expected(name: str, vector: torch.Tensor) -> torch.Tensor:
    return vector if name.startswith("fp32") else vector.to(torch.bfloat16).to(torch.float32)


def decoded(name: str, raw: bytes, num_elements: int) -> torch.Tensor | Reason:
    """The vector, or the reason of a refusal."""
    try:
        return get_codec(name).decode(raw, num_elements)
    except DilocoError as error:
        return error.reason


def test_these_codecs_exist():
    assert codec_names() == NAMES
    assert [get_codec(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize(
    ("name", "nearest"), [("fp16", "bf16"), ("bf16+zst", "bf16+zstd"), ("FP32+zstd", "fp32+zstd")]
)
def test_an_unknown_codec_is_answered_with_the_nearest_name(name, nearest):
    with pytest.raises(UsageError, match=r"did you mean") as caught:
        get_codec(name)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert repr(nearest) in caught.value.message


@pytest.mark.parametrize("name", NAMES)
@given(patterns=words)
def test_a_round_trip_is_bit_exact(name, patterns):
    """fp32 keeps every bit, NaN payloads included; bf16 is torch's rounding and nothing else."""
    codec = get_codec(name)
    vector = vector_of(patterns)
    payload = codec.encode(vector)
    low, high = codec.payload_bounds(len(patterns))
    assert low <= len(payload) <= high
    for form in (payload, bytes(payload), memoryview(bytes(payload))):
        assert bits(codec.decode(form, len(patterns))) == bits(expected(name, vector))


@given(patterns=words)
def test_bf16_rounds_to_nearest_even(patterns):
    """Against integer arithmetic on the bit patterns, denormals and overflow included."""
    finite = [p for p in patterns if p & 0x7F800000 != 0x7F800000]
    got = bits(get_codec("bf16").decode(get_codec("bf16").encode(vector_of(finite)), len(finite)))
    assert got == [((p + 0x7FFF + ((p >> 16) & 1)) >> 16) << 16 for p in finite]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_elements", [0, 1, 127, 100_003])
def test_gradients_of_any_length_survive(name, num_elements):
    codec = get_codec(name)
    vector = gradient(num_elements)
    again = codec.decode(codec.encode(vector), num_elements)
    assert bits(again) == bits(expected(name, vector))


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_element_of_any_stride_survives(name):
    vector = torch.tensor([1.0, 2.0, 3.0])[::3]
    assert vector.stride() == (3,)
    assert vector.is_contiguous()
    assert bits(get_codec(name).decode(get_codec(name).encode(vector), 1)) == bits(vector)


def test_fp32_is_little_endian():
    assert bytes(get_codec("fp32").encode(torch.tensor([1.5, -2.0]))) == struct.pack("<2f", 1.5, -2)


@pytest.mark.parametrize("name", NAMES)
def test_neither_end_shares_memory_with_what_it_was_given(name):
    codec = get_codec(name)
    vector = gradient(1000)
    before = bits(expected(name, vector))
    payload = codec.encode(vector)
    vector.zero_()
    first = codec.decode(payload, 1000)
    assert bits(first) == before
    first.add_(1)  # fresh and writable
    assert bits(codec.decode(payload, 1000)) == before


@pytest.mark.parametrize(("name", "most_bits"), [("bf16+zstd", 11.2), ("fp32+zstd", 27.2)])
def test_packing_pays_on_gradients(name, most_bits):
    vector = gradient(200_000)
    payload = get_codec(name).encode(vector)
    assert len(payload) * 8 <= most_bits * len(vector)


@pytest.mark.parametrize("name", ["bf16+zstd", "fp32+zstd"])
def test_what_does_not_pack_costs_one_byte_more(name):
    codec = get_codec(name)
    noise = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    payload = codec.encode(torch.from_numpy(noise.view(np.float32)))
    assert len(payload) == codec.payload_bounds(4096)[1]


@pytest.mark.parametrize("name", NAMES)
@given(raw=st.binary(max_size=200), num_elements=st.integers(0, 60))
def test_arbitrary_bytes_decode_or_are_refused_with_a_reason(name, raw, num_elements):
    outcome = decoded(name, raw, num_elements)
    if isinstance(outcome, torch.Tensor):
        assert outcome.shape == (num_elements,)
    else:
        assert outcome in (Reason.CODEC_MISMATCH, Reason.CORRUPT)


@given(
    frame=st.builds(
        bytes.__add__,
        st.sampled_from([bytes.fromhex("28b52ffd"), struct.pack("<I", 0x184D2A50), b""]),
        st.binary(max_size=80),
    ),
    num_elements=st.integers(0, 120) | st.just(10_000),
)
def test_anything_in_place_of_a_frame_decodes_or_is_refused(frame, num_elements):
    outcome = decoded("bf16+zstd", b"\1" + bytes(num_elements) + frame, num_elements)
    if isinstance(outcome, torch.Tensor):
        assert outcome.shape == (num_elements,)
    else:
        assert outcome in (Reason.CODEC_MISMATCH, Reason.CORRUPT)


@pytest.mark.parametrize("name", ["bf16+zstd", "fp32+zstd"])
def test_a_damaged_frame_decodes_to_the_right_size_or_is_refused(name):
    """Every byte of the packed plane flipped in turn; contents are the digest's business."""
    codec = get_codec(name)
    payload = bytes(codec.encode(gradient(400)))
    assert payload[0] == 1
    rng = random.Random(0)
    refused = 0
    for at in [0, *range(len(payload) - 300, len(payload))]:
        damaged = bytearray(payload)
        damaged[at] ^= rng.randrange(1, 256)
        outcome = decoded(name, bytes(damaged), 400)
        if isinstance(outcome, torch.Tensor):
            assert outcome.shape == (400,)
        else:
            assert outcome is Reason.CORRUPT
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_cut_short_or_too_long_is_refused(name):
    codec = get_codec(name)
    payload = bytes(codec.encode(gradient(1000)))
    for wrong in (payload[:-1], payload[:10], b"", payload + b"\0"):
        with pytest.raises(DilocoError) as caught:
            codec.decode(wrong, 1000)
        assert caught.value.reason in (Reason.CODEC_MISMATCH, Reason.CORRUPT)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_fragment_is_a_mismatch(name):
    codec = get_codec(name)
    with pytest.raises(DilocoError) as caught:
        codec.decode(codec.encode(gradient(1000)), 100_000)
    assert caught.value.reason is Reason.CODEC_MISMATCH


def forged(num_elements: int, frame: bytes) -> bytes:
    return b"\1" + bytes(num_elements) + frame


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor().compress(bytes(50_000_000)),
        # a header that states 2**62 bytes and then one empty block
        bytes.fromhex("28b52ffd") + b"\xc0\x58" + struct.pack("<Q", 2**62) + b"\x01\0\0",
    ],
    ids=["expands", "claims"],
)
def test_a_decompression_bomb_is_refused_before_anything_is_allocated(frame):
    payload = forged(10_000, frame)
    tracemalloc.start()
    try:
        with pytest.raises(DilocoError) as caught:
            get_codec("bf16+zstd").decode(payload, 10_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason is Reason.CORRUPT
    assert peak < 1_000_000


def test_frames_that_hide_their_size_or_trail_other_data_are_refused():
    plane = bytes(1000)
    good = zstandard.ZstdCompressor().compress(plane)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(plane)
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    codec = get_codec("bf16+zstd")
    assert bits(codec.decode(forged(1000, good), 1000)) == [0] * 1000
    claims = struct.pack("<II", 0x184D2A50, 1000)  # skippable, "contents" of just the right size
    for frame in (
        unsized,
        claims,
        claims + b"x",
        good + b"\0",
        good + good,
        skippable + good,
        good[:-1],
        b"x",
    ):
        with pytest.raises(DilocoError) as caught:
            codec.decode(forged(1000, frame), 1000)
        assert caught.value.reason is Reason.CORRUPT


def test_an_unknown_kind_byte_is_refused():
    payload = bytes(get_codec("bf16+zstd").encode(gradient(3)))
    assert payload[0] == 0
    with pytest.raises(DilocoError, match="kind byte 7") as caught:
        get_codec("bf16+zstd").decode(b"\7" + payload[1:], 3)
    assert caught.value.reason is Reason.CORRUPT


def test_a_stored_plane_cut_short_is_refused():
    payload = b"\0" + bytes(1000) + bytes(999)
    with pytest.raises(DilocoError, match="kind byte 0") as caught:
        get_codec("bf16+zstd").decode(payload, 1000)
    assert caught.value.reason is Reason.CORRUPT
