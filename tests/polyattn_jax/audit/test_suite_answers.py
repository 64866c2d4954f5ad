"""Answers to named suites: one pass judges greedy decoding, results follow from their file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.config import to_plain
from polyattn_jax import recipe
from polyattn_jax.audit import audit_suites, measure, suite_answers
from polyattn_jax.audit.audited_model import load
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.head_sets import SINGLE
from polyattn_jax.audit.suite_answers import failure
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.suites.prompts import Prompt
from tests import tiny
from tests.polyattn_jax.conftest import HOPELESS, SUITES

STEPS = 4


def test_one_pass_judges_what_greedy_decoding_writes():
    """The oracle is `lm_jax.generate` with the recipe as its attend."""
    cfg = tiny.decoder()
    params = jax.tree.map(lambda x: 4.0 * x, lm_jax.init_params(jax.random.key(1), cfg))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, size).tolist() for size in (9, 13, 5)]
    specs = ("softmax", "relu:p=4,b=1", "relu_over_length:p=2,alpha=1")
    maps = tuple(parse_recipe(spec).map for spec in specs)
    written = {}
    for index, spec in enumerate(specs):
        written[spec] = lm_jax.generate(
            params, prompts, cfg, max_new_tokens=STEPS, attend=recipe(spec)
        )
        # Row b has a wrong token at step b, the first none; what follows it does not matter.
        answers = [list(row) for row in written[spec]]
        for b in (1, 2):
            answers[b][b] = (answers[b][b] + 1) % cfg.vocab_size
        rows = [[*p, *a[:-1]] for p, a in zip(prompts, answers, strict=True)]
        lengths = np.array([len(row) for row in rows])
        tokens_BT = np.zeros((3, lengths.max()), np.int32)
        for b, row in enumerate(rows):
            tokens_BT[b, : len(row)] = row
        judged = measure.answers(
            params,
            jnp.asarray(tokens_BT),
            jnp.asarray(lengths),
            jnp.asarray(lengths[:, None] - STEPS + np.arange(STEPS)),
            jnp.asarray(answers),
            jnp.int32(index),
            jnp.float32(parse_recipe(spec).bias),
            jnp.ones((cfg.num_layers, cfg.num_heads), bool),
            cfg=cfg,
            maps=maps,
        )
        assert judged["step"].tolist() == [STEPS - 1, 1, 2]
        steps = enumerate(judged["step"].tolist())
        assert judged["predicted"].tolist() == [written[spec][b][step] for b, step in steps]
        assert judged["target"].tolist() == [answers[0][-1], answers[1][1], answers[2][2]]
        assert judged["rank"].tolist()[0] == 0 and min(judged["rank"].tolist()[1:]) > 0
    assert len({json.dumps(each) for each in written.values()}) == len(specs)


def test_a_wrong_answer_is_named_after_the_needle_that_it_continues():
    others = [["decoy", [5, 7, 9]], ["fake", [5, 6, 3]]]
    prompt = Prompt("a", (0, 5, 6), (5, 6, 8), (1, 2, 3), (0, 1, 2), meta={"others": others})
    assert [failure(prompt, 2, token) for token in (8, 3, 9)] == ["", "fake", "other"]
    assert [failure(prompt, 1, token) for token in (7, 4)] == ["decoy", "other"]
    assert failure(prompt, 0, 4) == "other"
    assert failure(dataclasses.replace(prompt, meta={}), 0, 4) == "other"


def test_results_of_named_suites_follow_from_their_parquet_file(asked):
    folder, result, printed = asked
    lengths = sorted({entry.length for entry in result.suites})
    rows = pq.read_table(folder / "suite_answers.parquet").to_pylist()
    assert {row["stage"] for row in rows} == {"suites", "ablation"}
    assert {row["step"] for row in rows} == {0}
    rows = [row for row in rows if row["stage"] == "suites"]
    swept, recipes = {entry.cell for entry in result.sweep}, {"softmax", "relu_p4_b0"}
    assert len(rows) == len(SUITES) * len(lengths) * 5 * len(recipes)
    assert [entry.suite for entry in result.suites] == [n for n in SUITES for _ in lengths]
    diagnosed = pq.read_table(folder / "rows.parquet").to_pylist()
    for entry in result.suites:
        name = f"{entry.suite}_{entry.length}"
        own = [row for row in rows if row["suite"] == name]
        assert {row["length"] for row in own} == {entry.length}
        for condition in entry.conditions:
            answers = [row for row in own if row["cell"] == condition.cell]
            right = [row["predicted"] == row["target"] for row in answers]
            assert condition.accuracy.estimate == np.mean(right) and condition.accuracy.n == 5
            assert [row["failure"] == "" for row in answers] == right
            assert sum(entry.failures[condition.cell].values()) == 5 - sum(right)
        safe = {kind for kind, share in entry.safe.items() if share is not None}
        assert safe == swept - {"relu_p1_over_L", parse_recipe(HOPELESS).name}
        active = [
            row["s_4"] < 1
            for row in diagnosed
            if (row["suite"], row["bias_kind"], row["target"]) == (name, "zero", "argmax")
            and row["status"] == 1
        ]
        assert entry.safe["relu_p4_b0"].estimate == pytest.approx(np.mean(active))
    assert "Other suites, n = 5 prompts each" in printed


def test_heads_at_both_ends_of_the_ranking_are_replaced_one_at_a_time(asked):
    folder, result, _ = asked
    heads = pq.read_table(folder / "heads.parquet").to_pylist()
    ranked = [(h["layer"], h["head"]) for h in sorted(heads, key=lambda h: h["rank"])]
    places = [*ranked[:2], *ranked[:-3:-1]]
    names = {f"single-{layer}-{head}" for layer, head in places}
    assert {one.cell for one in result.single_heads} == {"softmax", *names}
    sets = pq.read_table(folder / "head_sets.parquet").to_pylist()
    single = [(row["layer"], row["head"]) for row in sets if row["group"] == "single"]
    assert single == places
    answers = pq.read_table(folder / "answers.parquet").to_pylist()
    for entry in result.single_heads:
        own = [row for row in answers if (row["stage"], row["cell"]) == (SINGLE, entry.cell)]
        assert entry.accuracy.estimate == np.mean([r["predicted"] == r["target"] for r in own])
        assert {row["heads"] for row in own} == {int(entry.cell != "softmax")}


def test_the_head_sets_of_the_ablation_are_tried_on_a_named_suite(asked):
    folder, result, _ = asked
    (entry,) = result.suite_ablation
    # The last of `suite_lengths`, and the first four prompts.
    assert (entry.suite, entry.length) == ("decoys", max(e.length for e in result.suites))
    rows = pq.read_table(folder / "suite_answers.parquet").to_pylist()
    rows = [row for row in rows if row["stage"] == "ablation"]
    assert {row["suite"] for row in rows} == {f"decoys_{entry.length}"}
    assert len({row["prompt"] for row in rows}) == result.config.ablation_n == 4
    assert [e.cell for e in entry.conditions] == [e.cell for e in result.ablation]
    assert [e.heads for e in entry.conditions] == [e.heads for e in result.ablation]
    right = {
        e.cell: sum(row["predicted"] == row["target"] for row in rows if row["cell"] == e.cell)
        for e in entry.conditions
    }
    for one in entry.decisiveness:
        assert (one.top, one.bottom, one.n) == (
            right[f"top-{one.size}"],
            right[f"bottom-{one.size}"],
            4,
        )
        assert one.random == (right[f"random-{one.size}-0"],)
    # Softmax in no head is softmax everywhere, whatever the stage.
    base = [
        [
            row["predicted"]
            for row in pq.read_table(folder / "suite_answers.parquet").to_pylist()
            if (row["stage"], row["cell"], row["suite"])
            == (stage, "softmax", f"decoys_{entry.length}")
        ]
        for stage in ("ablation", "suites")
    ]
    assert base[0] == base[1][:4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ablation_suites": ("decoys",)}, "'decoys', which is not in config.suites"),
        ({"suite_recipes": ("relu_p2_b0",)}, "'relu_p2_b0', which is not in config.recipes"),
        (
            {"single_heads": 1, "ablation_heads": ()},
            "config.single_heads needs config.ablation_heads",
        ),
        (
            {"ablation_suites": ("decoys",), "suites": ("decoys",), "ablation_heads": ()},
            "config.ablation_suites needs config.ablation_heads",
        ),
        (
            {"ablation_suites": ("decoys@64",), "suites": ("decoys@32", "mqar@64")},
            "'decoys@64', which is not in config.suites",
        ),
        (
            {"ablation_suites": ("decoys@x",), "suites": ("decoys@32",)},
            "'decoys@x', which is not in config.suites",
        ),
        (
            {"ablation_suites": ("decoys", "decoys@32"), "suites": ("decoys@32",)},
            "names a suite and length twice",
        ),
    ],
)
def test_suites_of_the_ablation_that_cannot_be_tried_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        AuditConfig(**{"model": "m", "ablation_heads": (1,), **changes})


def test_a_needle_suite_of_the_length_of_the_sweep_has_its_answers(asked):
    folder, _, _ = asked
    named = pq.read_table(folder / "suite_answers.parquet").to_pylist()
    swept = pq.read_table(folder / "answers.parquet").to_pylist()
    key = {(r["cell"], r["prompt"]): r["predicted"] for r in swept if r["stage"] == "sweep"}
    own = {(r["cell"], r["prompt"]): r["predicted"] for r in named if r["suite"] == "needle_64"}
    assert own and own.items() <= key.items()


def test_each_suite_is_built_at_its_own_length_and_ablated_at_its_last(tiny, haystack):
    own = {
        "suites": ("decoys@96", "mqar", "decoys@64"),
        "suite_lengths": (64, 32),
        "suite_n": 3,
        "ablation_heads": (1,),
        "niah_lengths": (64,),
        "sweep_length": 64,
        **{f"{name}_length": 64 for name in ("induction", "mqar")},
        "haystack": str(haystack),
    }
    config = AuditConfig(str(tiny), ablation_suites=("mqar", "decoys"), ablation_n=2, **own)
    wanted = (("decoys", 96), ("mqar", 64), ("mqar", 32), ("decoys", 64))
    assert config.asked_suites == wanted
    assert config.ablated_suites == (("mqar", 32), ("decoys", 64))
    one = dataclasses.replace(config, ablation_suites=("decoys@96",))
    assert one.ablated_suites == (("decoys", 96),)
    suites = audit_suites.build_suites(load(config))
    held = audit_suites.answered(suites, config)
    assert list(held) == [f"{name}_{length}" for name, length in wanted]
    for (_, length), suite in zip(wanted, held.values(), strict=True):
        assert {len(prompt.tokens) for prompt in suite.prompts} == {length}
        assert len(suite.prompts) == 3
    ablated = suite_answers.ablated(suites, config)
    assert {key: len(suite.prompts) for key, suite in ablated.items()} == {
        "mqar_32": 2,
        "decoys_64": 2,
    }


def test_settings_without_lengths_of_their_own_are_stored_as_before():
    """A run of an earlier version, whose settings have none of them, is resumed."""
    stored = to_plain(AuditConfig("m", suites=("decoys", "mqar"), suite_lengths=(64, 32)))
    assert "context" not in stored and stored["suites"] == ["decoys", "mqar"]
    assert to_plain(AuditConfig("m", context=64))["context"] == 64


def test_a_context_beyond_the_model_s_needs_rotary_positions(tiny, toy, haystack):
    length = 272
    config = AuditConfig(
        str(tiny),
        haystack=str(haystack),
        niah_lengths=(64,),
        sweep_length=64,
        induction_length=length,
        induction_n=1,
        mqar_n=0,
    )
    model = load(config).model
    assert model.cfg.max_length < length
    with pytest.raises(BadInputError, match=f"it has {length} tokens, the limit is 256"):
        audit_suites.build_suites(load(config))
    longer = load(dataclasses.replace(config, context=length))
    (prompt,) = audit_suites.build_suites(longer)["induction"].prompts
    assert len(prompt.tokens) == length
    # The limit decides nothing but what is refused: positions go on beyond it.
    tokens = jnp.array([prompt.tokens])
    grown = dataclasses.replace(model.cfg, max_length=2 * length)
    ours, wanted = (
        lm_jax.forward(model.params, tokens, cfg).logits for cfg in (longer.model.cfg, grown)
    )
    np.testing.assert_array_equal(ours, wanted)
    learned = dataclasses.replace(config, model=str(toy("gpt2")), context=257)
    with pytest.raises(BadInputError, match=r"beyond the 256 positions that .* has learned"):
        load(learned)
    assert load(dataclasses.replace(learned, context=256)).longest == 256


def test_settings_of_suites_are_checked():
    with pytest.raises(UsageError, match=r"config\.suites has 'decoy'; did you mean 'decoys'"):
        AuditConfig("a", suites=("decoy",))
    with pytest.raises(UsageError, match="without prompts"):
        AuditConfig("a", suites=("decoys",), suite_lengths=())
    with pytest.raises(UsageError, match=r"config\.suite_n = 0 must be at least 1"):
        AuditConfig("a", suite_n=0)
