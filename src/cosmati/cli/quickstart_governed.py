"""The quickstart's governed run: trained, told about, and priced against the same training without its policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cosmati.cli.quickstart_deletion import WITHOUT, forget_a_package
from cosmati.corpora.python_library import PackageSource, PythonLibrary
from cosmati.data.vouching import Vouches
from cosmati.errors import TamperError
from cosmati.explorer.price import Price, price_of, runs_below
from cosmati.explorer.run_view import RECORD_FILE, RunView, read_run
from cosmati.export.publishing import Say
from cosmati.recipes.language_samples import write_bytes
from cosmati.recipes.quickstart import QuickstartSize, Trial, governed_recipe
from cosmati.recipes.recipe import Recipe
from cosmati.records.about import ABOUT_FILE, PackageRecord, RunAbout, SampleRecord
from cosmati.records.governance import SourceRow
from cosmati.records.run import RunRecord
from cosmati.routing.policy_file import PolicyFile
from cosmati.storage.atomic import replace_file
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

GOVERNED, PRICE, REHEARSAL = "governed-run", "price", "rehearsal"
"""Names of folders: the run that is shown, the runs that it's compared with, and who has signed their data."""
LICENCE_NOTE = "Classes come from what packages declare about their licences. That is metadata, not legal advice."
PROMPTS = ("import ", "def __init__(self", "class ")
SAMPLE_BYTES, SAMPLE_SEED, TEMPERATURE = 160, 0, 0.7
INEXACT = "not named exactly"
REHEARSAL_NOTE = (
    "This is a rehearsal: the quickstart has made all of these keys itself, and they lie in one folder. In earnest "
    "those who answer for the data hold their own, those who decide what may be learnt hold theirs, three people hold "
    "the root's of each authority, and whoever trains holds none of them."
)


@dataclass(frozen=True)
class Signed:
    """What the governed run goes by.

    Attributes:
        policy: as it was signed; or as it's declared.
        authority: that has signed the data; None where they're declared.
    """

    policy: PolicyFile
    authority: Vouches | None = None


def signed_or_declared(size: QuickstartSize, policy: PolicyFile, folder: Path) -> Signed:
    """Have data and policy signed with keys that lie in a folder; without the packages for it they stay declared."""
    try:
        from cosmati.cli.quickstart_rehearsal import rehearse
    except ImportError:
        return Signed(policy)
    authority, policy = rehearse(folder, size.language.shards(), policy)
    return Signed(policy, authority)


def governed_and_priced(
    size: QuickstartSize, trials: Sequence[Trial], signed: Signed, output: Path, commands: Sequence[str], say: Say
) -> tuple[RunView, Price]:
    """Train under the policy and without it, one run for each seed; take a package out, and read what it came to.

    Runs that are there to their end aren't trained again.

    Args:
        size: of the runs.
        trials: of the search of the learning rate.
        signed: policy and data of the governed runs.
        output: folder of the quickstart.
        commands: what makes all of it again.
        say: told of the deletion and of the runs, a line at a time.

    Raises:
        TamperError: the ledger of the run that is shown doesn't verify.
    """
    recipe = partial(governed_recipe, size, trials)
    governed = partial(recipe, signed.policy, authority=signed.authority)
    first, *others = size.seeds
    library, shown = size.language.library(), output / GOVERNED
    with_policy = governed(seed=first)
    trained(with_policy, shown)
    tell(with_policy, shown, size, library, commands)
    forget_a_package(size.language, with_policy, shown, output / WITHOUT, say)
    say(f"Training without the policy, seed 1 of {len(size.seeds)}")
    without, twin = recipe(None, seed=first), output / PRICE / f"ungoverned-{first}"
    trained(without, twin)
    tell(without, twin, size, library, ())
    for done, seed in enumerate(others, 2):  # with and without in turns, so that a machine that slows down slows both
        say(f"Training with the policy and without, seed {done} of {len(size.seeds)}")
        trained(governed(seed=seed), output / PRICE / f"governed-{seed}")
        trained(recipe(None, seed=seed), output / PRICE / f"ungoverned-{seed}")
    run = read_run(shown)
    if run.governance is None:
        raise TamperError("; ".join(run.ledger.problems) if run.ledger else f"{shown} holds no ledger.")
    return run, price_of(run, runs_below([output / PRICE]))


def trained(recipe: Recipe, folder: Path) -> None:
    """Train a recipe in a folder, to the end; one of the same plan that is there already isn't opened again."""
    trainer = recipe.trainer(run_folder=folder)
    path = folder / RECORD_FILE
    record = RunRecord.from_json(path.read_text()) if path.exists() else None
    is_done = record is not None and record.outcome == "completed" and record.digests["plan"] == trainer.plan.digest
    if not is_done and trainer.fit().outcome == "stopped":
        raise KeyboardInterrupt


def tell(recipe: Recipe, folder: Path, size: QuickstartSize, library: PythonLibrary, commands: Sequence[str]) -> None:
    """Write `about.json` of a run that ended: its data, how their classes were decided, and what the model writes."""
    record = RunRecord.from_json((folder / RECORD_FILE).read_text())
    is_signed = record.digests.get("data_root", "declared") != "declared"  # when it was trained, whoever asks now
    about = RunAbout(
        quality="bits_per_byte",
        higher_is_better=False,
        sources=_sources(library),
        packages=tuple(map(_package, (one for one in library.packages if one.num_rows))),
        samples=_samples(recipe, folder, size.language.sequence_length),
        commands=tuple(commands),
        signatures=REHEARSAL_NOTE if is_signed else "",
        notes=(LICENCE_NOTE,),
    )
    replace_file(folder / ABOUT_FILE, about.to_json().encode())


def _samples(recipe: Recipe, folder: Path, context: int) -> tuple[SampleRecord, ...]:
    """Let the last checkpoint's model write, on the weights that were evaluated."""
    checkpoint = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    trainer = recipe.trainer()
    trainer.recall(checkpoint)
    found = []
    with trainer.averaged() as model:
        for prompt in PROMPTS:
            written = write_bytes(
                model, prompt.encode(), SAMPLE_BYTES, context=context, seed=SAMPLE_SEED, temperature=TEMPERATURE
            )
            text = written.decode(errors="replace")
            found.append(SampleRecord(prompt, text, SAMPLE_SEED, TEMPERATURE, checkpoint.step))
    return tuple(found)


def _package(package: PackageSource) -> PackageRecord:
    licence = package.licence
    return PackageRecord(
        name=package.name,
        version=package.version,
        class_name=licence.class_path,
        licence=licence.spdx or "",
        licence_state=licence.state,
        evidence=licence.evidence,
        num_rows=package.num_rows,
        split=package.split,
    )


def _sources(library: PythonLibrary) -> tuple[SourceRow, ...]:
    """Group the training packages by class and licence; the standard library's modules count as packages."""
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for package in library.packages:
        if package.split == "train" and package.num_rows:
            licence = package.licence
            inexact = "unknown" if licence.state == "unknown" else INEXACT
            key = (licence.class_path, licence.spdx or inexact, licence.state)
            groups[key].append((package.name, package.num_rows))
    return tuple(
        SourceRow(
            class_name=class_path,
            name=_named([name for name, _ in sorted(found, key=lambda pair: -pair[1])]),
            num_rows=sum(rows for _, rows in found),
            num_packages=len(found),
            licence=expression,
            licence_state=state,
        )
        for (class_path, expression, state), found in sorted(groups.items())
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
