"""Cuts containers off by taking them off the networks that they share with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diloco_fleet.chaos.docker_fleet import ComposedFleet, call_engine, exists
from diloco_fleet.chaos.undo import Undoing

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container
    from docker.models.networks import Network

Keep = Callable[[Undoing], None]
"""Takes what undoes something, before that is done."""


def networks_of(container: Container) -> dict[str, dict[str, Any]]:
    """The networks of a container by name, with its addresses and aliases there."""
    found: dict[str, dict[str, Any]] = container.attrs["NetworkSettings"]["Networks"]
    return found


class Partitions:
    """Cuts off groups of a composed fleet.

    Args:
        client: the engine.
        fleet: the containers.
    """

    def __init__(self, client: DockerClient, fleet: ComposedFleet) -> None:
        self._client = client
        self._fleet = fleet

    def cut(self, number: int, groups: tuple[tuple[str, ...], ...], keep: Keep) -> None:
        """Takes the first group off every network that it shares with the second one.

        Where it is more than one, its members get a network of their own, under the same names.

        Args:
            number: of the strike.
            groups: names of both groups.
            keep: see `Keep`.

        Raises:
            DilocoError: why the engine does not do it.
        """
        one, other = groups
        there = self._fleet.there()
        elsewhere = {
            network
            for name in other
            if name in there
            for network in networks_of(self._fleet.container(name))
        }
        aliases: dict[str, list[str]] = {}
        for name in one:
            container = self._fleet.container(name)
            for network_name, settings in list(networks_of(container).items()):
                if network_name in elsewhere:
                    aliases.setdefault(name, []).extend(settings.get("Aliases") or ())
                    self._take_off(container, network_name, settings, keep)
        if len(one) > 1:
            self._give_network(number, aliases, keep)

    def _take_off(
        self, container: Container, network_name: str, settings: Mapping[str, Any], keep: Keep
    ) -> None:
        network = call_engine(lambda: self._client.networks.get(network_name), network_name)
        fixed = settings.get("IPAMConfig") or {}

        def put_back() -> None:
            # Made anew, it is on its networks already.
            if exists(container) and network_name not in networks_of(container):
                call_engine(
                    lambda: network.connect(
                        container,
                        aliases=settings.get("Aliases") or [],
                        ipv4_address=fixed.get("IPv4Address"),
                        ipv6_address=fixed.get("IPv6Address"),
                        driver_opt=settings.get("DriverOpts"),
                    ),
                    str(container.name),
                )

        keep(put_back)
        call_engine(lambda: network.disconnect(container, force=True), str(container.name))

    def _give_network(self, number: int, aliases: Mapping[str, list[str]], keep: Keep) -> None:
        name = f"{self._fleet.project}-chaos-{number}"
        network = call_engine(lambda: self._client.networks.create(name, internal=True), name)
        keep(lambda: call_engine(network.remove, name))
        for member, names in aliases.items():
            container = self._fleet.container(member)
            keep(self._leaving(network, container))
            call_engine(
                lambda container=container, names=names: network.connect(container, aliases=names),
                member,
            )

    @staticmethod
    def _leaving(network: Network, container: Container) -> Undoing:
        def leave() -> None:
            # One that does not run is not listed by the network, and would keep it all the same.
            if exists(container) and network.name in networks_of(container):
                call_engine(lambda: network.disconnect(container, force=True), str(container.name))

        return leave
