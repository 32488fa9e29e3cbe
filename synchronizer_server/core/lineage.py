"""Lineage: which versions of a fragment follow one another, and who is merged into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from decoupled_diloco.versions import Version


class Place(StrEnum):
    """Where somebody's version stands on our lineage."""

    CURRENT = "current"
    RETAINED = "retained"
    STALE = "stale"
    FOREIGN = "foreign"


class Lineage:
    """Current and retained versions of every fragment.

    Args:
        versions: the current version of each fragment; empty before the seed.
        num_retained: older versions that are kept per fragment, besides the current one.
    """

    def __init__(self, versions: Sequence[Version], num_retained: int) -> None:
        self._num_retained = num_retained
        self._chains: list[deque[Version]] = []
        self._contributed: list[dict[str, int]] = []
        self.start(versions)

    def start(self, versions: Sequence[Version]) -> None:
        """Begins with these versions; nothing older is retained."""
        self._chains = [deque([v], maxlen=self._num_retained + 1) for v in versions]
        self._contributed = [{} for _ in versions]

    @property
    def num_fragments(self) -> int:
        """Fragments that have a version."""
        return len(self._chains)

    def current(self, fragment: int) -> Version:
        """The published version of a fragment."""
        return self._chains[fragment][-1]

    def vector(self) -> tuple[Version, ...]:
        """The published version of every fragment."""
        return tuple(chain[-1] for chain in self._chains)

    def advance(self, fragment: int, version: Version) -> None:
        """A new version is published."""
        self._chains[fragment].append(version)

    def before(self, fragment: int) -> Version | None:
        """The newest retained version with another content than the current one, or None."""
        chain = self._chains[fragment]
        return next((v for v in reversed(chain) if v.digest != chain[-1].digest), None)

    def retains(self, fragment: int, version: Version) -> bool:
        """Whether a version is the current one or a retained one."""
        return version in self._chains[fragment]

    def restart(self, fragment: int, version: Version) -> None:
        """A version is published that replaces those before instead of building on them.

        Nothing older is a base any more: carried over to the new copy, an outer gradient against
        a replaced one would bring it back.
        """
        chain = self._chains[fragment]
        chain.clear()
        chain.append(version)

    def place(self, fragment: int, version: Version) -> Place:
        """Where ``version`` stands. The digest decides; a number alone proves nothing.

        An older number that is no longer retained is stale even with the current digest: rounds
        that left the copy as it was may have merged what its holder trained since.
        """
        chain = self._chains[fragment]
        older = version.global_step < chain[-1].global_step and version not in chain
        if version.digest == chain[-1].digest:
            return Place.STALE if older else Place.CURRENT
        if not older and self._match(fragment, version) is not None:
            return Place.RETAINED
        ours = {(v.term, v.global_step) for v in chain}
        foreign = (version.term, version.global_step) in ours
        newer = (version.term, version.global_step) > (chain[-1].term, chain[-1].global_step)
        return Place.FOREIGN if foreign or newer else Place.STALE

    def contribute(self, fragment: int, learner_id: str, global_step: int) -> None:
        """A contribution of this learner is accumulated for the round of ``global_step``."""
        self._contributed[fragment][learner_id] = global_step

    def contributed_since(self, fragment: int, learner_id: str, base: Version) -> bool:
        """True where local work since ``base`` is already merged, wholly or in part.

        The base of an accepted contribution is always older than the version that it makes, so
        a base below the round contributed to means that its difference holds merged work.
        """
        accepted = self._contributed[fragment].get(learner_id)
        if accepted is None:
            return False
        # A copy that an update left as it was has two numbers and one digest: the lower counts.
        known = self._match(fragment, base) or base
        return min(base.global_step, known.global_step) < accepted

    def _match(self, fragment: int, version: Version) -> Version | None:
        chain = self._chains[fragment]
        if version in chain:
            return version
        return next((v for v in reversed(chain) if v.digest == version.digest), None)
