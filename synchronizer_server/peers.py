"""Asks the other synchronizers of a run where they stand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import grpc

from decoupled_diloco.channel import open_channel
from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from synchronizer_server.core.lease import Holder, Peer

_DEADLINE_S: Final = 2.0


async def ask_peers(
    addresses: Sequence[str], heard: Callable[[Claim, str], bool], *, insecure: bool
) -> Collection[Peer]:
    """Returns what those that answer say of themselves.

    Args:
        addresses: ``host:port`` of each.
        heard: takes every claim with its address; says whether it is signed.
        insecure: True where plaintext to another machine was asked for.
    """
    answers = await asyncio.gather(*(_status(x, insecure=insecure) for x in addresses))
    peers = []
    for address, status in zip(addresses, answers, strict=True):
        if status is None:
            continue
        leads = None
        claim, is_leading = claim_from(status.claim), status.role == "leading"
        # Who does not lead may have heard of a term that nobody else knows: it is not taken again.
        if heard(claim, address if is_leading else "") and is_leading:
            leads = Holder(term=claim.term, leader_id=claim.leader_id, address=address)
        peers.append(Peer(position=(status.record_term, status.global_step), leads=leads))
    return peers


async def _status(address: str, *, insecure: bool) -> admin_pb2.GetStatusResponse | None:
    channel = open_channel(address, "peers", insecure=insecure)
    try:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_DEADLINE_S)
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close()
