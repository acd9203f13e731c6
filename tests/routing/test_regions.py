"""Partitions of real modules: what regions take, and every refusal by name."""

from __future__ import annotations

import pytest
from torch import nn

from cosmati.errors import PolicyError
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.selectors import BlockRange, RegionSelector


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)


class TinyGPT(nn.Module):
    """Embedding, blocks, final norm, head; the head's weight may be tied to the embedding's."""

    def __init__(self, *, tied: bool = False, num_blocks: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.ln_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.wte.weight


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False))
        self.pool = nn.BatchNorm2d(4, affine=False)
        self.fc = nn.Linear(4, 2)


SELECTORS = {
    "embedding": RegionSelector(tag=("embedding",)),
    "near_input": RegionSelector(blocks=BlockRange(container="blocks", start=0, to=2)),
    "near_output": RegionSelector(blocks=BlockRange(container="blocks", start=2), params=("ln_f.*",)),
    "head": RegionSelector(tag=("head",)),
}


def assert_partitions(regions: Regions, model: nn.Module) -> None:
    names = [name for names in regions.parameters for name in names]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert all(regions.parameters)
    assert all(regions.region_of[name] == i for i, names in enumerate(regions.parameters) for name in names)


def refusal(model: nn.Module, selectors: dict[str, RegionSelector], **options: bool) -> str:
    with pytest.raises(PolicyError) as caught:
        partition_parameters(model, selectors, **options)
    return str(caught.value)


def test_regions_of_a_transformer() -> None:
    model = TinyGPT()
    regions = partition_parameters(model, SELECTORS)
    assert regions.names == ("embedding", "near_input", "near_output", "head")
    assert regions.parameters[0] == ("wte.weight",)
    assert regions.parameters[3] == ("head.weight",)
    assert regions.region_of["blocks.1.mix.bias"] == 1
    assert regions.region_of["blocks.2.norm.weight"] == regions.region_of["ln_f.bias"] == 2
    assert regions.declared == ("embedding", "head", "near_input", "near_output")
    assert_partitions(regions, model)


def test_without_selectors_everything_is_one_region() -> None:
    model = TinyGPT(tied=True)
    regions = partition_parameters(model)
    assert regions.names == regions.declared == ("all",)
    assert regions.region_of["head.weight"] == regions.region_of["wte.weight"] == 0
    assert_partitions(regions, model)


def test_order_of_selectors_means_nothing() -> None:
    backwards = dict(reversed(SELECTORS.items()))
    assert partition_parameters(TinyGPT(), backwards) == partition_parameters(TinyGPT(), SELECTORS)


@pytest.mark.parametrize("border", range(1, 8))
def test_block_ranges_partition_at_any_border(border: int) -> None:
    model = TinyGPT(num_blocks=8)
    selectors = SELECTORS | {
        "near_input": RegionSelector(blocks=BlockRange(container="blocks", start=0, to=border)),
        "near_output": RegionSelector(blocks=BlockRange(container="blocks", start=border), params=("ln_f.*",)),
    }
    regions = partition_parameters(model, selectors)
    assert_partitions(regions, model)
    for index in range(8):
        expected = "near_input" if index < border else "near_output"
        assert regions.names[regions.region_of[f"blocks.{index}.mix.weight"]] == expected


def test_blocks_of_sequentials_are_counted_not_named() -> None:
    model = nn.Sequential()
    for name in ("z", "a", "m"):
        model.add_module(name, nn.Linear(1, 1))
    first = RegionSelector(blocks=BlockRange(container="", start=0, to=2))
    last = RegionSelector(blocks=BlockRange(container="", start=2, to=3))
    regions = partition_parameters(model, {"first": first, "last": last})
    assert regions.parameters == (("z.weight", "z.bias", "a.weight", "a.bias"), ("m.weight", "m.bias"))


def test_tags_resolve_by_module_type() -> None:
    selectors = {
        "norms": RegionSelector(tag=("norm",)),
        "head": RegionSelector(tag=("head",)),
        "rest": RegionSelector(params=("*",), exclude=("stem.1.*", "fc.*")),
    }
    regions = partition_parameters(TinyCNN(), selectors)
    assert regions.names == ("rest", "norms", "head")
    assert regions.parameters[1] == ("stem.1.weight", "stem.1.bias")
    assert regions.parameters[2] == ("fc.weight", "fc.bias")


def test_a_tag_takes_the_model_itself() -> None:
    regions = partition_parameters(nn.Linear(2, 2), {"head": RegionSelector(tag=("head",))})
    assert regions.parameters == (("weight", "bias"),)


def test_frozen_parameters_belong_to_no_region() -> None:
    model = TinyGPT()
    model.wte.requires_grad_(requires_grad=False)
    text = refusal(model, SELECTORS)
    assert "region 'embedding' is empty: its 1 parameters are frozen" in text
    regions = partition_parameters(model, {k: v for k, v in SELECTORS.items() if k != "embedding"})
    assert "wte.weight" not in regions.region_of
    assert_partitions(regions, model)


def test_overlap_is_refused_by_name() -> None:
    text = refusal(TinyGPT(), SELECTORS | {"norms": RegionSelector(tag=("norm",))})
    assert "in regions near_input and norms: 'blocks.0.norm.weight', 'blocks.0.norm.bias'" in text
    assert "in regions near_output and norms: 'blocks.2.norm.weight'" in text
    assert "Exclude" in text


def test_orphans_are_refused_by_name() -> None:
    selectors = {k: v for k, v in SELECTORS.items() if k not in {"embedding", "near_input"}}
    text = refusal(TinyGPT(), selectors)
    assert "in no region: 'wte.weight', 'blocks.0.norm.weight'" in text
    assert "ln_f" not in text


def test_long_lists_are_cut() -> None:
    text = refusal(TinyGPT(num_blocks=9), {"head": SELECTORS["head"]})
    assert "and 27 more" in text  # 1 + 9 * 4 + 2 orphans, 12 of them listed


def test_empty_region_is_refused_by_name() -> None:
    text = refusal(TinyGPT(), SELECTORS | {"adapter": RegionSelector(params=("*lora*",))})
    assert "region 'adapter' is empty: it selects no parameter of the model" in text


def test_all_offenders_are_listed_at_once() -> None:
    text = refusal(
        TinyGPT(tied=True),
        {
            "embedding": SELECTORS["embedding"],
            "head": SELECTORS["head"],
            "a": RegionSelector(params=("ln_f.*",)),
            "b": RegionSelector(params=("ln_f.weight",)),
            "c": RegionSelector(params=("nothing",)),
        },
    )
    for part in (
        "in regions a and b: 'ln_f.weight'",
        "in no region: 'blocks.0",
        "region 'c' is empty",
        "one tied parameter",
    ):
        assert part in text


def test_a_long_list_is_cut() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(15))})
    text = refusal(model, {"first": RegionSelector(params=("layers.0.*",))})
    named = ", ".join(f"'layers.{k}.weight'" for k in range(1, 13))
    assert f"in no region: {named} and 2 more. Select them" in text


def test_tie_is_refused_by_name() -> None:
    text = refusal(TinyGPT(tied=True), SELECTORS)
    assert "one tied parameter is spread: 'wte.weight' in embedding, 'head.weight' in head" in text
    assert "allow tied" in text


def test_tie_to_a_name_without_region_is_refused() -> None:
    text = refusal(TinyGPT(tied=True), {k: v for k, v in SELECTORS.items() if k != "head"})
    assert "'wte.weight' in embedding, 'head.weight' in no region" in text


def test_tie_within_a_region_is_none() -> None:
    selectors = SELECTORS | {"embedding": RegionSelector(tag=("embedding", "head"))}
    del selectors["head"]
    regions = partition_parameters(TinyGPT(tied=True), selectors)
    assert regions.region_of["head.weight"] == regions.region_of["wte.weight"] == 0


def test_allowed_tie_merges_regions() -> None:
    model = TinyGPT(tied=True)
    regions = partition_parameters(model, SELECTORS, allow_tied=True)
    assert regions.names == ("embedding&head", "near_input", "near_output")
    assert regions.members[0] == ("embedding", "head")
    assert regions.declared == ("embedding", "head", "near_input", "near_output")
    assert regions.aliases == (("head.weight", "wte.weight"),)
    assert regions.region_of["head.weight"] == 0
    assert_partitions(regions, model)


def test_shared_blocks_are_a_tie() -> None:
    model = nn.Module()
    block = nn.Linear(2, 2)
    model.blocks = nn.ModuleList([block, block])
    halves = {
        "a": RegionSelector(blocks=BlockRange(container="blocks", start=0, to=1)),
        "b": RegionSelector(blocks=BlockRange(container="blocks", start=1, to=2)),
    }
    assert "'blocks.0.weight' in a, 'blocks.1.weight' in b" in refusal(model, halves)
    assert partition_parameters(model, halves, allow_tied=True).names == ("a&b",)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (BlockRange(container="layers"), r"container 'layers' isn't in the model. Name one of: blocks"),
        (BlockRange(container="head"), r"container 'head' is a Linear, whose parts have no order"),
        (BlockRange(container="blocks", start=2, to=5), r"blocks 2 to 5, but 'blocks' has 4"),
        (BlockRange(container="blocks", start=4), r"blocks 4 to 4, but 'blocks' has 4"),
    ],
)
def test_bad_blocks_are_refused(blocks: BlockRange, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        partition_parameters(TinyGPT(), {"x": RegionSelector(blocks=blocks)})


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(PolicyError, match="no trainable parameter"):
        partition_parameters(nn.ReLU())


def test_buffers_follow_the_nearest_parameters() -> None:
    model = TinyCNN()
    regions = partition_parameters(
        model,
        {
            "stem_conv": RegionSelector(params=("stem.0.*",)),
            "stem_norm": RegionSelector(params=("stem.1.*",)),
            "body": RegionSelector(params=("body.*",)),
            "fc": RegionSelector(params=("fc.*",)),
        },
    )
    index = regions.names.index
    assert regions.region_of_buffer("stem.1.running_mean") == index("stem_norm")
    assert regions.region_of_buffer("body.1.running_var") == index("body")  # no weight of its own: the block's
    assert regions.region_of_buffer("pool.running_mean") is None  # four regions are equally near
    model.stem[1].requires_grad_(requires_grad=False)
    frozen = partition_parameters(model, {"all_": RegionSelector(params=("*",))})
    assert frozen.region_of_buffer("stem.1.running_mean") == 0


def test_buffers_with_one_region_follow_it() -> None:
    assert partition_parameters(TinyCNN()).region_of_buffer("pool.running_mean") == 0


def test_a_prefix_is_a_whole_module_name() -> None:
    model = nn.Module()
    model.a = nn.Linear(1, 1)
    model.ab = nn.BatchNorm1d(1, affine=False)
    model.b = nn.Linear(1, 1)
    regions = partition_parameters(model, {"a": RegionSelector(params=("a.*",)), "b": RegionSelector(params=("b.*",))})
    assert regions.region_of_buffer("ab.running_mean") is None


def test_selectors_that_select_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="params, blocks or tag"):
        RegionSelector(exclude=("*",))
    with pytest.raises(ValueError, match="are none"):
        BlockRange(container="blocks", start=2, to=2)
