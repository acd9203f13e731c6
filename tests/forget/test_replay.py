"""Replay against the run that never had the content, which the test makes by itself."""
from pathlib import Path
from cosmati.forget.asked import Asked
from cosmati.forget.past_run import PastRun, Gone
from cosmati.forget.replay import replay
from tests.forget.samples import *

def test_thin(tmp_path: Path) -> None:
    case = bare("CNN with BatchNorm"); data = source(case)
    make = maker(case, data)
    make(unwrapped, tmp_path/"run").fit()
    truth = make(without(rows=[3, 40, 41]), tmp_path/"truth"); truth.fit()
    run = PastRun(tmp_path/"run")
    asked = Asked(rows=frozenset([3,40,41]))
    from cosmati.forget.contact import contact_of, refuse_another
    t0 = make(unwrapped, tmp_path/"run")
    c = contact_of(run, t0, asked.rows); print(c)
    start = run.start(c.first_step); print(start.step)
    refuse_another(run, t0, start.checkpoint)
    told={"asked": asked.digest(run.salt), "classes": [], "rows": 3, "from_step": start.step}
    print(replay(run, make, tmp_path/"out", start, told, Gone().and_also([], asked.rows)))
    t1 = make(without(rows=[3,40,41]), tmp_path/"truth"); t1.fit()
    from cosmati.train.run.checkpoints import read_checkpoint, list_checkpoints
    one, two = (read_checkpoint(list_checkpoints(tmp_path/n/"checkpoints")[0]) for n in ("out","truth"))
    bad=read_checkpoint(list_checkpoints(tmp_path/"run"/"checkpoints")[0])
    assert not differing({**one.model, **one.state}, {**two.model, **two.state})
    assert differing(dict(bad.model), dict(two.model))
    from cosmati.ledger.verify import verify_ledger
    print(verify_ledger(tmp_path/"out"/"ledger", pinned=(tmp_path/"run"/"ledger"/"checkpoint").read_text()))
    for i in PastRun(tmp_path/"out").ledger.entries(): print(i.index, i.entry if type(i.entry).__name__!="StepEntry" else i.entry.step)
