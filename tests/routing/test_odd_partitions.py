"""Regions of models with odd parts, such as modules of several names or of a class's own, and every word of a refusal.

What a selector takes is said here by hand, name by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product

import pytest
from torch import nn

from cosmati.core.isolated import Isolated
from cosmati.errors import PolicyError
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.selectors import BlockRange, RegionSelector


def lines_of_a_refusal(
    model: nn.Module, selectors: Mapping[str, RegionSelector], *, allow_tied: bool = False
) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        partition_parameters(model, selectors, allow_tied=allow_tied)
    first, *problems = str(caught.value).split("\n  - ")
    assert first == "The regions don't partition the trainable parameters:"
    return problems


def params(*globs: str, exclude: tuple[str, ...] = ()) -> RegionSelector:
    return RegionSelector(params=globs, exclude=exclude)


def blocks(container: str, start: int = 0, to: int | None = None) -> RegionSelector:
    return RegionSelector(blocks=BlockRange(container=container, start=start, to=to))


class Twice(nn.Module):
    """Holds its embedding, its norm and its blocks under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.norm = nn.LayerNorm(2)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.again = nn.ModuleDict({"table": self.table, "norm": self.norm, "layers": self.layers})


def test_a_module_of_two_names_is_selected_under_both() -> None:
    regions = partition_parameters(
        Twice(),
        {
            "table": RegionSelector(tag=("embedding",)),
            "norm": RegionSelector(tag=("norm",)),
            "layers": params("layers.*", "again.layers.*"),
        },
    )
    assert regions.names == ("table", "norm", "layers")
    assert regions.parameters == (
        ("table.weight",),
        ("norm.weight", "norm.bias"),
        ("layers.0.weight", "layers.1.weight", "layers.2.weight"),
    )
    assert regions.aliases == (
        ("again.table.weight", "table.weight"),
        ("again.norm.weight", "norm.weight"),
        ("again.norm.bias", "norm.bias"),
        ("again.layers.0.weight", "layers.0.weight"),
        ("again.layers.1.weight", "layers.1.weight"),
        ("again.layers.2.weight", "layers.2.weight"),
    )
    assert regions.region_of == {
        prefix + name: index
        for index, names in enumerate(regions.parameters)
        for name in names
        for prefix in ("", "again.")
    }


@pytest.mark.parametrize("name", ["layers", "again.layers"])
def test_a_container_goes_by_each_of_its_names(name: str) -> None:
    rest = params("table.*", "norm.*", "again.table.*", "again.norm.*")
    selectors = {"early": blocks("layers", 0, 1), "late": blocks(name, 1, 3), "rest": rest}
    regions = partition_parameters(Twice(), selectors, allow_tied=True)
    assert regions.parameters[regions.names.index("early")] == ("layers.0.weight",)
    assert regions.parameters[regions.names.index("late")] == ("layers.1.weight", "layers.2.weight")
    other = {"layers": "again.layers", "again.layers": "layers"}[name]
    assert f"'{other}.1.weight' in no region" in lines_of_a_refusal(Twice(), selectors)[1]


class Own(Isolated):
    """A layer of a class's own."""

    def __init__(self, class_name: str) -> None:
        super().__init__(class_name)
        self.down = nn.Linear(2, 1, bias=False)


def test_a_head_of_two_names_is_taken_under_both() -> None:
    """The last linear layer is the one that's last by its first name."""
    model = nn.Module()
    model.body, model.fc = nn.Linear(3, 3), nn.Linear(3, 2)
    model.net = nn.Sequential(model.body, model.fc)
    regions = partition_parameters(model, {"head": RegionSelector(tag=("head",)), "rest": params("body.*", "net.0.*")})
    assert dict(zip(regions.names, regions.parameters, strict=True)) == {
        "head": ("fc.weight", "fc.bias"),
        "rest": ("body.weight", "body.bias"),
    }


def test_an_empty_list_without_order_is_in_the_model() -> None:
    model = nn.Module()
    model.own, model.layer = nn.ParameterList(), nn.Linear(1, 1)
    problems = lines_of_a_refusal(model, {"own": blocks("own"), "all": params("*")})
    assert problems[0].startswith("region 'own': container 'own' is a ParameterList, whose parts have no order.")


def test_what_a_class_has_of_its_own_is_tagged_by_its_name() -> None:
    model = nn.ModuleDict({"a": Own("bold"), "b": Own("shy"), "c": nn.Linear(2, 2, bias=False), "d": Own("bold")})
    regions = partition_parameters(
        model,
        {
            "bold": RegionSelector(tag=("isolated/bold",)),
            "shy": RegionSelector(tag=("isolated/shy",)),
            "shared": params("c.*"),
        },
    )
    assert regions.names == ("bold", "shy", "shared")
    assert regions.parameters == (("a.down.weight", "d.down.weight"), ("b.down.weight",), ("c.weight",))
    assert lines_of_a_refusal(model, {"mild": RegionSelector(tag=("isolated/mild",)), "all": params("*")}) == [
        "region 'mild': tag isolated/mild matches nothing in the model. Mend it or leave it out",
        "region 'mild' is empty: it selects no parameter of the model. Remove it or mend its selector",
    ]


@pytest.mark.parametrize(
    ("tag", "module"),
    [
        ("embedding", nn.Embedding(3, 2)),
        ("embedding", nn.EmbeddingBag(3, 2)),
        ("norm", nn.LayerNorm(2)),
        ("norm", nn.RMSNorm(2)),
        ("norm", nn.GroupNorm(1, 2)),
        ("norm", nn.BatchNorm1d(2)),
        ("norm", nn.BatchNorm2d(2)),
        ("norm", nn.BatchNorm3d(2)),
        ("norm", nn.SyncBatchNorm(2)),
        ("norm", nn.InstanceNorm1d(2, affine=True)),
        ("norm", nn.InstanceNorm2d(2, affine=True)),
        ("norm", nn.InstanceNorm3d(2, affine=True)),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_a_tag_takes_each_kind_of_module(tag: str, module: nn.Module) -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "it": module, "last": nn.Linear(2, 2)})
    tags = {name: RegionSelector(tag=(name,)) for name in (tag, "head")}
    regions = partition_parameters(model, tags | {"rest": params("first.*")})
    assert regions.names == ("rest", tag, "head")
    assert regions.parameters[1] == tuple(f"it.{name}" for name, _ in module.named_parameters())
    assert regions.parameters[2] == ("last.weight", "last.bias")


def test_what_matches_nothing_is_told_for_each_name_and_region() -> None:
    model = nn.ModuleDict({"a": nn.Conv1d(1, 1, 1), "b": nn.Conv1d(1, 1, 1)})
    selectors = {
        "two": RegionSelector(params=("b.*", "c.*"), tag=("embedding", "head"), exclude=("d.*",)),
        "one": params("a.*", "аb", exclude=("b.*",)),  # noqa: RUF001 - a Cyrillic letter
    }
    ends = "matches nothing in the model. Mend it or leave it out"
    assert lines_of_a_refusal(model, selectors) == [
        f"region 'one': params 'аb' (it has U+0430 CYRILLIC SMALL LETTER A) {ends}",  # noqa: RUF001
        f"region 'two': tag embedding {ends}",
        f"region 'two': tag head {ends}",
        f"region 'two': params 'c.*' {ends}",
        f"region 'two': exclude 'd.*' {ends}",
    ]


@pytest.mark.parametrize(("number", "more"), [(11, ""), (12, ""), (13, " and 1 more")])
def test_twelve_names_are_listed_and_the_others_counted(number: int, more: str) -> None:
    model = nn.ModuleDict({"x": nn.Linear(1, 1, bias=False)})
    model.update({f"p{k:02}": nn.Linear(1, 1, bias=False) for k in range(number)})
    named = ", ".join(f"'p{k:02}.weight'" for k in range(min(number, 12)))
    tail = "Select them in a region, or set requires_grad_(False)"
    assert lines_of_a_refusal(model, {"x": params("x.*")}) == [f"in no region: {named}{more}. {tail}"]


def test_every_problem_is_told_in_its_order() -> None:
    model = Twice()
    model.norm.requires_grad_(requires_grad=False)
    told = lines_of_a_refusal(
        model,
        {
            "z": params("table.*", "layers.0.*"),
            "y": params("again.table.*", "layers.0.*"),
            "x": params("*norm*"),
            "w": blocks("layers", 2, 4),
            "v": blocks("table"),
            "u": blocks("again.table.weight"),
        },
    )
    empty = "is empty: it selects no parameter of the model. Remove it or mend its selector"
    mends = "Name one of: layers, again, again.layers; or use params"
    spread = "one tied parameter is spread: "
    ends = ". Put its names in one region, untie it, or allow tied"
    assert told == [
        f"region 'u': container 'again.table.weight' isn't in the model. {mends}",
        f"region 'v': container 'table' is a Embedding, whose parts have no order. {mends}",
        "region 'w': blocks 2 to 4, but 'layers' has 3. Mend from and to",
        "in regions y and z: 'layers.0.weight'. Exclude them from all but one",
        "in no region: 'layers.1.weight', 'layers.2.weight'. Select them in a region, or set requires_grad_(False)",
        f"region 'u' {empty}",
        f"region 'v' {empty}",
        f"region 'w' {empty}",
        "region 'x' is empty: its 4 parameters are frozen. Remove it or mend its selector",
        f"{spread}'table.weight' in z, 'again.table.weight' in y{ends}",
        f"{spread}'layers.0.weight' in y and z, 'again.layers.0.weight' in no region{ends}",
    ]


def test_an_alias_in_two_regions_is_refused_even_where_ties_may_merge() -> None:
    selectors = {"a": params("table.*", "*norm*", "*layers*"), "b": params("again.table.*"), "c": params("again.t*")}
    assert lines_of_a_refusal(Twice(), selectors, allow_tied=True) == [
        "in regions b and c: 'again.table.weight'. Exclude them from all but one"
    ]


def test_a_model_without_containers_has_none_to_name() -> None:
    told = lines_of_a_refusal(nn.Linear(1, 1), {"x": blocks("layers"), "y": params("*")})
    assert told[0] == "region 'x': container 'layers' isn't in the model. Name one of: none; or use params"


def test_the_rest_may_be_empty_and_no_other_region() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    selectors = {"all": params("0.*"), "rest": params("*", exclude=("0.*",))}
    with pytest.raises(PolicyError, match="region 'rest' is empty"):
        partition_parameters(model, selectors, may_be_empty=("all",))
    regions = partition_parameters(model, selectors, may_be_empty=("rest",))
    assert (regions.names, regions.declared) == (("all",), ("all", "rest"))


def test_blocks_are_taken_to_the_last_one_and_not_beyond() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    names = [name for name, _ in model.named_parameters()]
    for start, to in product(range(5), (None, 1, 2, 3, 4)):
        if to is not None and to <= start:
            continue
        selectors = {"x": blocks("", start, to), "y": params("*")}
        if start >= 3 or to == 4:
            end = 3 if to is None else to
            assert lines_of_a_refusal(model, selectors)[0] == (
                f"region 'x': blocks {start} to {end}, but '' has 3. Mend from and to"
            )
            continue
        taken, left = names[start:to], [name for name in names if name not in names[start:to]]
        selectors["y"] = params("*", exclude=tuple(taken))
        found = partition_parameters(model, selectors) if left else None
        assert found is None or dict(zip(found.names, found.parameters, strict=True)) == {
            "x": tuple(taken),
            "y": tuple(left),
        }


def test_regions_are_what_brute_force_says() -> None:
    """Of all ways to give three globs to two regions, with and without a tie."""
    globs = ("a.*", "b.*", "*.bias")
    for tied, allow, first, second in product((False, True), (False, True), range(1, 8), range(1, 8)):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        if tied:
            model["b"].weight = model["a"].weight
        chosen = {
            name: [glob for bit, glob in enumerate(globs) if number >> bit & 1]
            for name, number in (("q", first), ("p", second))
        }
        every = [f"{module}.{name}" for module in "ab" for name in ("weight", "bias")]
        claims = {name: {r for r, own in chosen.items() if any(fnmatchcase(name, g) for g in own)} for name in every}
        joined = [{"a.weight", "b.weight"}] if tied else [{"a.weight"}, {"b.weight"}]
        groups = [*joined, {"a.bias"}, {"b.bias"}]
        owners = {min(group): set().union(*(claims[name] for name in group)) for group in groups}
        fine = (
            all(len(own) <= 1 for own in claims.values())
            and all(owners.values())
            and all(any(name in own for own in owners.values()) for name in chosen)
            and (allow or not tied or claims["a.weight"] == claims["b.weight"])
        )
        selectors = {name: params(*own) for name, own in chosen.items()}
        try:
            regions = partition_parameters(model, selectors, allow_tied=allow)
        except PolicyError:
            assert not fine
            continue
        assert fine
        for group in groups:
            assert {regions.members[regions.region_of[name]] for name in group} == {tuple(sorted(owners[min(group)]))}
        assert regions.aliases == ((("b.weight", "a.weight"),) if tied else ())
        assert regions.names == tuple(map("&".join, regions.members))


def test_regions_are_values() -> None:
    one, other = (partition_parameters(Twice()) for _ in range(2))
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.names = ()  # type: ignore[misc]


def test_a_buffer_follows_the_parameters_that_are_nearest_in_depth() -> None:
    regions = Regions(("a", "b"), (("x.y.w", "x.y.z.w"), ("x.u.w", "v")), (("a",), ("b",)), (("t.w", "x.u.w"),))
    found = {
        name: regions.region_of_buffer(name) for name in ("x.y.b", "x.y.z.c.b", "x.b", "x.u.b", "t.b", "b", "xy.b")
    }
    assert found == {"x.y.b": 0, "x.y.z.c.b": 0, "x.b": None, "x.u.b": 1, "t.b": 1, "b": None, "xy.b": None}
    assert Regions((), (), ()).region_of_buffer("x.b") is None
