"""Ways to the synchronizers of a run, as users name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decoupled_diloco.channel import require_secure
from decoupled_diloco.errors import Reason, UsageError
from learner_client.addresses import read_addresses
from learner_client.core.leadership import Move
from learner_client.leaders import LeaderSearch
from learner_client.runtime import Runtime
from learner_client.transport.base import Transport
from learner_client.transport.grpc import GrpcTransport


def search_for(
    addresses: str | Sequence[str],
    *,
    name: str,
    run_id: str = "",
    insecure: bool = False,
    transport: Callable[[], Transport] | None = None,
    connect: Callable[[str], Transport] | None = None,
    runtime: Runtime | None = None,
    on_move: Callable[[Move], None] | None = None,
) -> LeaderSearch:
    """Returns the search for the leader among synchronizers.

    Args:
        addresses: ``host:port``, one or several, as a sequence or separated by commas.
        name: who asks, for log lines.
        run_id: run that is looked for; empty takes whichever is served.
        insecure: True where plaintext to another machine was asked for.
        transport: opens the only transport there is; replaces ``addresses``.
        connect: opens another transport than gRPC to one of the addresses.
        runtime: time and chance.
        on_move: called with every move.

    Raises:
        UsageError: ``CONFIG_INVALID`` for no address, ``CONFIG_CONFLICT`` for plaintext elsewhere,
            and for both or neither of addresses and transport.
    """
    if (transport is None) == (not addresses) or (transport is not None and connect is not None):
        raise UsageError(Reason.CONFIG_CONFLICT, "give the synchronizer's address, or a transport")
    known = ("",) if transport is not None else read_addresses(addresses)
    for address in known if transport is None and connect is None else ():
        require_secure(address, insecure=insecure)

    def dial(address: str) -> Transport:
        if transport is not None:
            return transport()
        if connect is not None:
            return connect(address)
        return GrpcTransport(address, insecure=insecure)

    return LeaderSearch(
        name=name,
        addresses=known,
        connect=dial,
        runtime=runtime,
        run_id=run_id,
        insecure=insecure or connect is not None,
        may_learn=transport is None,
        on_move=on_move,
    )
