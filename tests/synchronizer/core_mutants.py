"""Re-introduces known faults into a copy of the core; each must fail the core's tests.

Run as a script: ``python tests/synchronizer/core_mutants.py [name ...]``. One process imports what
is heavy and forks once per mutant.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = (
    "pace", "pushes", "rounds", "commit", "membership", "waits", "traces", "scale", "quarantine",
    "counters", "roll_back", "store_lost", "world",
)  # fmt: skip
FIRST_TESTS = {
    "commit": ("commit_in_any_order", "publish_before_persist", "a_failed_persist_is_not_retried"),
    "rounds": ("two_rounds_collect", "rounds_are_not_paced"),
    "membership": ("a_lost_seeder_is_waited_for",),
    "scale": ("the_longest_outer_gradient_sets_the_scale", "a_refused_norm_moves_the_scale"),
    "quarantine": (
        "who_is_left_out_is_asked_all_the_same", "who_is_left_out_stays_pending",
        "quarantine_never_ends", "one_on_trial_is_asked_for_everything",
        "joining_again_ends_a_quarantine", "an_accepted_push_leaves_the_count",
    ),
    "counters": ("counters_are_believed", "steps_count_from_the_first_one_for_ever"),
    "roll_back": ("what_was_put_back_remains_a_base", "putting_back_undoes_acceptance"),
    "store_lost": ("a_forbidden_seed_is_granted",),
}  # fmt: skip
"""Which tests are known to catch a fault and run first; all others run should they no longer."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in ``module``, ``before`` becomes ``after``."""

    name: str
    module: str
    before: str
    after: str


MUTANTS = (
    Mutant("freshness_is_not_consumed", "scheduler",
           "            learner.asked_step = learner.local_step\n", ""),
    Mutant("the_dead_stay_pending", "synchronizer",
           "        self._desk.drop_learner(learner.learner_id, Reason.LEARNER_GONE, message)\n",
           ""),
    Mutant("commit_in_any_order", "scheduler",
           "            and round_ is self.state.rounds[0]\n", ""),
    Mutant("publish_before_persist", "scheduler",
           "                round_.move(RoundInput.IN_TURN)\n",
           "                round_.move(RoundInput.IN_TURN)\n"
           "                round_.persisted_as = round_.summary(0.0)\n"
           "                state.effects.append("
           "PublishRound(summary=round_.persisted_as, sync_s=0.0))\n"),
    Mutant("already_merged_is_not_checked", "pushes",
           "        if lineage.contributed_since(key.fragment, key.learner_id, event.base):",
           "        if False:"),
    Mutant("the_incarnation_is_not_checked", "pushes",
           "        if stranger is not None:", "        if False:"),
    Mutant("the_term_is_not_checked", "pushes",
           "        if event.term != state.term:", "        if False:"),
    Mutant("a_foreign_base_is_accepted", "pushes",
           "        if place is Place.FOREIGN:", "        if False:"),
    Mutant("no_floor_under_the_grace_window", "pacing",
           "max(self.settings.grace_gamma * slack, shortest)",
           "self.settings.grace_gamma * slack"),
    Mutant("grace_waits_for_all", "scheduler",
           "        if not everybody and now < round_.grace_until:", "        if not everybody:"),
    Mutant("grace_never_ends_early", "scheduler",
           "        if not everybody and now < round_.grace_until:",
           "        if now < round_.grace_until:"),
    Mutant("nobody_is_ever_too_late", "scheduler", "        self.desk.drop_late(now)\n", ""),
    Mutant("two_rounds_collect", "scheduler",
           "                round_.move(RoundInput.EARLIER_COLLECTS)\n", "                pass\n"),
    Mutant("falling_back_forgets_what_was_accepted", "scheduler",
           "            round_.move(RoundInput.TOO_FEW_ACCEPTED)\n",
           "            round_.move(RoundInput.TOO_FEW_ACCEPTED)\n"
           "            round_.accepted.clear()\n"),
    Mutant("more_rounds_in_flight_than_overlap", "scheduler",
           "len(state.rounds) >= state.settings.overlap", "len(state.rounds) > 9"),
    Mutant("rounds_are_not_paced", "scheduler",
           "state.opens_at = max(state.opens_at, now - 0.5 * interval) + interval",
           "state.opens_at = now"),
    Mutant("a_late_answer_replaces_the_first", "pushes",
           "        if event.key in self._answers:\n            return\n", ""),
    Mutant("a_lost_seeder_is_waited_for", "seeding",
           "        state.seeder = None\n        state.seeded_fragments.clear()\n\n",
           "        state.seeded_fragments.clear()\n\n"),
    Mutant("silence_by_subtraction", "roster",
           "if now >= x.heard_at + timeout_s]", "if now - x.heard_at > timeout_s]"),
    Mutant("a_failed_persist_is_not_retried", "scheduler",
           "        round_.retry_at = now + event.retry_after_s\n",
           "        round_.retry_at = 1e9\n"),
    Mutant("the_longest_outer_gradient_sets_the_scale", "scale",
           "statistics.median_high([statistics.median(x)", "max([statistics.median(x)"),
    Mutant("a_refused_norm_moves_the_scale", "pushes",
           "        if bound is not None and event.norm > bound:\n",
           "        self.state.scale.observe(key.fragment, key.learner_id, event.norm, 1)\n"
           "        if bound is not None and event.norm > bound:\n"),
    Mutant("who_is_left_out_is_asked_all_the_same", "roster",
           "        return self.live and not self.quarantine\n", "        return self.live\n"),
    Mutant("who_is_left_out_stays_pending", "pushes",
           "        self.drop_learner(learner.learner_id, Reason.QUARANTINED, detail)\n", ""),
    Mutant("quarantine_never_ends", "synchronizer", "        self._release(now)\n", ""),
    Mutant("one_on_trial_is_asked_for_everything", "scheduler",
           " and not self._on_trial(x)", ""),
    Mutant("joining_again_ends_a_quarantine", "roster",
           "            learner.quarantine = before.quarantine\n", ""),
    Mutant("an_accepted_push_leaves_the_count", "pushes",
           "        self.state.quarantine.accepted(key.learner_id)\n", ""),
    Mutant("counters_are_believed", "pushes",
           "        header = self._bounded(claimed, learner, now)\n",
           "        header = claimed\n"),
    Mutant("steps_count_from_the_first_one_for_ever", "counters",
           "        num_steps = min(num_steps, local_step - merged_step)\n",
           "        pass\n"),
    Mutant("what_was_put_back_remains_a_base", "scheduler",
           "            state.lineage.restart(round_.fragment, round_.version)\n",
           "            state.lineage.advance(round_.fragment, round_.version)\n"),
    Mutant("putting_back_undoes_acceptance", "scheduler",
           "        if order is None or round_.accepted or not free:\n",
           "        if order is None or not free:\n"),
    Mutant("a_forbidden_seed_is_granted", "seeding",
           "or state.seed_persisting or state.seed_forbidden:", "or state.seed_persisting:"),
)  # fmt: skip


def in_order(mutant: Mutant) -> tuple[str, ...]:
    """All tests, those that are known to catch the fault first."""
    first = {name for name, mutants in FIRST_TESTS.items() if mutant.name in mutants}
    return tuple(sorted(TESTS, key=lambda name: name not in first))


def run(mutant: Mutant | None, tests: tuple[str, ...] = TESTS) -> tuple[bool, str]:
    """Runs the tests on a copy of the core in a fork; returns whether they pass, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        core = Path(folder) / "core"
        shutil.copytree(ROOT / "synchronizer_server" / "core", core)
        if mutant is not None:
            path = core / f"{mutant.module}.py"
            source = path.read_text()
            assert source.count(mutant.before) == 1, f"{mutant.name}: the source has changed"
            path.write_text(source.replace(mutant.before, mutant.after))
        output = Path(folder) / "output"
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = _child(core, output, tests)
            except BaseException:
                output.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        text = output.read_text() if output.exists() else ""
        assert code in {0, 1}, f"{mutant}: pytest ended with {code}\n{text}"
        return code == 0, text


def _child(core: Path, output: Path, tests: tuple[str, ...]) -> int:
    import pytest

    import synchronizer_server

    for name in [n for n in sys.modules if n.startswith("synchronizer_server.core")]:
        del sys.modules[name]
    stub = type(sys)("synchronizer_server.core")
    stub.__path__ = [str(core)]
    sys.modules["synchronizer_server.core"] = stub
    synchronizer_server.core = stub  # type: ignore[attr-defined]
    options = [
        "-x",
        "-q",
        "--assert=plain",
        "--tb=line",
        "--no-showlocals",
        "-p",
        "no:cacheprovider",
    ]
    # Plugins by name, as `make test` does: those of a surrounding Python must not join in.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options += ["-p", "asyncio", "-p", "timeout", "-p", "hypothesispytest"]
    options += ["-c", str(ROOT / "pyproject.toml")]
    text, code = io.StringIO(), 0
    with redirect_stdout(text), redirect_stderr(text):
        for name in tests:  # file by file: most faults are found by the first
            code = code or int(pytest.main([*options, str(HERE / f"test_core_{name}.py")]))
    from synchronizer_server.core import rounds

    assert rounds.__file__.startswith(str(core)), "the copy was not what ran"
    output.write_text(text.getvalue())
    return code


def main(names: list[str]) -> int:
    """Prints one line per mutant; returns 1 where one survives."""
    sys.path[:0] = [str(ROOT / "protos"), str(ROOT), str(HERE)]
    import hypothesis  # noqa: F401  heavy: once for all forks
    import pytest  # noqa: F401

    import decoupled_diloco.settings  # noqa: F401

    passes, text = run(None, ("pace", "pushes", "rounds"))
    assert passes, f"the unchanged core fails:\n{text}"
    survivors = 0
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        passes, text = run(mutant, in_order(mutant))
        survivors += passes
        failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = failed[0].split("::")[-1].split(" - ")[0] if failed else "?"
        word, how = ("SURVIVES", "") if passes else ("caught  ", by)
        sys.stdout.write(f"{word} {mutant.name}: {how}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
