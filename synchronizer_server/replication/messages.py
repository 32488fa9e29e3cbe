"""Round records with their tensors as messages, and back, checked as if a stranger had sent them.

A record comes first; then its fragments, ascending, each as three tensors in the order of
`TENSOR_NAMES`; each tensor is a header and chunks of at most 1 MiB. Every codec in use is lossless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

import torch

from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.codecs import CHUNK_BYTES, Payload, Stager, get_codec, iter_chunks
from decoupled_diloco.codecs.chunks import payload_digest
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.layout import Layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.wire import malformed
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.strict_json import canonical_json, strict_json
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import RunDescription

TENSOR_NAMES: Final = ("published", "residual", "momentum")
LOSSLESS: Final = ("fp32", "fp32+zstd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A record, and the fragments that go with it.

    Attributes:
        record: the record.
        fragments: states of some or all of its fragments, at the record's versions.
    """

    record: RoundRecord
    fragments: Mapping[int, FragmentState]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedTensor:
    """One tensor, encoded.

    Attributes:
        header: the message that announces it.
        payload: what its chunks carry.
    """

    header: pb.ReplicateResponse
    payload: Payload

    def messages(self) -> Iterator[pb.ReplicateResponse]:
        """Header, then chunks."""
        yield self.header
        offset = 0
        for data in iter_chunks(self.payload):
            chunk = types_pb2.Chunk(offset_bytes=offset, data=bytes(data))
            yield pb.ReplicateResponse(chunk=chunk)
            offset += len(data)


# -- the leader's side ----------------------------------------------------------------------------


def challenge_message(claim: Claim, nonce: bytes) -> pb.ReplicateResponse:
    """Says who leads, and what a standby must sign."""
    challenge = pb.ReplicateChallenge(claim=claim.to_proto(), nonce=nonce)
    return pb.ReplicateResponse(challenge=challenge)


def run_message(
    claim: Claim, description: RunDescription | None, settings: RunSettings, *, proof: bytes
) -> pb.ReplicateResponse:
    """Describes the run; without a description before the first Join.

    Args:
        claim: the leader's claim.
        description: description of the run, as the store keeps it.
        settings: settings of the run.
        proof: the leader's, for this stream.
    """
    run = pb.ReplicateRun(
        claim=claim.to_proto(),
        description_json="" if description is None else canonical_json(description),
        settings_json=canonical_json(_settings_text(settings)),
        proof=proof,
    )
    return pb.ReplicateResponse(run=run)


def state_message(*, in_sync: bool) -> pb.ReplicateResponse:
    """Tells a standby where it stands."""
    return pb.ReplicateResponse(state=pb.ReplicaState(in_sync=in_sync))


def record_message(claim: Claim, transfer: Transfer) -> pb.ReplicateResponse:
    """Announces a record; its tensors follow."""
    record = pb.ReplicateRecord(
        claim=claim.to_proto(),
        group=transfer.record.group,
        global_step=transfer.record.global_step,
        record_json=transfer.record.to_json(),
        num_tensors=len(transfer.fragments) * len(TENSOR_NAMES),
    )
    return pb.ReplicateResponse(record=record)


def encode_tensor(fragment: int, name: str, tensor: torch.Tensor, codec: str) -> EncodedTensor:
    """Encodes one tensor, fp32 [n], without loss. Takes a while: not for the event loop."""
    assert codec in LOSSLESS, codec
    payload = get_codec(codec).encode(tensor.contiguous())
    encoding = types_pb2.Encoding(
        codec=codec,
        num_elements=tensor.numel(),
        payload_bytes=len(payload),
        digest=payload_digest(payload),
    )
    header = pb.ReplicateTensor(fragment=fragment, name=name, encoding=encoding)
    return EncodedTensor(header=pb.ReplicateResponse(tensor=header), payload=payload)


def _settings_text(settings: RunSettings) -> dict[str, object]:
    """Settings by name, as text: an infinity has no place in JSON."""
    return {name: str(value) for name, value in asdict(settings).items()}


# -- the standby's side ---------------------------------------------------------------------------


def check_settings(text: str, ours: RunSettings) -> None:
    """Compares the leader's settings with ours.

    Raises:
        DilocoError: MALFORMED; UsageError CONFIG_CONFLICT, naming the settings that differ.
    """
    theirs = _json_object(text, "settings of the run")
    mine = _settings_text(ours)
    different = [
        f"{name} is {mine.get(name, 'not known')} here and {theirs.get(name, 'not known')} at the "
        "leader"
        for name in sorted({*mine, *theirs})
        if name not in mine or name not in theirs or mine[name] != theirs[name]
    ]
    if different:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"{'; '.join(different)}: start all synchronizers of a run with the same settings",
        )


def description_from(text: str) -> RunDescription | None:
    """Reads the description of a run; None where it is not known yet.

    Raises:
        DilocoError: MALFORMED.
    """
    return _json_object(text, "description of the run") if text else None


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        value = strict_json(text, what)
    except DilocoError as error:
        raise malformed(error.message) from error
    if not isinstance(value, dict):
        raise malformed(f"the {what} is no JSON object")
    return value


class RecordStager:
    """Puts records together from a stream of messages; holds one at a time.

    Memory is bounded by the layout: no header can claim more than the fragment has, no record more
    than three tensors per fragment. The first message that is wrong ends the stream.

    Args:
        layout: the run's fragments and their sizes.
        claim: the leader's claim, checked: every record must come under it.
    """

    def __init__(self, layout: Layout, claim: Claim) -> None:
        self._layout = layout
        self._claim = claim
        self._record: RoundRecord | None = None
        self._num_due = 0
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._header: pb.ReplicateTensor | None = None
        self._stager: Stager | None = None

    @property
    def idle(self) -> bool:
        """True between two records."""
        return self._record is None

    def record(self, message: pb.ReplicateRecord) -> Transfer | None:
        """Starts a record; returns it at once where nothing comes with it.

        Raises:
            DilocoError: why it cannot be right.
        """
        if self._record is not None:
            raise DilocoError(
                Reason.TRUNCATED, "a record started before the one before it was complete"
            )
        if claim_from(message.claim) != self._claim:
            raise DilocoError(Reason.BAD_CLAIM, "a record came under another claim of leadership")
        try:
            record = RoundRecord.from_json(message.record_json)
        except DilocoError as error:
            raise malformed(f"a record that cannot be read: {error.message}") from error
        self._check_record(message, record)
        if message.num_tensors % len(TENSOR_NAMES) != 0 or (
            message.num_tensors > len(TENSOR_NAMES) * self._layout.num_fragments
        ):
            raise malformed(f"a record with {message.num_tensors} tensors")
        self._record, self._num_due, self._tensors = record, message.num_tensors, {}
        return self._complete()

    def _check_record(self, message: pb.ReplicateRecord, record: RoundRecord) -> None:
        expected: dict[str, tuple[object, object]] = {
            "run_id": (record.run_id, self._claim.run_id),
            "group": ((record.group, message.group), (0, 0)),
            "term": (record.term, self._claim.term),
            "global_step": (record.global_step, message.global_step),
            "number of fragments": (len(record.versions), self._layout.num_fragments),
            "layout_fingerprint": (record.layout_fingerprint, self._layout.fingerprint),
        }
        for name, (found, due) in expected.items():
            if found != due:
                raise malformed(f"a record whose {name} is {found!r}, not {due!r}")

    def tensor(self, message: pb.ReplicateTensor) -> None:
        """Starts a tensor.

        Raises:
            DilocoError: why it cannot be right.
        """
        if self._record is None or self._num_due == 0:
            raise malformed("a tensor that belongs to no record")
        if self._stager is not None:
            raise DilocoError(
                Reason.TRUNCATED, "a tensor started before the one before it was complete"
            )
        fragment, encoding = message.fragment, message.encoding
        if fragment >= self._layout.num_fragments:
            raise DilocoError(
                Reason.UNKNOWN_FRAGMENT,
                f"a tensor of fragment {fragment}; there are {self._layout.num_fragments}",
            )
        due = self._due_name(fragment)
        if message.name != due:
            raise malformed(f"tensor {message.name[:40]!r} of fragment {fragment}, {due!r} is due")
        num_elements = self._layout.fragments[fragment].num_elements
        if encoding.num_elements != num_elements:
            raise malformed(
                f"a tensor of fragment {fragment} with {encoding.num_elements} elements; it has "
                f"{num_elements}"
            )
        if encoding.codec not in LOSSLESS:
            raise DilocoError(
                Reason.CODEC_MISMATCH,
                f"a tensor in codec {encoding.codec[:40]!r}; only {' and '.join(LOSSLESS)} are "
                "lossless",
            )
        least, most = get_codec(encoding.codec).payload_bounds(num_elements)
        if encoding.payload_bytes < least:
            raise malformed(f"a tensor of {encoding.payload_bytes} bytes, at least {least} are due")
        self._stager = Stager(encoding.payload_bytes, encoding.digest, most)
        self._header = message

    def _due_name(self, fragment: int) -> str | None:
        """The tensor that may come next of a fragment; None where it is not its turn."""
        newest = next(reversed(self._tensors), None)
        if newest is None:
            return TENSOR_NAMES[0]
        num_here = len(self._tensors[newest])
        if num_here < len(TENSOR_NAMES):
            return TENSOR_NAMES[num_here] if fragment == newest else None
        return TENSOR_NAMES[0] if fragment > newest else None

    def chunk(self, chunk: types_pb2.Chunk) -> bool:
        """Adds a chunk; returns True once the tensor is complete in wire format: then `decode`.

        Raises:
            DilocoError: where the chunk is not the next one.
        """
        if self._stager is None or self._header is None:
            raise malformed("a chunk that belongs to no tensor")
        if not 0 < len(chunk.data) <= CHUNK_BYTES:
            raise malformed(f"a chunk of {len(chunk.data)} bytes; 1 to {CHUNK_BYTES} are due")
        self._stager.add(chunk.offset_bytes, chunk.data)
        return self._stager.num_bytes == self._header.encoding.payload_bytes

    def decode(self) -> Transfer | None:
        """Decodes and checks a complete tensor; returns the record where that was its last one.

        Takes a while: not for the event loop.

        Raises:
            DilocoError: CORRUPT, NON_FINITE, or DIGEST_MISMATCH where a published copy is not the
                one of the record.
        """
        assert self._stager is not None, "complete"
        assert self._header is not None, "complete"
        assert self._record is not None, "complete"
        header, payload = self._header, self._stager.finish()
        self._header = self._stager = None
        fragment = header.fragment
        vector = get_codec(header.encoding.codec).decode(payload, header.encoding.num_elements)
        if not torch.isfinite(vector).all():
            raise DilocoError(
                Reason.NON_FINITE, f"{header.name} of fragment {fragment} holds NaN or infinity"
            )
        tensors = self._tensors.setdefault(fragment, {})
        tensors[header.name] = vector
        self._num_due -= 1
        if len(tensors) == len(TENSOR_NAMES):
            self._check_digest(fragment)
        return self._complete()

    def _check_digest(self, fragment: int) -> None:
        assert self._record is not None, "under way"
        version = self._record.versions[fragment]
        if FragmentState(**self._tensors[fragment]).digest() != version.digest:
            raise DilocoError(
                Reason.DIGEST_MISMATCH,
                f"the published copy of fragment {fragment} is not version {version} of the "
                "record; it is sent again",
                fragment=fragment,
            )

    def _complete(self) -> Transfer | None:
        record = self._record
        if record is None or self._num_due > 0:
            return None
        fragments = {p: FragmentState(**tensors) for p, tensors in self._tensors.items()}
        self._record, self._tensors = None, {}
        return Transfer(record=record, fragments=fragments)
