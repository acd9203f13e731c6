"""The policy on the governance page compiles against a real model, and means what the page says."""

from pathlib import Path

from cosmati import Taxonomy, load_policy, software_licences
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.routing.policy import compile_policy
from cosmati.routing.regions import Regions, partition_parameters

PAGE = (Path(__file__).parents[2] / "docs" / "governance.md").read_text()


def test_the_bands_of_the_page_do_what_it_says() -> None:
    policy = load_policy("version: 1\ntaxonomy: t\n" + PAGE.split("```yaml\n")[2].split("```")[0])
    assert policy.bands is not None
    assert [policy.bands.band_of(value) for value in (0.29, 0.3, 0.69, 0.7)] == [0, 1, 1, 2]
    names = Taxonomy("t", "1", (("licensed/news", ""),))
    regions = Regions(("all",), (("weight",),), (("all",),))
    table = compile_policy(policy, taxonomy=names, regions=regions, num_steps=10)
    assert [table.route(0, 0, band) for band in range(3)] == [(0.0,), (0.5,), (1.0,)]


def test_the_policy_of_the_page_compiles() -> None:
    policy = load_policy(PAGE.split("```yaml\n")[1].split("```")[0])
    model = GPT(GPTConfig(sequence_length=8, width=16, num_blocks=4, num_heads=2))
    regions = partition_parameters(model, policy.regions)
    compiled = compile_policy(policy, taxonomy=software_licences(), regions=regions, num_steps=100)
    psf = compiled.classes.index("open/psf")
    by_region = dict(zip(compiled.regions, compiled.route(psf, 50), strict=True))
    assert by_region == {"embedding": 0.0, "near_input": 0.0, "near_output": 1.0}
    copyleft = compiled.classes.index("open/copyleft")
    assert compiled.route(copyleft, 5) == (0.5, 0.5, 0.5)
    assert compiled.route(copyleft, 50) == (1.0, 1.0, 1.0)
    assert compiled.decision[compiled.classes.index("unknown")] == ("reject", "reject")


def test_the_grades_of_the_page_do_what_it_says() -> None:
    block = next(one for one in PAGE.split("```yaml\n")[1:] if one.startswith("measures:")).split("```")[0]
    front = "version: 1\ntaxonomy: t\nregions: {head: {tag: head}, rest: {params: '*', exclude: ['head.*']}}\n"
    policy = load_policy(f"{front}rules: [{{class: '**', weight: 1}}]\n{block}")
    assert policy.measures["trust"].grade_of(0.3) == "middle"
    names = Taxonomy("t", "1", (("medical/notes", ""), ("news", "")))
    regions = Regions(("head", "rest"), (("h",), ("r",)), (("head",), ("rest",)), (), ("head", "rest"))
    table = compile_policy(policy, taxonomy=names, regions=regions, num_steps=10)

    def weights(class_id: int, **grades: str) -> tuple[float, ...]:
        return table.route(class_id, 0, table.kind_of(0, grades))

    assert weights(0, evidence="trial", trust="high") == (1.0, 1.0)
    assert weights(0, evidence="cohort", trust="high") == (0.25, 0.25)
    assert weights(0, evidence="trial", trust="low") == (0.0, 1.0)
    assert weights(0) == (0.0, 0.25)
    assert weights(1, evidence="cohort", trust="high") == (1.0, 1.0)
