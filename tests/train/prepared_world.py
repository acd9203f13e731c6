"""Another authority beside that of the data: it has signed a tokenizer, and what is evaluated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cosmati import Evaluation, StreamingDataset, StreamingLoader, artifact
from cosmati.data.plain_files import describe_files
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.signing import sign_sources
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, People
from tests.train.vouched_world import OPEN, World

REJECT = "{revocation: reject, expiry: reject, licence: reject}"
LICENCE_UNTIL = "2031-12-31"


def made_in(root: Path) -> Path:
    """Make the three sources, and the other authority with what it has signed."""
    World.made_in(root)
    others = People(root / "others").begin()
    others.delegate(OPEN, "eve")
    others.delegate(NEWS, "fay")
    folder = root / "others" / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a b c")
    describe_files(
        folder, class_path=OPEN, source="bpe", version="1", facts=SourceFacts(licence_valid_until=LICENCE_UNTIL)
    )
    held = root / "others" / "held-out"
    write_dataset([{"number": number} for number in range(8)], held, {"number": "int"}, class_of=NEWS, source="held")
    for place, name in ((folder, "eve"), (held, "fay")):
        assert [state for _, state in sign_sources(str(place), others.folder, others.ring(name))] == ["signed"]
    (root / "others" / "pin").write_text(others.pin)
    return root


def others_of(world: World) -> World:
    found = World.found_in(world.people.root / "others")
    found.ahead = world.ahead
    return found


def at_others(event: Any) -> Any:
    """Return what happens to the other authority in place of the data's."""
    return lambda world: event(others_of(world))


def authority(world: World, **more: Any) -> Authority:
    people = others_of(world).people
    return Authority(people.folder, people.pin, state=people.root / "seen", clock=world.now, **more)


def tokenizer(world: World, **more: Any) -> Artifact:
    return artifact("tokenizer", world.people.root / "others" / "tokenizer", authority=authority(world, **more))


def evaluation(world: World, **more: Any) -> Evaluation:
    rows = StreamingDataset(
        world.people.root / "others" / "held-out", columns=("number",), authority=authority(world, **more)
    )
    return Evaluation(StreamingLoader(rows, 4, rank=0, world=1), {"loss": error})  # each rank is given all of them


def error(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None] / 24)
    return (output - 1).square().mean()
