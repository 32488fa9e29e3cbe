"""A link between any two processes of a fleet: those that ``diloco run`` starts, with the addresses
of links in place of one another's, and what disturbs these links, each disturbance by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from decoupled_diloco.config import ENV_PREFIX
from diloco_fleet.chaos.proxy import Link, Proxies
from diloco_fleet.plan import Plan
from diloco_fleet.process import ProcessSpec
from diloco_fleet.standby import REDIS

_REDIS_VARIABLE: Final = f"{ENV_PREFIX}REDIS"

Disturb = Callable[[Link], None]
"""Does something to a link."""


class Wiring:
    """The links of a fleet, one per pair of who connects and who listens.

    Args:
        proxies: opens the links.
        plan: what would be started without links.
    """

    def __init__(self, proxies: Proxies, plan: Plan) -> None:
        self._proxies = proxies
        self._listens = dict(
            zip((spec.name for spec in plan.synchronizers), plan.addresses, strict=True)
        )
        if plan.redis is not None:
            url = urlsplit(plan.redis.url)
            self._listens[REDIS] = f"{url.hostname}:{url.port}"
        self._links: dict[tuple[str, str], Link] = {}
        self._disturbances: dict[int, list[tuple[Link, Disturb]]] = {}

    def wired(self, spec: ProcessSpec) -> ProcessSpec:
        """The process with links in place of the addresses to which it connects."""
        command = list(spec.command)
        flag = "--peers" if spec.name in self._listens else "--address"
        if flag in command:
            place = command.index(flag) + 1
            command[place] = self._replaced(spec.name, command[place])
        if "--advertise" in command:
            # What others learn of it must not lead round their links.
            place = command.index("--advertise") + 1
            command[place] = self._advertised(spec.name, command[place])
        environment = dict(spec.environment)
        if _REDIS_VARIABLE in environment:
            url = environment[_REDIS_VARIABLE]
            environment[_REDIS_VARIABLE] = self._replaced(spec.name, url)
        return dataclasses.replace(spec, command=tuple(command), environment=environment)

    def _advertised(self, name: str, address: str) -> str:
        """The link by which the other synchronizer gets here."""
        other = next(x for x in self._listens if x not in {name, REDIS})
        return self._link(other, name, address).address

    def _link(self, connects: str, listens: str, address: str) -> Link:
        if (connects, listens) not in self._links:
            link = self._proxies.link(f"{connects} to {listens}", address)
            self._links[connects, listens] = link
        return self._links[connects, listens]

    def _replaced(self, connects: str, text: str) -> str:
        for listens, address in self._listens.items():
            if address in text:
                text = text.replace(address, self._link(connects, listens, address).address)
        return text

    def between(self, one: str, other: str) -> list[tuple[Link, bool]]:
        """Links between two processes, each with "the first one connects"; may be none."""
        pairs = (((one, other), True), ((other, one), False))
        return [(self._links[pair], up) for pair, up in pairs if pair in self._links]

    def peers_of(self, process: str) -> set[str]:
        """Everybody with whom a process has a link."""
        return {other for pair in self._links if process in pair for other in pair} - {process}

    def links_of(self, process: str) -> list[Link]:
        """Every link of a process."""
        return [link for pair, link in self._links.items() if process in pair]

    def disturb(self, number: int, links: list[Link], how: Disturb) -> None:
        """Disturbs links, beside whatever else disturbs them, until `heal` of the same number."""
        self._disturbances.setdefault(number, []).extend((link, how) for link in links)
        for link in links:
            how(link)

    def heal(self, number: int) -> None:
        """Ends one disturbance; the others of the same links go on."""
        remaining = [
            entry for x, entries in self._disturbances.items() if x != number for entry in entries
        ]
        for link, _ in self._disturbances.get(number, []):
            link.heal()
            for other, how in remaining:
                if other is link:
                    how(link)
        # Not before: what fails above is tried again.
        self._disturbances.pop(number, None)
