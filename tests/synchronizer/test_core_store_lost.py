"""A run that was merged before is never seeded again (design section 5, Seed)."""

from __future__ import annotations

from core_script import Script, only

from decoupled_diloco.errors import Reason
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev


def test_a_run_that_a_joiner_knows_as_merged_is_not_seeded_by_anybody():
    s = Script()
    assert only(s.up("a"), ef.GrantSeed)
    s.stage_seed("a", 0)
    s.feed(ev.SeedForbidden(learner_id="b"))
    assert not only(s.up("c"), ef.GrantSeed)
    assert not only(s.stage_seed("a"), ef.PersistSeed)
    assert s.core.seed_refusal("a", s.lives["a"], 0) is Reason.STORE_LOST
    assert not only(s.advance(200.0), ef.PersistSeed)
    assert s.reasons() == ["store_lost"]
    assert "b holds merged versions" in s.details()
