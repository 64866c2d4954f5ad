"""A report shows the numbers of the summary, beside the paper's, whatever is absent or hostile."""

import copy
import dataclasses
import io
import re
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from lm_jax import runs
from lm_jax.report.markup import number
from lm_jax.stats import wilson
from polyattn_jax import console, figures, report, schema, sharpness, summary, wording
from polyattn_jax.columns import columns
from polyattn_jax.config import AuditConfig
from polyattn_jax.diagnostic import Status, required_degree

SHAPE = (3, 2)
PROMPTS = 12
SETTINGS = AuditConfig(
    model="models/Other-1B",
    niah_lengths=(64, 1024),
    niah_n=PROMPTS,
    induction_length=64,
    mqar_length=64,
    recipes=("relu_p4_b0", "relu_p4_bauto", "relu_p8_bauto", "sigmoid_b0"),
    sweep_length=64,
    ablation_heads=(1, 2),
    ablation_draws=2,
    top_heads=2,
    resamples=100,
)
COUNTS = ("false_negative", "false_negative_eps", "false_positive")
PROVENANCE = {"start": "2026-01-02", "packages": {"jax": "0.1"}, "git": None, "restarts": []}
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m{{ 7 * 7 }} ]]> & [red]x"


def diagnosed_rows(suites=("niah_64", "niah_1024", "induction", "mqar")):
    """Random rows with the relations of real ones: S_p falls with p and p* suffices."""
    rng = np.random.default_rng(0)
    axes = (suites, range(PROMPTS), range(SHAPE[0]), range(SHAPE[1]), schema.BIASES)
    suite, prompt, layer, head, kind = (
        np.array([axis[i] for i in part])
        for axis, part in zip(axes, np.indices([len(a) for a in axes]).reshape(5, -1), strict=True)
    )
    n = len(suite)
    active, rho = rng.integers(0, 50, n), rng.uniform(0.01, 0.9, n)
    degree = np.arange(2, 17)[:, None]
    s = dict(zip(range(2, 17), active * (1 - rho) ** degree * rng.uniform(0.2, 1, n), strict=True))
    given = {
        "suite": suite,
        "prompt": np.char.add("prompt-", prompt.astype(str)),
        "layer": layer,
        "head": head,
        "bias_kind": kind,
        "target": np.full(n, "argmax"),
        "status": np.where(rng.uniform(size=n) < 0.05, Status.DEAD, Status.ACTIVE),
        "active": active,
        "relative_margin": rho,
        "p_star": required_degree(active, rho),
        **{f"s_{p}": s[p] for p in (2, 4, 8, 16)},
        "query": np.full(n, 63),
        "s_softmax": rng.uniform(0.2, 1.6, n),
        **{f"change_{p}": rng.uniform(0.1, 1.0, n) for p in (2, 4, 8, 16)},
        "sink": rng.uniform(0, 0.6, n),
        "on_answer": rng.uniform(0, 0.2, n),
        "distance": rng.integers(0, 60, n),
    }
    # one tie that the bound certifies: two equal keys and nothing else
    given["active"][0], given["p_star"][0], given["status"][0] = 1, 0.0, Status.ACTIVE
    for p in (2, 4, 8, 16):
        given[f"s_{p}"][0] = 1.0
    return table(given, schema.ROWS)


def table(given, fields):
    size = len(next(iter(given.values())))
    columns = [
        pa.array(given.get(f.name, [""] * size if f.type == pa.string() else np.zeros(size))).cast(
            f.type
        )
        for f in fields
    ]
    return pa.Table.from_arrays(columns, schema=fields)


def answers(correct, ablation, left_out):
    """How many of the prompts each cell gets right, and softmax where the needle was left out."""
    given = {name: [] for name in ("stage", "cell", "recipe", "heads", "suite", "prompt")}
    given |= {name: [] for name in ("target", "predicted", "loss", "rank")}
    control = {"niah_64": PROMPTS, "niah_1024": PROMPTS - 1, "control": left_out}
    cells = [("control", "softmax", "softmax", suite, right) for suite, right in control.items()]
    cells += [("sweep", name, name, "niah_64", right) for name, right in correct.items()]
    recipe = SETTINGS.ablation_recipe
    cells += [("ablation", name, recipe, "niah_64", right) for name, right in ablation.items()]
    for stage, cell, recipe, suite, right in cells:
        for i in range(PROMPTS):
            row = {"stage": stage, "cell": cell, "recipe": recipe, "suite": suite, "heads": 6}
            row |= {"prompt": f"prompt-{i}", "target": 5, "predicted": 5 if i < right else 7}
            row |= {"loss": 1.0 + i, "rank": 0 if i < right else 3}
            for name, value in row.items():
                given[name].append(value)
    return table(given, schema.ANSWERS)


def head_features():
    """Features of six heads on two prompts: two sinks, one induction, one local, two diffuse."""
    rng = np.random.default_rng(1)
    sink, induction = [0.9, 0.5, 0.1, 0.2, 0.0, 0.3], [0.0, 0.9, 0.7, 0.05, 0.2, 0.5]
    distance = [50.0, 1.0, 30.0, 3.0, 3.0, 90.0]
    shift = rng.uniform(-0.01, 0.01, 6)
    return {
        "prompt": ["prompt-0"] * 6 + ["prompt-1"] * 6,
        "layer": [0, 0, 1, 1, 2, 2] * 2,
        "head": [0, 1] * 6,
        "sink": np.r_[sink + shift, sink - shift],
        "induction": induction * 2,
        "distance": distance * 2,
        "entropy": [1.0] * 12,
    }


CURVE = [
    {"length": 16, "bias": 0.75, "low": 0.61, "high": 0.9, "least": 0.5, "most": 1.12},
    {"length": 64, "bias": 1.5, "low": 1.31, "high": 1.67, "least": 1.1, "most": 1.9},
]
CALIBRATION = {
    "bias": 1.5012345,
    "low": 1.31,
    "high": 1.67,
    "mass": 0.05,
    "length": 64,
    "texts": 8,
    "rows": 5000,
    "passes": 4,
    "step": 0.004,
    "curve": CURVE,
}
CORRECT = {
    "softmax": 12,
    "relu_p4_b0": 0,
    "relu_p4_bauto": 12,
    "relu_p8_bauto": 4,
    "sigmoid_b0": 11,
}
ABLATION = {
    "softmax": 12,
    "top-1": 11,
    "top-2": 1,
    "bottom-1": 12,
    "bottom-2": 12,
    "random-1-0": 12,
    "random-1-1": 12,
    "random-2-0": 9,
    "random-2-1": 5,
}


def audit(config=SETTINGS, correct=CORRECT, ablation=ABLATION, rows=None, second=1.25, left_out=0):
    """What an audit leaves behind: summary, rows, heads."""
    rows = diagnosed_rows() if rows is None else rows
    losses = {"prompt": ["a", "a"], "copy": [1, 2], "loss": [12.5, second], "correct": [0.0, 0.75]}
    found, by_head = summary.summarise(
        rows,
        answers(correct, ablation, left_out),
        table(losses | {"tokens": [99, 99]}, schema.LOSSES),
        table(head_features() if config.induction_n else {"prompt": []}, schema.FEATURES),
        CALIBRATION,
        config,
        SHAPE,
    )
    return found | {"family": "llama", "weights": ["w.safetensors"]}, rows, by_head


@pytest.fixture(scope="module")
def finding():
    return audit()


def build(found, rows, by_head, **provenance):
    return report.build(found, rows, by_head, provenance=PROVENANCE | provenance)


def parsed(html):
    """The body as strict XML, which fails on anything unescaped or unclosed."""
    body = html[html.index("<body>") : html.index("</body>") + len("</body>")]
    return ElementTree.fromstring(body)


def text_of(node):
    return "".join(node.itertext())


def lines(tree, caption):
    """The rows, as lists of texts, of the one table whose caption begins so."""
    (found,) = (
        figure
        for figure in tree.iter("figure")
        if figure.get("class") == "table" and text_of(figure.find("figcaption")).startswith(caption)
    )
    return [[text_of(cell) for cell in row] for row in found.find(".//tbody")]


def percent(value, spec=".1f"):
    return number(100 * value, spec)


def test_the_tables_hold_the_numbers_of_the_summary(finding):
    found, tree = finding[0], parsed(build(*finding))
    swept = {row[0].split("b = ")[0]: row for row in lines(tree, "Needle probe at 64 tokens")}
    verdicts = {v["recipe"]: v for v in found["verdicts"]}
    for entry in found["sweep"]:
        row, accuracy = swept[entry["recipe"]], entry["accuracy"]
        low, high = percent(accuracy["low"]), percent(accuracy["high"])
        assert row[2] == f"{percent(accuracy['estimate'])}[{low}, {high}]"
        assert row[5] == f"{entry['loss']:.2f}"
        if entry["recipe"] == "softmax":
            control = next(
                e["softmax"]
                for e in found["prevalence"]
                if (e["suite"], e["bias_kind"]) == ("niah_64", "auto")
            )
            assert row[8].split("[")[0] == percent(1 - control["estimate"])
        if verdict := verdicts.get(entry["recipe"]):
            assert row[1].split()[-1] == verdict["verdict"]
            assert row[3].startswith(percent(entry["delta"]["estimate"], "+.1f"))
            assert row[4] == f"{entry['p_value']:.2g}{entry['lost']} lost, {entry['won']} won"
            safe = verdict["safe"]
            assert row[8].split("[")[0] == (percent(safe["estimate"]) if safe else "–")
    unsafe = {row[0]: row for row in lines(tree, "Unsafe share")}
    for entry in found["prevalence"]:
        name, tokens = wording.suite_name(entry["suite"]), 1024 if "1024" in entry["suite"] else 64
        bias = "b = 0" if entry["bias_kind"] == "zero" else "b_auto"
        row = unsafe[f"{name}{tokens:,} tokens, {bias}"]
        shares = [entry["softmax"], *entry["unsafe"].values()]
        found_shares = [cell.split("[")[0] for cell in row[1:6]]
        assert found_shares == [percent(share["estimate"]) for share in shares]
        assert row[6] == number(entry["median"]["s_2"])
        assert row[-1] == f"{entry['active_rows']}of {entry['rows']}"
    assert f"{PROMPTS} prompts per line" in text_of(tree)
    reasons = {row[0]: row[2] for row in lines(tree, "Reasons and next steps")}
    assert list(reasons) == ["relu_p4_b0, relu_p8_bauto", "relu_p4_bauto, sigmoid_b0"]
    assert reasons["relu_p4_b0, relu_p8_bauto"].startswith("the loss is larger than 5 points; part")
    bound = [e for e in found["bound"] if e["suite"] != "induction"]
    counted = [
        [str(e["p"]), percent(e["agree"]["estimate"]), *(str(e[name]) for name in COUNTS)]
        for e in wording.by_suite(bound)
    ]
    folded = [d for d in tree.iter("details") if "other suites" in text_of(d.find("summary"))]
    shown = [[cell.split("[")[0] for cell in row] for row in lines(folded[1], "Predicted")]
    assert [[*row[1:5], row[6]] for row in shown] == counted


def test_the_comparison_with_softmax_holds_the_numbers_of_the_summary(finding):
    found, tree = finding[0], parsed(build(*finding))
    shown = [
        [text_of(cell) for cell in row]
        for figure in tree.iter("figure")
        if text_of(figure.find("figcaption")).startswith("rᵖ against softmax")
        for row in figure.find(".//tbody")
    ]
    entries = wording.by_suite(found["against_softmax"])
    # The suite of the sweep comes first, the others are folded.
    ordered = [e for e in entries if e["suite"] == "niah_64"]
    ordered += [e for e in entries if e["suite"] != "niah_64"]
    assert len(shown) == len(ordered) == 4 * 2 * 4
    for row, entry in zip(shown, ordered, strict=True):
        assert row[1] == str(entry["p"])
        names = ("lost", "lost_of_concentrated", "sharpened", "balance", "change")
        for cell, name in zip(row[2:7], names, strict=True):
            spec = "+.1f" if name == "balance" else ".1f"
            low, high = (percent(entry[name][end], spec) for end in ("low", "high"))
            assert cell == f"{percent(entry[name]['estimate'], spec)}[{low}, {high}]"
        assert row[8] == str(entry["undecided"])
        assert row[9].startswith(number(entry["rows"]))


def test_b_auto_is_shown_with_the_digits_that_it_has(finding):
    found, tree = finding[0], parsed(build(*finding))
    (row,) = lines(tree, "b_auto is solved exactly")
    assert row[:2] == ["1.50 [1.31, 1.67]", "64"]
    assert [row[:3] for row in lines(tree, "b_auto of the first tokens of the same texts")] == [
        ["16", "0.75 [0.61, 0.90]", "0.50 to 1.12"],
        ["64", "1.50 [1.31, 1.67]", "1.10 to 1.90"],
    ]
    assert "At other lengths it would be 0.75 at 16 tokens, 1.50 at 64." in text_of(tree)
    assert "b_auto = 1.50 [1.31, 1.67] (95 % over 8 texts of 64" in " ".join(printed(found).split())
    for half, text in ((0.012, "1.501 [1.489, 1.513]"), (0.4, "1.50 ["), (2.0, "1.5 [")):
        ends = {"low": 1.5012345 - half, "high": 1.5012345 + half}
        assert wording.b_auto(CALIBRATION | ends).startswith(text)


@pytest.mark.parametrize(
    ("s_p", "softmax", "says"),
    [
        (2.0, 0.5, "spreads more rows than softmax at p = 2, 4, 8 and 16."),
        (0.5, 2.0, "spreads fewer than softmax at p = 2, 4, 8 and 16."),
        (2.0, 2.0, "spreads as many as softmax, within the interval, at p = 2, 4, 8 and 16."),
    ],
)
def test_the_words_on_sharpness_follow_the_numbers(s_p, softmax, says):
    rows = diagnosed_rows(suites=("niah_64",))
    for name, value in [("s_softmax", softmax), *((f"s_{p}", s_p) for p in (2, 4, 8, 16))]:
        column = pa.array(np.full(rows.num_rows, value, np.float32))
        rows = rows.set_column(rows.column_names.index(name), name, column)
    status = pa.array(np.full(rows.num_rows, Status.ACTIVE, np.int8))
    rows = rows.set_column(rows.column_names.index("status"), "status", status)
    found = audit(rows=rows)[0]
    text = sharpness.sentence(found)
    assert says in text
    assert f"outweigh the best one in {100 * (softmax > 1):.1f} % of the" in text
    assert ("softmax concentrates it loses" in text) == (softmax < 1)
    for entry in sharpness.entries(found, "auto"):
        moved = f"{100 * entry['change']['estimate']:.0f} % (p = {entry['p']})"
        assert moved in text.split("head's output change by more than")[1]
    # An unsafe share by itself says nothing of the recipe.
    assert "warns that" not in text_of(parsed(build(*audit(rows=rows))))


def test_a_recipe_finds_its_own_comparison_with_softmax():
    config = dataclasses.replace(SETTINGS, recipes=(*SETTINGS.recipes, "relu:p=8,b=0.25"))
    rows = diagnosed_rows()
    own = rows.filter(pc.equal(rows["bias_kind"], "zero"))
    kind = pa.array(["0.25"] * own.num_rows)
    own = own.set_column(own.column_names.index("bias_kind"), "bias_kind", kind)
    correct = CORRECT | {"relu_p8_b0.25": 3}
    found = audit(config, correct, rows=pa.concat_tables([rows, own]))[0]
    for recipe, kind, p in (
        ("relu_p4_b0", "zero", 4),
        ("relu_p4_bauto", "auto", 4),
        ("relu_p8_b0.25", "0.25", 8),
    ):
        entry = sharpness.of_recipe(found, recipe)
        assert (entry["suite"], entry["bias_kind"], entry["p"]) == ("niah_64", kind, p)
    assert sharpness.of_recipe(found, "sigmoid_b0") is None
    verdict = next(v for v in found["verdicts"] if v["recipe"] == "relu_p8_b0.25")
    assert verdict["safe"] is not None
    row = next(line for line in printed(found).splitlines() if line.startswith("relu_p8_b0.25"))
    against = sharpness.of_recipe(found, "relu_p8_b0.25")
    shares = [f"{100 * against[name]['estimate']:.1f}" for name in ("lost", "sharpened")]
    assert row.split()[-3:-1] == shares


def test_head_types_are_counted_at_both_ends_and_say_what_was_averaged(finding):
    found, _, by_head = finding
    kinds = ["sink", "sink", "induction", "local", "diffuse", "diffuse"]
    # the sixth has a weight of 0.3 on the first key and 0.5 on the planted one, no more
    assert list(by_head["type"]) == kinds
    ranked = [kinds[head] for head in np.argsort(by_head["rank"])]
    shown = {row[0]: row[1:4] for row in lines(parsed(build(*finding)), "Heads by type")}
    for kind in ("sink", "induction", "local", "diffuse"):
        ends = ranked[:2].count(kind), ranked[-2:].count(kind)
        assert shown[kind] == [str(kinds.count(kind)), *map(str, ends)]
        assert found["head_types"]["top"][kind] == ends[0]
    text = text_of(parsed(build(*finding)))
    assert "averages over all query rows of 2 induction prompts of 64 tokens" in text


def test_the_certified_tie_is_a_false_negative_only_without_tolerance(finding):
    found, rows, _ = finding
    entry = next(
        e for e in found["bound"] if (e["suite"], e["bias_kind"], e["p"]) == ("niah_64", "zero", 2)
    )
    assert (entry["false_negative"], entry["false_negative_eps"]) == (1, 0)
    columns = figures.argmax_rows(rows, "niah_64", "zero")
    drawn = figures.bound_scatter(columns, degree=2, seed=0, where="here")
    assert "tie (S₂ = 1)" in drawn
    assert "certified, unsafe" not in drawn.replace("not certified, unsafe", "")


def test_controls_stand_first_and_the_verdict_names_what_may_be_replaced(finding):
    tree = parsed(build(*finding))
    held, said = (div for div in tree.find("header").iter("div") if "verdict" in div.get("class"))
    assert "12 of 12 prompts at 64 tokens" in text_of(held)
    assert "0 of 50" not in text_of(held)
    low = 100 * wilson(12, 12).low
    assert f"{low:.0f} to 100 % with the needle" in text_of(held)
    assert "None of the 4 recipes tried is shown to lose less than 5 points" in text_of(said)
    assert "undecided: relu_p4_bauto (12 of 12), sigmoid_b0 (11 of 12)" in text_of(said)
    assert "takes 73 prompts or more. With the 12 of this run a true loss of" in text_of(said)
    assert (
        "relu_p2_bauto in K heads only, right of 12 (softmax 12), 2 random sets per K: K = 1: "
        "highest S₂ 11, lowest 12, random 12; K = 2: highest S₂ 1, lowest 12, random 5 to 9. "
        "Whether the ranking by S₂ is decisive (worse than every random set) is not said below 19 "
        "draws." in text_of(said)
    )


def test_the_ablation_is_told_at_every_size_with_the_flag_of_the_paper():
    sets = {"softmax": 12, "top-1": 9, "bottom-1": 8, "top-2": 1, "bottom-2": 12}
    sets |= {f"random-1-{seed}": 9 + (seed > 0) for seed in range(20)}
    sets |= {f"random-2-{seed}": 2 + seed // 2 for seed in range(20)}
    finding = audit(dataclasses.replace(SETTINGS, ablation_draws=20), CORRECT, sets)
    told = wording.in_part(finding[0])
    assert "K = 1: highest S₂ 9, lowest 8, random 9 to 10; K = 2: highest S₂ 1" in told
    assert "19 of 20 at K = 1 (not decisive), 20 of 20 at K = 2 (decisive)" in told
    rows = lines(parsed(build(*finding)), "Prompts answered with the recipe in K heads")
    assert [(row[0], row[3], row[4], row[5]) for row in rows] == [
        ("1", "9 to 10", "19 of 20", "no"),
        ("2", "2 to 11", "20 of 20", "yes"),
    ]


def test_absent_parts_leave_a_valid_page():
    config = dataclasses.replace(
        SETTINGS, niah_lengths=(64,), ablation_heads=(), induction_n=0, mqar_n=0
    )
    rows = diagnosed_rows(suites=("niah_64",))
    dead = pa.array(np.full(rows.num_rows, Status.DEAD), pa.int8())
    rows = rows.set_column(rows.column_names.index("status"), "status", dead)
    found, rows, by_head = audit(config, {"softmax": 12, "sigmoid_b0": 0}, {}, rows, second=np.nan)
    assert np.isinf(by_head["s_2"]).all()
    assert np.isnan(by_head["relative_margin"]).all()
    assert set(by_head["type"]) == {"unknown"} and np.isnan(by_head["induction"]).all()
    tree = parsed(build(found, rows, by_head))
    titles = [text_of(title) for title in tree.iter("h2")]
    assert not any(title.startswith(("Ablation", "Head types")) for title in titles)
    assert "nothing to show" in text_of(tree)
    assert "The controls do not hold" in text_of(tree.find("header"))


def test_a_summary_read_back_from_json_gives_the_same_page(finding, tmp_path):
    found, rows, by_head = finding
    runs.write_json(tmp_path / "summary.json", found)
    pq.write_table(pa.table(by_head), tmp_path / "heads.parquet")
    heads = columns(pq.read_table(tmp_path / "heads.parquet"))
    assert build(runs.read_json(tmp_path / "summary.json"), rows, heads) == build(*finding)


def test_hostile_text_stays_text(finding):
    found, rows, by_head = copy.deepcopy(finding)
    found["model"] = found["weights"][0] = HOSTILE
    found["verdicts"][0]["finding"] = HOSTILE
    place = next(i for i, e in enumerate(found["sweep"]) if e["recipe"] == "relu_p4_b0")
    found["sweep"][place]["recipe"] = found["sweep"][place]["cell"] = HOSTILE
    found["ranking_suite"] = found["config"]["haystack"] = HOSTILE
    tree = parsed(build(found, rows, by_head, command=HOSTILE))
    assert not {"script", "img", "x"} & {node.tag for node in tree.iter()}
    assert "onerror=alert(1)>" in text_of(tree.find("header"))
    assert "{{ 7 * 7 }}" in text_of(tree.find("footer"))


def test_the_sample_of_the_scatter_is_fixed_counted_and_told(finding, monkeypatch):
    columns = figures.argmax_rows(finding[1], "induction", "auto")
    total = len(columns["p_star"])
    monkeypatch.setattr(figures, "MOST_ROWS", 20)
    first, second = (
        figures.bound_scatter(columns, degree=2, seed=0, where="here") for _ in range(2)
    )
    assert first == second != figures.bound_scatter(columns, degree=2, seed=1, where="here")
    assert f"a fixed random 20 of {total} rows" in first
    missing = int(re.search(r"(\d+) value", first)[1]) if "value" in first else 0
    # the markers of the legend have no title
    assert first.count("<title>") + missing == 20


def test_the_histogram_has_every_row_in_a_bar_or_in_words(finding):
    p_star = figures.argmax_rows(finding[1], "induction", "auto")["p_star"]
    p_star = np.r_[p_star, np.inf]
    drawn = figures.degree_histogram(
        p_star, figures.degree_edges([p_star], (2, 4)), (2, 4), where="here"
    )
    in_bars = [int(count) for count in re.findall(r": (\d+)</title>", drawn)]
    none_needed = int(np.sum(p_star == 0))
    assert f"{none_needed} rows that need no degree" in drawn
    assert "1 for which none suffices" in drawn
    assert sum(in_bars) + none_needed + 1 == len(p_star)


def like_the_paper(found, **changes):
    """A summary with the paper's model, lengths and numbers of prompts, but for `changes`."""
    found = copy.deepcopy(found) | {"model": "models/Llama-3.2-1B", "layers": 16, "heads": 32}
    lengths = {"induction_length": 4096, "mqar_length": 4096, "sweep_length": 1536}
    found["config"] |= lengths | {"induction_n": 200} | changes
    found["calibration"]["length"] = changes.get("calibration_length", 1024)
    found["controls"]["accuracy"]["niah_1536"] = found["controls"]["accuracy"]["niah_64"]
    for entry in found["sweep"]:
        entry["accuracy"]["n"] = 200
    for entry in found["prevalence"]:
        entry["prompts"] = 200
    return found


def judged(tree, caption):
    """By the first column: the second, and the last."""
    return {row[0]: (row[1], row[-1]) for row in lines(tree, caption)}


def test_a_model_of_the_paper_is_judged_where_length_and_prompts_agree(finding):
    found, rows, by_head = finding
    tree = parsed(build(like_the_paper(found), rows, by_head))
    needle = {row[0]: row[1] for row in lines(tree, "Needle probe, ours")}
    assert needle["relu_p4_bauto"].startswith("✓ 100.0")
    assert "paper 100.0 ± 7.0" in needle["relu_p4_bauto"]
    assert needle["sigmoid_b0"].startswith("✗ 91.7")
    assert "paper, Llama-3.2-1B" in text_of(tree)
    assert "not comparable:" not in text_of(tree)
    bound = judged(tree, "Calibration and bound")
    assert bound["false negatives at p = 2"][0].endswith("paper 10 of 102,000")
    assert bound["false positives at p = 2"][0].endswith("paper 41,666 of 102,000")
    assert bound["b_auto"][0].startswith("✗ 1.50 [1.31, 1.67]")


@pytest.mark.parametrize(
    ("changes", "caption", "line", "reason"),
    [
        (
            {"sweep_length": 64},
            "Needle probe, ours",
            "softmax",
            "Not comparable: prompts of 64 tokens (paper: 1,500).",
        ),
        (
            {"mqar_length": 2048},
            "Unsafe rows, ours",
            "MQAR2,048 tokens, b = 0",
            "not comparable: prompts of 2,048 tokens (paper: 4,096)",
        ),
        (
            {"calibration_length": 512},
            "Unsafe rows, ours",
            "MQAR4,096 tokens, b_auto",
            "not comparable: b_auto of 512 tokens (paper: 1,024)",
        ),
        (
            {"calibration_length": 512},
            "Needle probe, ours",
            "relu_p4_bauto",
            "At b_auto not comparable: b_auto of 512 tokens (paper: 1,024).",
        ),
        (
            {"induction_n": 99},
            "Calibration and bound",
            "bound agrees at p = 2, %",
            "bound not comparable: 99 prompts (paper: 200).",
        ),
    ],
)
def test_unlike_numbers_are_not_judged_and_say_why(finding, changes, caption, line, reason):
    found, rows, by_head = finding
    tree = parsed(build(like_the_paper(found, **changes), rows, by_head))
    assert judged(tree, caption)[line][0][0] not in "✓≈✗"
    assert reason in text_of(tree)


def test_few_short_prompts_of_a_model_of_the_paper_are_not_judged(finding):
    found, rows, by_head = finding
    tree = parsed(build(found | {"model": "models/Llama-3.2-1B"}, rows, by_head))
    for caption in ("Needle probe, ours", "Unsafe rows, ours", "Calibration and bound"):
        marks = [text for row in lines(tree, caption) for text in row if text[:1] in "✓≈✗" and text]
        assert marks == []
    shape = "3 layers of 2 heads (paper: 16 of 32)"
    why = f"{shape}, prompts of 64 tokens (paper: 4,096), 12 prompts (paper: 200)"
    assert f"not comparable: {why}" in text_of(tree)
    assert f"b_auto not comparable: {shape}, b_auto of 64 tokens (paper: 1,024)" in text_of(tree)
    assert "paper, Llama-3.2-1B" not in text_of(tree)


def test_another_model_is_not_judged_and_one_without_kin_is_told_so(finding):
    found, rows, by_head = finding
    needle = lines(parsed(build(*finding)), "Needle probe, ours")
    assert [cell for _, cell in needle if cell[0] in "✓≈✗"] == []
    page = text_of(parsed(build(found | {"family": "gpt2"}, rows, by_head)))
    assert "none of them is of its architecture" in page


@pytest.mark.parametrize(
    ("correct", "tone", "part"),
    [
        (
            {"softmax": 6, "relu_p4_b0": 6},
            "warn",
            "No verdict on Other-1B: softmax itself is right",
        ),
        ({"softmax": 12, "relu_p4_b0": 3}, "bad", "The recipe tried does not preserve"),
        (
            {"softmax": 12, "relu_p4_b0": 3, "sigmoid_b0": 4},
            "bad",
            "the best, sigmoid_b0, is right",
        ),
        (
            {"softmax": 12, "relu_p4_b0": 12},
            "warn",
            "The recipe tried is not shown to lose less than 5 points",
        ),
    ],
)
def test_the_overall_sentence(correct, tone, part):
    found = wording.overall(audit(correct=correct)[0])
    assert found.tone == tone
    assert part in found.text


def test_one_recipe_that_preserves_is_the_answer():
    found, _, _ = audit(correct={"softmax": 12, "relu_p4_b0": 12, "sigmoid_b0": 0})
    tolerant = audit(
        dataclasses.replace(SETTINGS, tolerance=0.3), {"softmax": 12, "relu_p4_b0": 12}
    )[0]
    assert wording.overall(found).tone == "warn"
    said = wording.overall(tolerant)
    assert said.tone == "good"
    assert "The recipe tried can replace softmax" in said.text
    assert "lose less than 30 points" in said.text


@pytest.mark.parametrize(
    ("softmax", "right", "recipe", "verdict", "reason"),
    [
        (12, 12, "relu_p4_bauto", "undecided", "anything from -24.2 to +24.2 points"),
        (12, 10, "relu_p4_bauto", "undecided", "do not tell whether the loss is smaller than 5"),
        (12, 0, "relu_p4_bauto", "no-go", "part of the rows is measured safe"),
        (12, 0, "sigmoid_b0", "no-go", "S_p is not measured for this map"),
        (6, 0, "relu_p4_bauto", "undecided", "softmax itself is right in 6 of 12 prompts"),
    ],
)
def test_a_verdict_gives_the_reason_that_holds(softmax, right, recipe, verdict, reason):
    found = audit(correct={"softmax": softmax, recipe: right})[0]
    (decided,) = found["verdicts"]
    assert decided["verdict"] == verdict
    assert reason in decided["reason"]
    assert decided["could_decide"] == softmax
    (entry,) = (e for e in found["sweep"] if e["recipe"] == recipe)
    assert entry["verdict"] == verdict


def test_the_next_step_names_the_ablation_only_where_there_is_one():
    correct = {"softmax": 12, "relu_p4_bauto": 0}
    with_sets, without = (
        audit(dataclasses.replace(SETTINGS, ablation_heads=sizes), correct)[0]["verdicts"][0]
        for sizes in ((1, 2), ())
    )
    assert "the ablation shows which sets of heads bear it" in with_sets["next"]
    assert "config.ablation_heads tries the recipe in some heads" in without["next"]


def printed(found, **options):
    file = io.StringIO()
    console.print_summary(found, report="runs/x/report.html", console=Console(file=file, **options))
    return file.getvalue()


def test_the_console_fits_and_holds_every_verdict(finding):
    found = finding[0]
    piped = printed(found)
    assert max(map(len, piped.splitlines())) <= 100
    assert "\x1b" not in piped
    for v in found["verdicts"]:
        row = next(line for line in piped.splitlines() if line.startswith(v["recipe"]))
        assert row.split()[-1] == v["verdict"]
    assert piped.splitlines()[0].startswith("The controls hold")
    assert piped.splitlines()[-1] == "report: runs/x/report.html"
    terminal = printed(found, force_terminal=True, width=80, no_color=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal)
    assert max(map(len, plain.splitlines())) <= 80
    assert "relu_p4_bauto" in plain


def test_the_console_prints_text_as_text_in_any_encoding(finding):
    found = dict(finding[0], model="models/[red]x\x1b[31m漢")
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii")
    console.print_summary(found, console=Console(file=file))
    file.flush()
    shown = buffer.getvalue().decode("ascii")
    assert "[red]x" in shown
    assert "\x1b" not in shown
    assert "S_2" in shown
