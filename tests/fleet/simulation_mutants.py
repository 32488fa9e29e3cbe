"""Re-introduces known faults into the shipped code; a simulated fleet must notice each of them.

Run as a script: ``python tests/fleet/simulation_mutants.py [name ...]``. One process imports what
is heavy and forks once per mutant; the child imports the mutated source and runs seeds until one
fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGES = ("synchronizer_server", "learner_client", "diloco_fleet")
MOST_SEEDS = 200


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in ``module``, ``before`` becomes ``after``; ``also`` where two layers guard."""

    name: str
    module: str
    before: str
    after: str
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.module, self.before, self.after), *self.also)


FIRST_SEEDS = {
    "watch_by_number": 68,
    "lineage_by_number": 3077,
    "a_stale_standby_takes_over": 71,
    "an_empty_synchronizer_seeds": 2100,
    "the_seed_is_marked_before_it_is_released": 2832,
    "the_term_comes_from_an_emptied_keeper": 105,
    "the_residual_is_forgotten_at_a_restart": 2,
    "the_base_is_corrected_twice": 192,
    "the_base_is_not_corrected": 192,
    "acceptance_is_undone_by_fencing": 27,
    "a_held_up_write_undoes_a_later_one": 142,
    "serves_before_the_keeper_was_told": 62,
    "a_lower_term_leads_on": 8,
    "a_fenced_life_contributes": 49,
    "counters_run_on_after_acceptance": 11,
    "merged_work_is_merged_again": 18,
    "a_late_grant_makes_a_life_that_nobody_lives": 38,
}
"""Where to begin: the world known to meet the fault; more are run should it no longer do so."""

CORE, KEEPER = "synchronizer_server.core", "synchronizer_server.membership"
SHELL = "diloco_fleet.simulation"

MUTANTS = (
    Mutant("a_report_is_consumed_twice", f"{CORE}.scheduler",
           "            learner.asked_step = learner.local_step\n", ""),
    Mutant("watch_by_number", "synchronizer_server.updates",
           "        if held == shelf.version:\n",
           "        if held is not None and held.global_step >= shelf.version.global_step:\n"),
    Mutant("lineage_by_number", f"{CORE}.lineage",
           "        if version.digest == chain[-1].digest:\n",
           "        if version.global_step >= chain[-1].global_step:\n"),
    Mutant("publish_before_acknowledged", f"{CORE}.replication",
           "        if missing:\n", "        if False:\n"),
    Mutant("a_stale_standby_takes_over", f"{KEEPER}.memory_lease",
           "    return server.in_sync is None or standby_id in server.in_sync", "    return True",
           also=((f"{CORE}.lease", "        if self._store_id not in seen.in_sync:\n",
                  "        if False:\n"),)),
    Mutant("who_joins_a_seeded_run_seeds_it_again", f"{CORE}.seeding",
           "        if state.seeded or state.seed_persisting or state.seed_forbidden:\n",
           "        if state.seed_persisting:\n",
           also=((f"{CORE}.seeding",
                  "        if state.seeded or state.seed_persisting:\n"
                  "            return Reason.ALREADY_MERGED\n", ""),)),
    Mutant("an_empty_synchronizer_seeds", f"{SHELL}.services",
           "    if request.merged and not state.seed_forbidden:\n", "    if False:\n",
           also=((f"{SHELL}.node", "            yield from self._check_not_lost()\n",
                  "            pass\n"),)),
    Mutant("the_seed_is_marked_before_it_is_released", f"{SHELL}.leading",
           "        yield from self.replicas.publishable(record, states)\n"
           "        yield from self.mark_seeded()\n",
           "        yield from self.mark_seeded()\n"
           "        yield from self.replicas.publishable(record, states)\n",
           also=((f"{SHELL}.node", "forget=is_forgotten", "forget=False"),
                 (f"{SHELL}.services", "        engine.store_lost.set()\n", ""),
                 (f"{KEEPER}.memory_lease",
                  "(standby_id,) if server.in_sync is None else server.in_sync",
                  "(standby_id,)"))),
    Mutant("the_term_comes_from_an_emptied_keeper", f"{CORE}.lease",
           "return max(standing.position[0], standing.begun_term, self.highest.term, "
           "self._led_term)", "return 0 * standing.begun_term"),
    Mutant("the_residual_is_forgotten_at_a_restart", "synchronizer_server.store.memory",
           "        return self._tip, {p: tensors.clone() for p, tensors in "
           "self._fragments.items()}\n",
           "        return self._tip, {p: FragmentState(published=t.published, "
           "residual=0 * t.residual, momentum=t.momentum) for p, t in self._fragments.items()}\n"),
    Mutant("the_momentum_of_a_standby_is_forgotten", "synchronizer_server.store.memory",
           "        self._highest_term = record.term\n"
           "        self._fragments.update({p: tensors.clone() for p, tensors in "
           "changed.items()})\n",
           "        self._highest_term = record.term\n"
           "        self._fragments.update({p: FragmentState.seeded(t.published) for p, t in "
           "changed.items()})\n"),
    Mutant("the_base_is_corrected_twice", "synchronizer_server.tensors",
           "            vector = rebase(vector, published_now=now, published_base=older_base)\n",
           "            vector = rebase(vector, published_now=now, published_base=older_base)\n"
           "            vector = rebase(vector, published_now=now, published_base=older_base)\n"),
    Mutant("the_base_is_not_corrected", "synchronizer_server.tensors",
           "            vector = rebase(vector, published_now=now, published_base=older_base)\n",
           "            pass\n"),
    Mutant("acceptance_is_undone_by_fencing", f"{CORE}.pushes",
           "        for round_ in self.state.rounds:\n"
           "            if learner_id in round_.pending:\n",
           "        for round_ in self.state.rounds:\n"
           "            round_.accepted.pop(learner_id, None)\n"
           "            if learner_id in round_.pending:\n"),
    Mutant("acknowledged_before_persisted", f"{SHELL}.following",
           '        yield self._node.store_runner.submit("install", '
           "lambda: self._install(transfer))\n"
           '        self._node.point("ack")\n'
           "        end.send((record.term, record.global_step))\n",
           "        end.send((record.term, record.global_step))\n"
           '        yield self._node.store_runner.submit("install", '
           "lambda: self._install(transfer))\n"),
    Mutant("a_held_up_write_undoes_a_later_one", f"{KEEPER}.memory_lease",
           "            if server.in_sync_revision > revision:\n", "            if False:\n"),
    Mutant("serves_before_the_keeper_was_told", f"{CORE}.replication",
           "        if self._keeper_has is not None or self.mode == \"off\" or not "
           "self.expects_standby:\n",
           "        if True:\n"),
    Mutant("a_lower_term_leads_on", f"{CORE}.lease",
           "        if self.role is Role.LEADING and holder.term > self.term:\n",
           "        if False:\n"),
    Mutant("a_fenced_life_contributes", f"{CORE}.synchronizer",
           '            self._desk.drop_learner(event.learner_id, Reason.FENCED, '
           '"a later incarnation joined")\n', "",
           also=((f"{CORE}.roster", "        if known.incarnation > incarnation:\n",
                  "        if False:\n"),
                 (f"{CORE}.roster", "learner is not None and learner.incarnation == incarnation",
                  "learner is not None"))),
    Mutant("counters_run_on_after_acceptance", "learner_client.core.learner_core",
           "        self.counters.reset(stamp.fragment, stamp.totals)\n", "        pass\n"),
    Mutant("merged_work_is_merged_again", f"{CORE}.pushes",
           "        if lineage.contributed_since(key.fragment, key.learner_id, event.base):",
           "        if False:"),
    Mutant("rounds_commit_out_of_order", f"{CORE}.scheduler",
           "            and round_ is self.state.rounds[0]\n", ""),
    Mutant("an_incarnation_is_granted_twice", f"{CORE}.roster",
           "return Incarnation(term, 1 + max(number, ", "return Incarnation(term, max(1, number, "),
    Mutant("a_late_grant_makes_a_life_that_nobody_lives", f"{KEEPER}.memory",
           "            if known.number >= proposed.number and known != proposed:\n"
           "                return known\n",
           "            higher = 1 + max(known.number, proposed.number - 1)\n"
           "            proposed = Incarnation(proposed.term, higher)\n",
           also=((f"{SHELL}.services",
                  "        if known == proposed:\n            return proposed\n",
                  "        return known\n"),)),
)  # fmt: skip


class _Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module, and loads its mutated source."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        super().__init__(module, str(path))
        self._source = path.read_text()
        for where, before, after in mutant.edits:
            if where == module:
                assert self._source.count(before) == 1, f"{mutant.name}: the source has changed"
                self._source = self._source.replace(before, after)

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.path)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, self.path, "exec"), module.__dict__)


def run(mutant: Mutant | None, num_seeds: int = MOST_SEEDS) -> tuple[int, str]:
    """Runs worlds in a fork; returns the seed that fails (-1: none), and how."""
    with tempfile.NamedTemporaryFile() as output:
        child = os.fork()
        if child == 0:
            try:
                text = _child(mutant, num_seeds)
            except BaseException:
                text = f"-2 {traceback.format_exc()}"
            Path(output.name).write_text(text)
            os._exit(0)
        os.waitpid(child, 0)
        seed, _, how = Path(output.name).read_text().partition(" ")
        assert seed not in {"", "-2"}, f"{mutant}: {how}"
        return int(seed), how


def _child(mutant: Mutant | None, num_seeds: int) -> str:
    assert not any(name.startswith(PACKAGES) for name in sys.modules), "imported before"
    for module in {edit[0] for edit in mutant.edits} if mutant is not None else ():
        sys.meta_path.insert(0, _Mutated(module, mutant))
    from diloco_fleet.simulation.world import run_world

    first = FIRST_SEEDS.get(mutant.name, 0) if mutant is not None else 0
    for seed in range(first, first + num_seeds):
        try:
            run_world(seed)
        except Exception as error:
            what = str(error).partition("\n")[0]
            return f"{seed} {type(error).__name__}: {what[:120]}"
    return "-1 "


def main(names: list[str]) -> int:
    """Prints one line per mutant; returns 1 where one survives."""
    sys.path[:0] = [str(ROOT / "protos"), str(ROOT)]
    import grpc  # noqa: F401  heavy: once for all forks
    import torch  # noqa: F401

    import decoupled_diloco.layout  # noqa: F401

    survivors = 0
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        seed, how = run(mutant)
        survivors += seed < 0
        word = "SURVIVES" if seed < 0 else "caught  "
        sys.stdout.write(f"{word} {mutant.name}: seed {seed}: {how}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
