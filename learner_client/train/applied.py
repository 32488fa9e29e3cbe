"""Which versions a learner has applied, for its metrics: what a run has lost can be counted."""

from __future__ import annotations

from collections.abc import Mapping

from decoupled_diloco.versions import Version


class AppliedVersions:
    """Tells what is new since the last look."""

    def __init__(self) -> None:
        self._known: dict[int, Version] = {}

    def news(self, versions: Mapping[int, Version]) -> list[list[object]]:
        """Returns fragment, term, global step and digest (hex) of what was applied since.

        Args:
            versions: version applied of each fragment, by index.
        """
        fresh = {p: v for p, v in sorted(versions.items()) if self._known.get(p) != v}
        self._known.update(fresh)
        return [[p, v.term, v.global_step, v.digest.hex()] for p, v in fresh.items()]
