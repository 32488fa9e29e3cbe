"""Who is alive and who leads: heartbeats, incarnations, quorum and the lease (design section 6)."""

from synchronizer_server.membership.base import Member, Membership, Roll
from synchronizer_server.membership.lease_base import LeaseKeeper, LeaseView
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.membership.memory_lease import MemoryLease
from synchronizer_server.membership.memory_server import Link, MemoryLeaseServer
from synchronizer_server.membership.redis import RedisMembership
from synchronizer_server.membership.redis_client import RedisClient
from synchronizer_server.membership.redis_lease import RedisLease

__all__ = [
    "LeaseKeeper",
    "LeaseView",
    "Link",
    "Member",
    "Membership",
    "MemoryLease",
    "MemoryLeaseServer",
    "MemoryMembership",
    "RedisClient",
    "RedisLease",
    "RedisMembership",
    "Roll",
]
