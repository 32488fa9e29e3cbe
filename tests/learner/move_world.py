"""Several synchronizers in memory, in virtual time, and a learner that knows their addresses."""

from __future__ import annotations

import asyncio
import functools
import random

from learner_kit import NAME, make_model, make_settings
from scripted_synchronizer import ScriptedSynchronizer

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.scripted_world import run_in_virtual_time
from learner_client import Learner, Runtime
from learner_client.transport import InMemoryTransport

A, B, C = "127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"


def no_leader(term: int = 1, **details: object) -> DilocoError:
    return DilocoError(Reason.NOT_LEADING, "it follows", term=term, **details)


class World:
    """Synchronizers by address, in memory, and what a learner did about them."""

    def __init__(self, num: int = 2, **settings: object) -> None:
        defaults = {"codec_up": "fp32", "lease_timeout_s": 1.0}
        made = make_settings(**(defaults | settings))
        self.at = {a: ScriptedSynchronizer(made) for a in (A, B, C)[:num]}
        self.model = make_model()
        self.moves = []
        self.open = 0
        for service in list(self.at.values())[1:]:
            self.follow(service)

    def follow(self, service: ScriptedSynchronizer, term: int = 1, **details: object) -> None:
        rpcs = ("GetRun", "Join", "Report", "Push", "Watch")
        service.refuses = {rpc: no_leader(term, **details) for rpc in rpcs}

    def take_over(self, address: str, term: int, before: str = A) -> ScriptedSynchronizer:
        """Makes a follower the leader, with all that was published by the one before."""
        service, last = self.at[address], self.at[before]
        service.layout, service.published = last.layout, dict(last.published)
        service.term, service.refuses = term, {}
        return service

    def connect(self, address: str) -> InMemoryTransport:
        if address not in self.at:
            raise AssertionError(f"nobody knows {address}")
        world = self

        class Counted(InMemoryTransport):
            async def aclose(self) -> None:
                world.open -= 1
                await super().aclose()

        self.open += 1
        return Counted(self.at[address], self.at[address])

    def learner(self, **changes: object) -> Learner:
        defaults = {
            "learner_id": NAME,
            "address": [a for a in self.at if a != C],
            "connect": self.connect,
            "runtime": Runtime(sleep=asyncio.sleep, rng=random.Random(1), has_threads=False),
            "join_timeout_s": 600.0,
            "on_move": self.moves.append,
        }
        return Learner(self.model, **(defaults | changes))


def virtual(test):
    """Runs a test in virtual time, where minutes pass at once."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        run_in_virtual_time(test(*args, **kwargs))

    return run
