"""Who is alive: heartbeats, incarnations and quorum, in memory or in Redis (design section 6)."""

from synchronizer_server.membership.base import Member, Membership
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.membership.redis import RedisMembership

__all__ = ["Member", "Membership", "MemoryMembership", "RedisMembership"]
