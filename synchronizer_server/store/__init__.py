"""Durable round records and fragments (design section 6)."""

from synchronizer_server.store.base import RoundStore, RunDescription
from synchronizer_server.store.disk import DiskStore
from synchronizer_server.store.envelope import Durability
from synchronizer_server.store.manifest import Manifest
from synchronizer_server.store.memory import MemoryStore

__all__ = [
    "DiskStore",
    "Durability",
    "Manifest",
    "MemoryStore",
    "RoundStore",
    "RunDescription",
]
