"""Asks the other synchronizers of a run where they stand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import grpc

from decoupled_diloco.channel import open_channel
from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.logs import ChangeLogger
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from synchronizer_server.core.lease import Holder, Peer
from synchronizer_server.proofs import new_nonce, proves_status

logger = logging.getLogger(__name__)

_DEADLINE_S: Final = 2.0


class PeerAsker:
    """Asks peers; believes those that prove that they hold the run's key.

    Args:
        addresses: ``host:port`` of each.
        run_id: the run.
        key: its key.
        heard: takes every claim with its address; says whether it is signed.
        insecure: True where plaintext to another machine was asked for.

    Attributes:
        num_unproven: answers that were not signed with our key for the question they came to.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        run_id: str,
        key: bytes,
        heard: Callable[[Claim, str], bool],
        insecure: bool,
    ) -> None:
        self._addresses = addresses
        self._run_id = run_id
        self._key = key
        self._heard = heard
        self._insecure = insecure
        self._says = ChangeLogger(logger)
        self.num_unproven = 0

    async def ask(self) -> Collection[Peer]:
        """Returns what those that answer say of themselves; a stranger counts as not there."""
        answers = await asyncio.gather(*(self._status(address) for address in self._addresses))
        peers = []
        for address, status in zip(self._addresses, answers, strict=True):
            if status is None:
                continue
            leads = None
            claim, is_leading = claim_from(status.claim), status.role == "leading"
            # Who does not lead may have heard of a term that nobody else knows: it is not taken
            # again.
            if self._heard(claim, address if is_leading else "") and is_leading:
                leads = Holder(term=claim.term, leader_id=claim.leader_id, address=address)
            peers.append(Peer(position=(status.record_term, status.global_step), leads=leads))
        return peers

    async def _status(self, address: str) -> admin_pb2.GetStatusResponse | None:
        channel = open_channel(address, "peers", insecure=self._insecure)
        nonce = new_nonce()
        try:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            request = admin_pb2.GetStatusRequest(nonce=nonce)
            status = await stub.GetStatus(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError:
            return None
        finally:
            await channel.close()
        if proves_status(status, self._key, run_id=self._run_id, nonce=nonce):
            self._says.forget(address)
            return status
        self.num_unproven += 1
        self._says.log(
            address, "BAD_CLAIM",
            f"who answers there does not prove that it holds the key of run {self._run_id!r}: what "
            "it says of itself is not believed; give all synchronizers the same key file",
            level=logging.WARNING,
        )  # fmt: skip
        return None
