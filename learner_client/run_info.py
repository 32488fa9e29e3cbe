"""Asks a synchronizer for the run before there is a model: settings of run and trainer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION, RunSettings
from decoupled_diloco.settings_proto import settings_from_proto
from decoupled_diloco.v1 import admin_pb2
from learner_client.core.retry import Backoff
from learner_client.dialling import search_for
from learner_client.transport.base import Transport

_LOG = logging.getLogger(__name__)


async def fetch_settings(transport: Transport) -> RunSettings:
    """Returns the settings of the run that is served.

    Raises:
        DilocoError: as the synchronizer says it, ``UNAVAILABLE`` where it does not answer.
    """
    response = await transport.get_run(admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION))
    return settings_from_proto(response.settings)


def wait_for_settings(
    address: str | Sequence[str], *, timeout_s: float | None = 300.0, insecure: bool = False
) -> RunSettings:
    """The same, waiting for a synchronizer that is not there yet. Not within an event loop.

    Args:
        address: ``host:port`` of the synchronizer; of several, as a sequence or separated by
            commas: the one that leads is asked.
        timeout_s: longest wait; None waits without end.
        insecure: True where plaintext to another machine was asked for.

    Raises:
        DilocoError: the last error once ``timeout_s`` has passed, or one that no waiting heals.
    """
    return asyncio.run(_wait(address, timeout_s, insecure=insecure))


async def _wait(
    address: str | Sequence[str], timeout_s: float | None, *, insecure: bool
) -> RunSettings:
    search = search_for(address, name="settings", insecure=insecure)
    backoff, last = Backoff(), None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return settings_from_proto((await search.find()).settings)
                except DilocoError as error:
                    if not error.entry.retry:
                        raise
                    if last is None or last.reason is not error.reason:
                        _LOG.info("waiting for the synchronizer at %s: %s", address, error)
                    last = error
                await asyncio.sleep(backoff.failed(random.random()))
    except TimeoutError:
        raise last or DilocoError(
            Reason.UNAVAILABLE, f"{address} did not answer within {timeout_s} s"
        ) from None
    finally:
        await search.transport.aclose()
