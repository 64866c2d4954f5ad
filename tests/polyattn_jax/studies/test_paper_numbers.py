"""The paper's numbers, against what its prose and its other tables say of them."""

import dataclasses

import pytest

from lm_jax.assets import papers
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.report import paper
from polyattn_jax.suites import named


def by_name(name):
    return next(model for model in paper.MODELS if model.name == name)


def test_table_3_agrees_with_table_24_which_prints_llama_in_percent():
    printed = [81.0, 91.5, 4.5, 100.0, 0.0, 100.0, 0.5, 5.0, 3.5, 0.0]
    llama = by_name("Llama-3.2-1B")
    assert [llama.needle_accuracy(recipe) for recipe in list(RECIPES)[:10]] == printed


def test_the_tables_say_what_the_text_says():
    at_zero = {
        m.name: [r for r in m.prevalence if (r.bias_kind, r.length) == ("zero", 4096)]
        for m in paper.MODELS
    }
    above = [name for name, rows in at_zero.items() if all(r.unsafe[2] > 70 for r in rows)]
    assert above == ["Qwen3-1.7B", "Gemma-4-E2B", "Pythia-1.4b"]
    for model in paper.MODELS:
        for row in model.prevalence:
            assert list(row.unsafe.values()) == sorted(row.unsafe.values(), reverse=True)
        assert all(model.needle[recipe] == -100 for recipe in list(RECIPES)[10:])
    best = {m.name: max(m.literary.values()) for m in paper.MODELS}
    assert list(best.values()) == [-21.0, -14.5, -5.0, -65.0]
    kept = {(m.name, recipe) for m in paper.MODELS for recipe, d in m.needle.items() if d == 0}
    assert kept == {
        ("Llama-3.2-1B", "relu_p4_bauto"),
        ("Llama-3.2-1B", "relu_p8_bauto"),
        ("Gemma-4-E2B", "relu_p8_bauto"),
    }
    relu2 = [m.literary[f"relu_p2_{b}"] for m in paper.MODELS for b in ("b0", "bauto")]
    assert (min(relu2), max(relu2)) == (-79.0, -44.5)


def test_pythia_is_compared_at_the_nearer_of_its_two_lengths():
    """Appendix C: about 66 % at 1,024 tokens, 99 % at 4,096."""
    pythia, llama = by_name("Pythia-1.4b"), by_name("Llama-3.2-1B")
    near = {suite: pythia.prevalence_at(suite, "zero", 1024) for suite in ("induction", "mqar")}
    assert {row.length for row in near.values()} == {1024}
    assert [row.unsafe for row in near.values()] == [{2: 66.0}, {2: 63.4}]
    assert pythia.prevalence_at("copying", "zero", 500).unsafe == {2: 61.7}
    assert pythia.prevalence_at("induction", "zero", 4096).unsafe[2] == 99.2
    assert pythia.prevalence_at("induction", "auto", 1024).length == 4096
    assert llama.prevalence_at("mqar", "zero", 1024).unsafe[2] == 21.4
    assert llama.prevalence_at("niah_64", "zero", 64) is None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("/data/models/llama-3.2-1b/", "Llama-3.2-1B"),
        ("Qwen/Qwen3-1.7B", "Qwen3-1.7B"),
        ("google/gemma-4-E2B", "Gemma-4-E2B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("meta-llama/Llama-3.2-3B", "Llama-3.2-3B"),
        ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B"),
        ("weights/llama-3-8b", "Llama-3-8B"),
        ("meta-llama/Llama-3.1-8B", None),
        ("meta-llama/Meta-Llama-3-8B-Instruct", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("EleutherAI/pythia-1.4b", "Pythia-1.4b"),
        ("meta-llama/Llama-3.2-1B-Instruct", None),
        ("EleutherAI/pythia-1.4b-deduped", None),
        ("google/gemma-4-E2B-it", None),
        ("Qwen/Qwen3-1.7B-Base", None),
        ("/cache/models--meta-llama--Llama-3.2-1B/snapshots/4e20de362430", "Llama-3.2-1B"),
        ("Llama-3.2-1B-Q2_K.gguf", None),
        ("Llama-3.2-1B.gguf", None),
        ("unsloth/Llama-3.2-1B-bnb-4bit", None),
        ("me/Llama-3.2-1B-medical-sft", None),
        ("me/my-Llama-3.2-1B", None),
        ("Qwen3-1.7B-FP8", None),
        ("Qwen/Qwen3-1.7B-GPTQ-Int8", None),
        ("Qwen/Qwen3-1.7B-AWQ", None),
        ("EleutherAI/pythia-1.4b@step1000", None),
        ("smollm2", None),
    ],
)
def test_only_the_papers_own_names_are_taken_for_its_models(model, name):
    result = paper.match(model)
    assert (result.name if result else None) == name


def test_the_paper_s_tables_agree_where_they_print_the_same_cell():
    by_name = {model.name: model for model in paper.ALL_MODELS}
    for name, row in paper.NUMBERS.fixed_bias.accuracy.items():
        assert row["relu_p4_b0"] == by_name[name].needle_accuracy("relu_p4_b0")
    # The best key is the answer, and S_p the same number, whatever the recipe of one bias.
    for model in paper.MODELS:
        rows = model.answer_key.items()
        assert len({(r.argmax, r.dead) for recipe, r in rows if recipe.endswith("bauto")}) == 1
        for recipe, ends in model.matched_ends.items():
            for field, (low, high) in dataclasses.asdict(ends).items():
                assert low <= getattr(model.matched[recipe], field) <= high
    # Table 4: three of its eight cells.
    for name, recipe, printed in (
        ("Qwen3-1.7B", "relu_p8_bauto", (66.3, 21.9)),
        ("Llama-3.2-1B", "relu_p2_b0", (72.3, 30.4)),
        ("Gemma-4-E2B", "relu_p8_bauto", (18.3, 6.1)),
    ):
        row = by_name[name].matched[recipe]
        assert (row.measured, row.top_measured) == printed


def test_tables_have_the_sums_and_the_order_that_they_must_have():
    for model in paper.MODELS:
        for size, counts in model.head_types.items():
            assert {end: sum(of.values()) for end, of in counts.items()} == {
                "top": size,
                "bottom": size,
            }
        row = list(model.ruler_unsafe.values())
        assert row == sorted(row, reverse=True)
    # Section 5.4 rounds them: 85, 88, 100 and 73 % diffuse at K = 40.
    diffuse = [model.head_types[40]["top"]["diffuse"] / 0.4 for model in paper.MODELS]
    assert diffuse == [85.0, 87.5, 100.0, 72.5]
    for sweep in paper.SWEEPS:
        assert sweep.suite in named.NAMES
        for row in sweep.accuracy.values():
            assert set(row) <= {"softmax", *RECIPES}
            # 200 or 50 prompts.
            assert all((share * sweep.prompts / 100).is_integer() for share in row.values())


# Rows of Table 24 in the order of `RECIPES`, in percent: Llama-3.2-3B, Llama-3-8B.
TABLE_24 = {
    "Llama-3.2-3B": [50.0, 87.5, 6.0, 100.0, 0.0, 100.0, 0.0, 25.0, 19.5, 0.0],
    "Llama-3-8B": [50.0, 71.5, 10.0, 100.0, 1.0, 100.0, 0.0, 34.0, 72.0, 0.0],
}


def further(name):
    return next(model for model in paper.NUMBERS.further_model if model.name == name)


@pytest.mark.parametrize("name", TABLE_24)
def test_table_24_is_stored_as_changes_of_an_accuracy_of_100_percent(name):
    model = further(name)
    assert list(model.needle) == list(RECIPES)[:10]
    assert [model.needle_accuracy(recipe) for recipe in model.needle] == TABLE_24[name]
    assert model.needle_accuracy("softmax") == 100.0
    # 200 prompts: each share is of a whole number of them.
    assert all((2 * change).is_integer() for change in model.needle.values())


def test_the_text_on_three_llamas_holds_of_the_numbers():
    """Appendix AC: p4 and p8 at b_auto keep all; sigmoid_b0 rises and relu_p2_bauto falls."""
    sizes = [by_name("Llama-3.2-1B"), *map(further, TABLE_24)]
    accuracy = {
        recipe: [model.needle_accuracy(recipe) for model in sizes] for recipe in sizes[1].needle
    }
    assert {recipe for recipe, row in accuracy.items() if row == [100.0] * 3} == {
        "relu_p4_bauto",
        "relu_p8_bauto",
    }
    assert accuracy["sigmoid_b0"] == [3.5, 19.5, 72.0]
    assert accuracy["relu_p2_bauto"] == [91.5, 87.5, 71.5]
    assert [model.b_auto for model in sizes] == [3.5547, 4.5, 4.5]
    # Appendix AH: relu^4 keeps every needle from b = 1, 2 and 3 on.
    for model, least in zip(sizes, (1, 2, 3), strict=True):
        row = paper.NUMBERS.fixed_bias.accuracy[model.name]
        kept = [
            int(recipe.removeprefix("relu_p4_b")) for recipe, share in row.items() if share == 100
        ]
        assert kept == list(range(least, len(row)))


def at_zero(model):
    return {row.suite: row for row in model.prevalence if row.bias_kind == "zero"}


def test_the_text_on_prevalence_at_3_and_8_billion_parameters_holds_of_the_numbers():
    qwen, llama = at_zero(further("Qwen3-8B")), at_zero(further("Llama-3.2-3B"))
    for rows in (qwen, llama):
        assert list(rows) == ["induction", "copying", "mqar"]
        for row in rows.values():
            assert list(row.unsafe) == [2, 4, 8] and row.length == 4096
            assert list(row.unsafe.values()) == sorted(row.unsafe.values(), reverse=True)
    # Appendix W: 95.3 to 97.9 %, above 95 % in every suite; 200 prompts of 36 layers of 32 heads.
    unsafe = [row.unsafe[2] for row in qwen.values()]
    assert (min(unsafe), max(unsafe)) == (95.3, 97.9)
    heads = further("Qwen3-8B").layers * further("Qwen3-8B").heads
    assert {row.medians.rows for row in qwen.values()} == {round(200 * heads, -4)} == {230_000}
    # Appendix AB: 19 to 30 % as of the 1B, and the same median counts of active distractors.
    small = at_zero(by_name("Llama-3.2-1B"))
    assert [row.medians.active for row in llama.values()] == [2, 3, 2]
    for suite, row in llama.items():
        assert abs(row.unsafe[2] - small[suite].unsafe[2]) < 1
        assert row.medians.active == small[suite].medians.active
    # What these tables do not print is not there.
    for row in (*qwen.values(), *llama.values()):
        assert (row.medians.s_2, row.medians.dead) == (None, None)
    assert [row.medians.rows for row in llama.values()] == [None] * 3


def test_the_caption_of_table_25_holds_of_its_numbers():
    """Every set of heads is within 8 points of softmax; the top and the bottom change nothing."""
    llama = further("Llama-3.2-3B")
    for draws in (llama.draws, llama.literary_draws):
        assert list(draws) == [5, 10, 20, 40, 80]
        assert {(one.top, one.bottom) for one in draws.values()} == {(0.0, 0.0)}
        assert all(one.beaten is None and one.random_least is None for one in draws.values())
    means = [one.random_mean for one in llama.literary_draws.values()]
    assert means == [0.0, 0.0, 0.0, -1.2, -1.6] and max(map(abs, means)) <= 8
    # The mean of 5 sets of 200 prompts is a whole number of thousandths.
    assert all((10 * mean).is_integer() for mean in means)
    assert {one.sets for one in llama.literary_draws.values()} == {5}
    assert [one.random_mean for one in llama.draws.values()] == [None] * 5
    assert llama.literary_softmax == 79.0


def test_further_models_stand_in_their_own_tables_and_beside_no_other_model():
    listed = {claim["item"] for claim in papers.tables("polyattn")["claim"]}
    for model in paper.NUMBERS.further_model:
        assert model.families == () and model.tables
        assert {*model.tables, *model.tables.values()} <= listed
    for model in paper.MODELS:
        assert not model.tables
    assert paper.nearest("qwen3").name == "Qwen3-1.7B"
    assert paper.nearest("llama").name == "Llama-3.2-1B"


def test_lengths_that_the_paper_asks_are_those_of_its_tables():
    """`asked` says once what the lengths of the numbers say, and each of these is asked."""
    asked = {
        (name, one.suite, length)
        for one in paper.NUMBERS.asked
        for name in one.models
        for length in one.lengths
    }
    assert len(asked) == sum(len(one.models) * len(one.lengths) for one in paper.NUMBERS.asked)
    settings, wanted = paper.SETTINGS, set()
    for model in paper.ALL_MODELS:
        wanted |= {(model.name, row.suite, row.length) for row in model.prevalence}
        if model.needle:
            wanted.add((model.name, "niah", settings.needle_length))
        if model.literary or model.literary_draws:
            wanted.add((model.name, "copying", settings.literary_length))
        if model.ruler_unsafe:
            wanted.add((model.name, "ruler_paper_single", 4000))
        wanted |= {(model.name, "induction", length) for length in model.induction}
        if model.over_length:
            wanted |= {(model.name, "induction", length) for length in (256, 4096)}
    for sweep in (*paper.SWEEPS, paper.NUMBERS.fixed_bias):
        wanted |= {(name, sweep.suite, sweep.length) for name in sweep.accuracy}
    assert wanted <= asked
    # What no table has: softmax on short needles (Appendix E), and the figure of Appendix C, which
    # prints its lengths as a range and names three of them.
    four = [model.name for model in paper.MODELS]
    untold = {(name, "niah", length) for name in four for length in (50, 200, 500)}
    untold |= {(name, "induction", length) for name in four for length in (256, 1024)}
    assert asked - wanted <= untold
