"""What stands in the store's files, as bytes: round records, the run's description, fragments.

Every JSON file is an object with a ``checksum``: SHA-256 of the canonical JSON of the rest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import safetensors
import safetensors.torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.strict_json import canonical_json, strict_json
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.store.base import RunDescription
from synchronizer_server.store.manifest import Manifest

STORE_FORMAT: Final = 1
"""Version of the layout on disk; another number is refused."""

Durability = Literal["disk", "standby", "async"]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """The file that holds one fragment's tensors.

    Attributes:
        term: term in whose directory it lies: in which it was written here. That is the term of
            its version, or a later one where a standby got it from the leader of that term.
        global_step: t in its name.
        num_bytes: its size.
        sha256: its digest, hex.
    """

    term: int
    global_step: int
    num_bytes: int
    sha256: str

    def damage(self, data: bytes) -> str | None:
        """Says how ``data`` differs from what was written, or None."""
        if len(data) != self.num_bytes:
            return f"it has {len(data)} bytes, {self.num_bytes} were written"
        if hashlib.sha256(data).hexdigest() != self.sha256:
            return "its contents are not what was written (SHA-256 differs)"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A round record as it lies on disk.

    Attributes:
        record: the record.
        files: one per fragment, in order.
        durability: with which setting it was written.
        forced: True where it was forced out, with all that it names, before it counted.
    """

    record: RoundRecord
    files: tuple[FileRef, ...]
    durability: Durability
    forced: bool


def _corrupt(what: str) -> DilocoError:
    return DilocoError(Reason.STORE_CORRUPT, what)


def _seal(content: dict[str, object]) -> bytes:
    checksum = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return (canonical_json({**content, "checksum": checksum}) + "\n").encode()


def _unseal(data: bytes, keys: set[str]) -> dict[str, Any]:
    """Returns the content of a sealed object with exactly these keys.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    value = strict_json(data, "content")
    if not isinstance(value, dict):
        raise _corrupt("it is not a JSON object")
    content: dict[str, Any] = value
    checksum = content.pop("checksum", None)
    if hashlib.sha256(canonical_json(content).encode()).hexdigest() != checksum:
        raise _corrupt("its checksum does not match its contents")
    if content.get("format") != STORE_FORMAT:
        raise _corrupt(f"format {content.get('format')!r} is not the known format {STORE_FORMAT}")
    if set(content) != keys | {"format"}:
        raise _corrupt(f"its keys are {sorted(content)}")
    # the seal has one spelling: a byte changed in white space or an escape is damage too
    if _seal(content) != data:
        raise _corrupt("it is not spelled as it was written")
    return content


def encode_run(run_id: str, description: RunDescription) -> bytes:
    """Returns the bytes of ``run.json``."""
    return _seal({"format": STORE_FORMAT, "run_id": run_id, "description": description})


def decode_run(data: bytes) -> tuple[str, RunDescription]:
    """Returns run id and description.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    content = _unseal(data, {"run_id", "description"})
    run_id, description = content["run_id"], content["description"]
    if not isinstance(run_id, str) or not isinstance(description, dict):
        raise _corrupt("run_id is not text, or description is not an object")
    return run_id, description


def encode_record(envelope: Envelope) -> bytes:
    """Returns the bytes of a record file."""
    files = [
        {
            "term": ref.term,
            "global_step": ref.global_step,
            "num_bytes": ref.num_bytes,
            "sha256": ref.sha256,
        }
        for ref in envelope.files
    ]
    return _seal(
        {
            "format": STORE_FORMAT,
            "record": envelope.record.to_dict(),
            "files": files,
            "durability": envelope.durability,
            "forced": envelope.forced,
        }
    )


def decode_record(data: bytes) -> Envelope:
    """Reads a record file.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    content = _unseal(data, {"record", "files", "durability", "forced"})
    if content["durability"] not in get_args(Durability):
        raise _corrupt(f"durability {content['durability']!r} is not known")
    if not isinstance(content["forced"], bool):
        raise _corrupt("forced is neither true nor false")
    if not isinstance(content["files"], list):
        raise _corrupt("files is not a list")
    record = RoundRecord.from_dict(content["record"])
    files = tuple(_ref_from(item) for item in content["files"])
    if len(files) != len(record.versions) or not all(
        ref.global_step == version.global_step and version.term <= ref.term <= record.term
        for ref, version in zip(files, record.versions, strict=True)
    ):
        raise _corrupt("its files are not those of its versions")
    return Envelope(
        record=record,
        files=files,
        durability=cast("Durability", content["durability"]),
        forced=content["forced"],
    )


def _ref_from(item: object) -> FileRef:
    if not isinstance(item, dict) or set(item) != {"term", "global_step", "num_bytes", "sha256"}:
        raise _corrupt("an entry of files has other keys")
    numbers = [item["term"], item["global_step"], item["num_bytes"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _corrupt("an entry of files has a number that is none")
    if not isinstance(item["sha256"], str) or not _SHA256.fullmatch(item["sha256"]):
        raise _corrupt("an entry of files has no SHA-256")
    return FileRef(**item)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of a snapshot's manifest."""
    participants = {k: [v.term, v.number] for k, v in manifest.participants.items()}
    return _seal(
        {
            "format": STORE_FORMAT,
            "snapshot": str(manifest.name),
            "run_id": manifest.run_id,
            "group": manifest.group,
            "versions": list(manifest.versions),
            "participants": participants,
            "left_out": dict(manifest.left_out),
        }
    )


def decode_manifest(data: bytes) -> Manifest:
    """Reads a snapshot's manifest.

    Raises:
        DilocoError: ``STORE_CORRUPT``.
    """
    keys = {"snapshot", "run_id", "group", "versions", "participants", "left_out"}
    content = _unseal(data, keys)
    try:
        return Manifest(
            name=SnapshotName.parse(content["snapshot"]),
            run_id=str(content["run_id"]),
            group=int(content["group"]),
            versions=tuple(str(version) for version in content["versions"]),
            participants={
                str(k): Incarnation(int(term), int(number))
                for k, (term, number) in content["participants"].items()
            },
            left_out={str(k): str(v) for k, v in content["left_out"].items()},
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise _corrupt(f"it is no manifest of a snapshot ({error})") from error


def encode_fragment(tensors: FragmentState, record: RoundRecord, fragment: int) -> bytes:
    """Returns a safetensors file with the fragment's three tensors."""
    version = record.versions[fragment]
    metadata = {
        "run": record.run_id,
        "term": str(version.term),
        "global_step": str(version.global_step),
        "fragment": str(fragment),
    }
    # cloned, since tensors that share memory are refused by safetensors
    return safetensors.torch.save(tensors.clone().named(), metadata=metadata)


def decode_fragment(data: bytes) -> FragmentState:
    """Reads a fragment's file.

    Raises:
        DilocoError: ``STORE_CORRUPT`` unless it holds exactly the three fp32 tensors, of one
            length.
    """
    try:
        found = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise _corrupt(f"it is not a safetensors file ({error})") from error
    if set(found) != {"published", "residual", "momentum"}:
        raise _corrupt(f"it holds the tensors {sorted(found)}")
    tensors = FragmentState(**found)
    if (problem := tensors.problem()) is not None:
        raise _corrupt(problem)
    return tensors
