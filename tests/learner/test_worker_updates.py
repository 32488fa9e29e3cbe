"""Nothing that comes down the watch stream is trusted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.codecs import CHUNK_BYTES, codec_names, get_codec, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Strategy, TensorSpec, build_layout
from decoupled_diloco.v1 import synchronizer_pb2, types_pb2
from decoupled_diloco.versions import Version, digest_of
from learner_client.buffers import BufferPool
from learner_client.updates import StagedUpdate, UpdateStager, apply_update

LAYOUT = build_layout(
    [TensorSpec(name=f"t{i}", shape=(i + 2, 3), dtype="float32") for i in range(4)],
    strategy=Strategy.BALANCED,
    num_fragments=3,
    overlap=1,
)


def sha(vector: torch.Tensor) -> bytes:
    return digest_of(vector.numpy().tobytes())


def full(fragment: int, vector: torch.Tensor, codec: str = "fp32"):
    payload = get_codec(codec).encode(vector)
    header = synchronizer_pb2.UpdateHeader(
        kind=synchronizer_pb2.UPDATE_KIND_FULL,
        fragment=fragment,
        result=types_pb2.Version(term=1, global_step=3, digest=sha(vector)),
        encoding=types_pb2.Encoding(
            codec=codec,
            num_elements=vector.numel(),
            payload_bytes=len(payload),
            digest=payload_digest(payload),
        ),
    )
    return header, bytes(payload)


def vector_of(fragment: int) -> torch.Tensor:
    return torch.arange(LAYOUT.fragments[fragment].num_elements, dtype=torch.float32)


@given(st.sampled_from(["fp32", "fp32+zstd"]), st.integers(0, 2), st.data())
def test_a_whole_fragment_comes_through_however_it_is_cut(codec, fragment, data):
    vector = vector_of(fragment)
    header, payload = full(fragment, vector, codec)
    stager = UpdateStager(LAYOUT)
    for _ in range(2):
        stager.header(header)
        staged, offset = None, 0
        while offset < len(payload):
            assert staged is None
            size = data.draw(st.integers(1, len(payload) - offset))
            chunk = types_pb2.Chunk(offset_bytes=offset, data=payload[offset : offset + size])
            staged = stager.chunk(chunk)
            offset += size
        assert staged is not None
        assert torch.equal(apply_update(staged, None), vector)


HEADERS = {
    "group": (lambda h: setattr(h, "group", 1), Reason.UNKNOWN_FRAGMENT),
    "fragment": (lambda h: setattr(h, "fragment", 3), Reason.UNKNOWN_FRAGMENT),
    "kind": (lambda h: setattr(h, "kind", 0), Reason.MALFORMED),
    "elements": (lambda h: setattr(h.encoding, "num_elements", 2**40), Reason.MALFORMED),
    "size": (lambda h: setattr(h.encoding, "payload_bytes", 2**40), Reason.OVERSIZED),
    "lossy": (lambda h: setattr(h.encoding, "codec", "bf16"), Reason.CODEC_MISMATCH),
    "codec": (lambda h: setattr(h.encoding, "codec", "gzip"), Reason.CODEC_MISMATCH),
    "digest": (lambda h: setattr(h.result, "digest", b"short"), Reason.MALFORMED),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_right_is_refused_before_anything_is_allocated(name):
    spoil, reason = HEADERS[name]
    header, _ = full(1, vector_of(1))
    spoil(header)
    with pytest.raises(DilocoError) as caught:
        UpdateStager(LAYOUT).header(header)
    assert caught.value.reason is reason


def test_a_delta_of_an_unknown_codec_is_refused():
    header, _ = full(1, vector_of(1))
    header.kind = synchronizer_pb2.UPDATE_KIND_DELTA
    header.base.digest = bytes(32)
    header.encoding.codec = "gzip"
    with pytest.raises(DilocoError, match="gzip"):
        UpdateStager(LAYOUT).header(header)


def test_chunks_out_of_place_are_refused():
    header, payload = full(1, vector_of(1))
    with pytest.raises(DilocoError, match="before the header"):
        UpdateStager(LAYOUT).chunk(types_pb2.Chunk(data=payload))
    for chunk, reason in [
        (types_pb2.Chunk(offset_bytes=4, data=payload[4:]), Reason.OFFSET_MISMATCH),
        (types_pb2.Chunk(data=payload + b"x"), Reason.OVERSIZED),
        (types_pb2.Chunk(data=b""), Reason.MALFORMED),
        (types_pb2.Chunk(data=bytes(CHUNK_BYTES + 1)), Reason.MALFORMED),
        (types_pb2.Chunk(data=bytes(len(payload))), Reason.CORRUPT),
    ]:
        stager = UpdateStager(LAYOUT)
        stager.header(header)
        with pytest.raises(DilocoError) as caught:
            stager.chunk(chunk)
        assert caught.value.reason is reason
    stager = UpdateStager(LAYOUT)
    stager.header(header)
    with pytest.raises(DilocoError, match="before the one before it"):
        stager.header(header)


@settings(max_examples=200)
@given(
    st.lists(
        st.builds(
            synchronizer_pb2.UpdateHeader,
            kind=st.integers(0, 2),
            group=st.integers(0, 1),
            fragment=st.integers(0, 4),
            base=st.builds(types_pb2.Version, digest=st.sampled_from([bytes(32), b""])),
            result=st.builds(types_pb2.Version, digest=st.sampled_from([bytes(32), b""])),
            encoding=st.builds(
                types_pb2.Encoding,
                codec=st.sampled_from([*codec_names(), "", "x"]),
                num_elements=st.integers(0, 30),
                payload_bytes=st.integers(0, 100),
                digest=st.binary(max_size=32),
            ),
        )
        | st.builds(types_pb2.Chunk, offset_bytes=st.integers(0, 5), data=st.binary(max_size=80)),
        max_size=6,
    )
)
def test_nonsense_raises_our_errors_only(messages):
    stager = UpdateStager(LAYOUT)
    for message in messages:
        try:
            if isinstance(message, types_pb2.Chunk):
                staged = stager.chunk(message)
                if staged is not None:
                    apply_update(staged, None)
            else:
                stager.header(message)
        except DilocoError:
            return


@given(st.sampled_from(["fp32", "bf16", "bf16+zstd"]), st.integers(0, 100))
def test_a_delta_is_decoded_and_added_to_what_is_held_which_stays_as_it_is(codec, seed):
    generator = torch.Generator().manual_seed(seed)
    held, delta = torch.randn(9, generator=generator), torch.randn(9, generator=generator)
    kept = held.clone()
    payload = get_codec(codec).encode(delta)
    expected = held + get_codec(codec).decode(payload, 9)
    update = StagedUpdate(
        fragment=0,
        base=Version(1, 1, sha(held)),
        result=Version(1, 2, sha(expected)),
        codec=codec,
        num_elements=9,
        payload=memoryview(payload),
    )
    assert sha(apply_update(update, (Version(1, 1, sha(held)), held))) == sha(expected)
    assert torch.equal(held, kept)


@pytest.mark.parametrize(
    ("held_version", "result", "reason"),
    [
        (None, None, Reason.BASE_MISMATCH),
        (Version(1, 1, bytes(32)), None, Reason.BASE_MISMATCH),
        ("right", Version(1, 2, bytes(32)), Reason.DIGEST_MISMATCH),
    ],
)
def test_digests_decide(held_version, result, reason):
    held = torch.ones(4)
    right = Version(1, 1, sha(held))
    version = right if held_version == "right" else held_version
    update = StagedUpdate(
        fragment=2,
        base=right,
        result=result or Version(1, 2, sha(held + 1)),
        codec="fp32",
        num_elements=4,
        payload=memoryview(get_codec("fp32").encode(torch.ones(4))),
    )
    with pytest.raises(DilocoError) as caught:
        apply_update(update, None if version is None else (version, held))
    assert caught.value.reason is reason
    assert caught.value.details["fragment"] == "2"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=40))
def test_the_buffer_pool_never_lends_a_buffer_twice_and_keeps_few(moves):
    pool, lent = BufferPool(3), []
    for is_take, size in moves:
        if is_take or not lent:
            buffer = pool.take(size)
            assert buffer.numel() >= size
            assert all(buffer is not other for other in lent)
            lent.append(buffer)
        else:
            pool.give(lent.pop(size % len(lent)))
        assert len(pool) <= 3
