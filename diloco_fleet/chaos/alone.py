"""One fleet takes one experiment at a time: two would heal, and count, each other's faults."""

from __future__ import annotations

import errno
import hashlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from decoupled_diloco.errors import Reason, UsageError


@contextmanager
def alone_at(fleet: str) -> Iterator[None]:
    """Keeps other experiments of this machine away from a fleet.

    An abstract socket is held: it needs no file that every user may write, and the kernel lets it
    go with the process, however that ends. Only Linux has them; elsewhere nobody is kept away.

    Args:
        fleet: what it is called, the same for everybody, in words for people.

    Raises:
        UsageError: CONFIG_CONFLICT where there is one already.
    """
    if sys.platform != "linux":
        yield
        return
    name = b"\0decoupled-diloco-chaos-" + hashlib.sha256(fleet.encode()).hexdigest().encode()
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"another `diloco chaos run` is at work on {fleet}; wait for its end, or stop it",
            ) from error
        yield
