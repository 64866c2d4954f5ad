"""Results of an audit of six heads, from random rows, and the parts of its page."""

import dataclasses
import types
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from lm_jax.report import facts, page
from lm_jax.report.markup import number
from lm_jax.run.files import to_jsonable
from lm_jax.statistics import Interval
from polyattn_jax.audit import schema
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import ConditionResult
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.recipes.calibrate import AtLength, Calibration
from polyattn_jax.recipes.diagnostic import Status, required_degree
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import resolve_bias
from polyattn_jax.studies.audit import numbers, report, terminal
from tests import tiny
from tests.browser import without_scripts

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
PROVENANCE = Provenance(
    start="2026-01-02",
    command="python -m polyattn_jax.studies.audit",
    git=None,
    packages={"jax": "0.1"},
    python="3.11",
    system="Linux",
    device=None,
    dtype="float32",
    seeds={"audit": 0},
    data={},
    tokenizer=None,
    restarts=(),
    config_hash="0" * 64,
)


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
    by_name = {
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
    by_name["active"][0], by_name["p_star"][0], by_name["status"][0] = 1, 0.0, Status.ACTIVE
    for p in (2, 4, 8, 16):
        by_name[f"s_{p}"][0] = 1.0
    return table(by_name, schema.ROWS)


def table(by_name, fields):
    size = len(next(iter(by_name.values())))
    columns = [
        pa.array(
            by_name.get(f.name, [""] * size if f.type == pa.string() else np.zeros(size))
        ).cast(f.type)
        for f in fields
    ]
    return pa.Table.from_arrays(columns, schema=fields)


def answers(correct, ablation, left_out):
    """How many of the prompts each cell gets right, and softmax where the needle was left out."""
    by_name = {name: [] for name in ("stage", "cell", "recipe", "heads", "suite", "prompt")}
    by_name |= {name: [] for name in ("target", "predicted", "loss", "rank")}
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
                by_name[name].append(value)
    return table(by_name, schema.ANSWERS)


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


CURVE = (
    AtLength(length=16, bias=0.75, low=0.61, high=0.9, least=0.5, most=1.12),
    AtLength(length=64, bias=1.5, low=1.31, high=1.67, least=1.1, most=1.9),
)
CALIBRATION = Calibration(
    bias=1.5012345,
    low=1.31,
    high=1.67,
    mass=0.05,
    length=64,
    texts=8,
    rows=5000,
    passes=4,
    step=0.004,
    curve=CURVE,
)
SOURCE = numbers.Source("f" * 64, "llama", ("w.safetensors",), PROVENANCE)
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


def audit(
    config=SETTINGS,
    correct=CORRECT,
    ablation=ABLATION,
    rows=None,
    second=1.25,
    left_out=0,
    choices=types.MappingProxyType({}),
    suites=(),
):
    """What an audit leaves behind: summary, rows, heads."""
    rows = diagnosed_rows() if rows is None else rows
    losses = {"prompt": ["a", "a"], "copy": [1, 2], "loss": [12.5, second], "correct": [0.0, 0.75]}
    tables = numbers.Tables(
        rows,
        answers(correct, ablation, left_out),
        table(losses | {"tokens": [99, 99]}, schema.LOSSES),
        table(head_features() if config.induction_n else {"prompt": []}, schema.FEATURES),
        table({"prompt": []}, schema.TEXT_LOSSES),
    )
    linear = [
        linear_state(one, resolve_bias(one, CALIBRATION.bias), tiny.decoder())
        for one in config.by_name.values()
    ]
    result, by_head = numbers.summarise(
        tables, CALIBRATION, config, SHAPE, SOURCE, choices, suites, linear, {}
    )
    return result, rows, by_head


def condition(cell, accuracy, n, **changes):
    """The result of one condition of a stage, with this accuracy of `n` prompts."""
    result = ConditionResult(
        cell=cell,
        recipe=cell,
        bias=0.0,
        heads=6,
        accuracy=Interval(accuracy, 0.0, 1.0, n),
        verdict="undecided",
        delta=Interval(0.0, -1.0, 1.0, n),
        p_value=1.0,
        lost=0,
        won=0,
        loss=0.0,
        median_rank=0.0,
        dead_rows_per_prompt=0.0,
    )
    return dataclasses.replace(result, **changes)


def build(result, rows, by_head):
    """The page, as the frame makes it."""
    built = report.compose(result, lambda: report.sections(result, rows, by_head))
    return page(
        built.title,
        built.sections(),
        provenance=facts(to_jsonable(result.provenance)) | dict(built.facts),
        lead=built.lead,
    )


def parsed(html):
    """The body as strict XML, which fails on anything unescaped or unclosed.

    Scripts that run are left out; what a script element holds as data is not.
    """
    body = without_scripts(html[html.index("<body>") :])
    return ElementTree.fromstring(body.removesuffix("</html>\n").removesuffix("</html>"))


def text_of(node):
    return "".join(node.itertext())


def lines(tree, caption):
    """The rows, as lists of texts, of the one table whose caption begins so."""
    (result,) = (
        figure
        for figure in tree.iter("figure")
        if figure.get("class") == "table" and text_of(figure.find("figcaption")).startswith(caption)
    )
    return [[text_of(cell) for cell in row] for row in result.find(".//tbody")]


def percent(value, spec=".1f"):
    return number(100 * value, spec)


def printed(result):
    """The text of the terminal."""
    return "\n".join(terminal.lines(result))
