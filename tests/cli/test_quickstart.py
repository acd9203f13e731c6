"""The quickstart, small: everything that it writes, and that it goes on."""

from __future__ import annotations

import html
import importlib.util
import io
import math
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.cli.quickstart import _commands, run_quickstart
from cosmati.cli.quickstart_governed import PROMPTS
from cosmati.explorer.price import price_of
from cosmati.explorer.run_view import read_run
from cosmati.explorer.wording import opponent_text
from cosmati.ledger.verify import verify_ledger
from cosmati.recipes.digits import DigitsTask
from cosmati.recipes.language import LanguageTask
from cosmati.recipes.quickstart import QuickstartSize
from cosmati.records.governance import GovernanceFacts
from cosmati.records.study import StudyRecord

pytestmark = pytest.mark.long

SIZE = QuickstartSize(
    language_steps=4,
    search_steps=2,
    governed_steps=8,
    digits_steps=4,
    seeds=(0, 1),
    language_budgets=(1.0,),
    digits_budgets=(1.0,),
    language=LanguageTask(
        sequence_length=32, rows_per_step=8, max_bytes=400_000, num_validation_rows=16, width=16, num_blocks=2
    ),
    digits=DigitsTask(size=8, widths=(4,)),
)


SIGNS = importlib.util.find_spec("tuf") is not None
"""What `make extras` tests, and the default suite doesn't."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, screen = tmp_path_factory.mktemp("quick") / "out", io.StringIO()
    run_quickstart(folder, size=SIZE, console=Console(file=screen))
    (folder / "screen.txt").write_text(screen.getvalue())
    return folder


def test_it_writes_a_report_pictures_and_a_ledger_that_verifies(output: Path) -> None:
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "python-language-model" in page
    assert "open/psf" in page
    deletion = page.partition('aria-labelledby="deletion"')[2].partition("</section>")[0]
    assert "nothing was rewritten" in deletion
    assert str(output / "without-a-package" / "certificates" / "0001.json") in deletion
    for name in ("tradeoff-light", "tradeoff-dark", "policy-light", "policy-dark", "chain-light", "chain-dark"):
        assert ElementTree.parse(output / f"{name}.svg").getroot().tag.endswith("svg")
    report = verify_ledger(output / "governed-run" / "ledger")
    assert report.has_ended
    assert report.num_steps == 8


def test_data_and_policy_are_signed_where_that_can_be(output: Path) -> None:
    """Without the packages nothing else is different, and everybody says `declared`."""
    verified = CliRunner().invoke(app, ["ledger", "verify", str(output / "governed-run")]).output
    chain = (output / "report.html").read_text(encoding="utf-8").partition('id="chain"')[2].partition('id="policy"')[0]
    screen = (output / "screen.txt").read_text()
    assert ("policy/main/1, signed by" in verified) == SIGNS
    assert ("declared: nobody" in verified) != SIGNS
    assert ("This is a rehearsal: the quickstart has made all of these keys itself" in chain) == SIGNS
    assert ("was followed through" in chain) == SIGNS
    assert ("<strong>Declared.</strong>" in chain) != SIGNS
    assert ("a rehearsal, all of whose keys lie in" in screen) == SIGNS
    assert ("Nobody signs data and policy: they are declared." in screen) != SIGNS
    assert (output / "rehearsal").exists() == SIGNS


def test_the_facts_agree_with_the_ledger(output: Path) -> None:
    facts = GovernanceFacts.from_json((output / "governance.json").read_text())
    psf = {t.region: t for t in facts.totals if t.class_name == "open/psf"}
    assert psf["embedding"].num_rows == psf["near_input"].num_rows == 0
    assert psf["head"].num_rows > 0
    (excluded,) = (text for text in facts.exclusions if "tagged open/psf" in text)
    assert "any weight in embedding or near_input:" in excluded
    assert {source.class_name for source in facts.sources} >= {"open/psf"}
    for total in facts.totals:
        series = [s for s in facts.contribution if (s.class_name, s.region) == (total.class_name, total.region)]
        assert sum(sum(s.norms) for s in series) == pytest.approx(total.norm_sum)
    for region in facts.regions:
        assert sum(t.share for t in facts.totals if t.region == region) == pytest.approx(1)


def test_the_live_claim_says_that_one_setting_was_searched(output: Path) -> None:
    study = StudyRecord.from_json((output / "language-study" / "study.json").read_text())
    searches = [arm.search for arm in study.arms if arm.search]
    assert [len(one.trials) for one in searches] == [3, 3]
    assert all(trial.steps == 2 and trial.rows == 16 and trial.seconds > 0 for one in searches for trial in one.trials)
    told = "an opponent of which AdamW's learning rate alone was searched (3 trials, 6 steps, as many as the arm's)"
    assert opponent_text(study, "composition") == told


def test_the_policys_price_is_read_off_pairs_of_equal_runs(output: Path) -> None:
    runs = {path.name: read_run(path, has_ledger=False) for path in (output / "price").iterdir()}
    shown = read_run(output / "governed-run")
    assert sorted(runs) == ["governed-1", "ungoverned-0", "ungoverned-1"]
    assert {one.num_steps for one in (*runs.values(), shown)} == {8}
    assert len({one.record.digests["data"] for one in (*runs.values(), shown)}) == 1
    pairs = [(shown, runs["ungoverned-0"]), (runs["governed-1"], runs["ungoverned-1"])]
    differences = [a.record.metrics["bits_per_byte"] - b.record.metrics["bits_per_byte"] for a, b in pairs]
    row = price_of(shown, list(runs.values())).rows[0]
    assert row.name == "bits per byte"
    assert row.difference.endswith("n\u00a0=\u00a02)")
    assert float(row.difference.split()[0].replace("−", "-")) == pytest.approx(sum(differences) / 2, rel=0.01)
    assert len(shown.metrics["loss/all"]) == 8, "its curve"
    assert shown.record.metrics["loss/all"] == pytest.approx(shown.record.metrics["bits_per_byte"] * math.log(2))


def test_the_run_is_told_about(output: Path) -> None:
    about = read_run(output / "governed-run").about
    assert about is not None
    assert [one.prompt for one in about.samples] == list(PROMPTS)
    assert all(one.step == 8 for one in about.samples)
    scipy = next((one for one in about.packages if one.name == "scipy"), None)
    assert scipy is None or scipy.class_name == "open/permissive"
    assert all(one.evidence for one in about.packages)
    page = (output / "report.html").read_text(encoding="utf-8")
    for command in about.commands:
        assert html.escape(command) in page


def test_the_pages_commands_say_what_was_asked(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    made, verify, report = (shlex.split(one)[1:] for one in _commands(folder, 0.5))
    assert made == ["quickstart", "--output", str(folder), "--minutes", "0.5"]
    assert verify == ["ledger", "verify", str(folder / "governed-run")]
    assert report == ["report", str(folder / "governed-run"), "--against", str(folder / "price")]
    assert "--minutes" not in _commands(folder, None)[0]


def test_studies_hold_every_run(output: Path) -> None:
    language, digits = (
        StudyRecord.from_json((output / name / "study.json").read_text()) for name in ("language-study", "digits-study")
    )
    assert len(language.runs) == 3 * 1 * 2
    assert len(digits.runs) == 6 * 1 * 2
    assert all(0 < run.final.seconds <= sum(run.seconds_by_part.values()) * 2 for run in language.runs)


def test_the_commands_that_it_names_work(output: Path) -> None:
    run = str(output / "governed-run")
    for command in (
        ["ledger", "verify", run],
        ["report", run],
        ["report", run, "--against", str(output / "price")],
        ["ledger", "query", run, "--class", "open/psf", "--region", "embedding"],
        ["forget", "verify", str(output / "without-a-package" / "certificates" / "0001.json")],
        ["policy", "explain", "open/psf", "embedding", "--file", str(output / "policy.yaml")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output


def test_it_goes_on_without_repeating_what_is_done(output: Path) -> None:
    lines = {path: path.read_text() for path in output.glob("*/runs.jsonl")}
    report = verify_ledger(output / "governed-run" / "ledger")
    attempts = {path: path.read_text() for path in output.glob("price/*/attempts.jsonl")}
    forgotten = verify_ledger(output / "without-a-package" / "ledger")
    run_quickstart(output, size=SIZE, console=Console(file=io.StringIO()))
    assert len(lines) == 2
    assert verify_ledger(output / "without-a-package" / "ledger") == forgotten
    assert all(path.read_text() == text for path, text in lines.items())
    assert verify_ledger(output / "governed-run" / "ledger") == report
    assert len(attempts) == 3
    assert all(path.read_text() == text for path, text in attempts.items())


def test_minutes_scale_every_number_of_steps() -> None:
    scaled = QuickstartSize().scaled(0.5)
    assert (scaled.language_steps, scaled.search_steps, scaled.governed_steps, scaled.digits_steps) == (
        120,
        60,
        80,
        80,
    )
    assert scaled.seeds == QuickstartSize().seeds


def test_what_is_missing_is_told_in_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("sklearn", "plotly") else there(name)
    )
    found = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path / "out")])
    assert found.exit_code == 1
    assert found.output.splitlines() == [
        "Error: The quickstart needs scikit-learn, Plotly. Run: pip install 'cosmati[vision,explorer]'"
    ]
    assert not (tmp_path / "out").exists()
