"""Runs the worlds of some seeds: ``python -m diloco_fleet.simulation SEED [SEED ...]``."""

from __future__ import annotations

import sys

from diloco_fleet.simulation.world import run_world


def main(seeds: list[str]) -> int:
    """Prints what became of each; a world that fails raises."""
    for seed in seeds:
        outcome = run_world(int(seed))
        sys.stdout.write(f"{outcome}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
