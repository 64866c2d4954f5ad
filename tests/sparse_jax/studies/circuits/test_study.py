"""The study on tiny models: numbers from its rows, a planted head, lost parts, refusals."""

from collections import Counter
import dataclasses
import functools
import itertools
import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from iaj_kernels.rounding import error_bound
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.statistics import Interval, cluster_interval
from lm_jax.study import frame
from lm_jax.weights.load import open_pretrained
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.mib import load_graph
from sparse_jax.circuits.rules import RULES
from sparse_jax.studies.circuits import STUDY, report
from sparse_jax.studies.circuits.inputs import open_model, read_tasks
from sparse_jax.studies.circuits.piece import Measurement
from sparse_jax.studies.circuits.results import CircuitSummary, DrawnPrompt, drawn_file
from sparse_jax.studies.circuits.run import MIB, task_facts
from sparse_jax.studies.circuits.settings import COMPONENTS, CircuitConfig
from tests.sparse_jax.circuits.small_study import (
    COUNT,
    HEADS,
    LAYERS,
    SMALL,
    example,
    save_models,
    write_lines,
)

# Run by `make test-all`.
pytestmark = pytest.mark.long

ROWS = "rows.parquet"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def settings(models, **changes):
    defaults = {
        "dense": str(models / "dense"),
        "control": str(models / "planted"),
        "rephrased": str(models / "mine.jsonl"),
        "accuracy_bar": 0.01,
        "ablations": ("counterfactual", "resample"),
        "components": COMPONENTS,
    }
    return STUDY.settings(**SMALL | defaults | changes)


@pytest.fixture(scope="module", autouse=True)
def two_rules():
    """Attributions under two gradient rules, which is how often their programs are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(RULES) - {"exact", "gim"}:
            patch.delitem(RULES, name)
        yield


@pytest.fixture(scope="module")
def done(models, tmp_path_factory):
    """A finished study of two models and two wordings: its folder."""
    folder = tmp_path_factory.mktemp("study")
    run(settings(models), folder)
    return folder


def run(config, folder):
    frame.execute(STUDY, config, folder)


@functools.cache
def table_of(folder):
    return pq.read_table(folder / ROWS).to_pylist()


def rows_of(folder, **labels):
    """Rows with these values, as dicts."""
    return [row for row in table_of(folder) if row.items() >= labels.items()]


def by(rows, *names):
    """Values by the named columns; several of one place are averaged."""
    result = {}
    for row in rows:
        result.setdefault(tuple(row[name] for name in names), []).append(row["value"])
    return {place: math.fsum(values) / len(values) for place, values in result.items()}


def explained(folder, whole, **labels):
    """Explained effect by size, written out: a ratio of sums over prompts."""
    metric = by(rows_of(folder, quantity="curve", **labels), "size", "prompt")
    prompts = sorted({prompt for _, prompt in metric})
    total = sum(whole[prompt,] - metric[0, prompt] for prompt in prompts)
    return {
        size: sum(metric[size, prompt] - metric[0, prompt] for prompt in prompts) / total
        for size in sorted({size for size, _ in metric} - {0})
    }


def crossing(points, fraction):
    """Log-linear interpolation written out."""
    before = None
    for size, value in points.items():
        if value >= fraction:
            if before is None:
                return size
            share = (fraction - before[1]) / (value - before[1])
            return math.exp((1 - share) * math.log(before[0]) + share * math.log(size))
        before = (size, value)
    return math.nan


def test_the_summary_is_that_of_its_rows(done):
    """Accuracies, means, curves, crossings, CPR, CMD, ratios and correlations, from the rows."""
    summary = load_result(done / frame.SUMMARY, CircuitSummary)
    crossings, solved, correlations = {}, {}, {}
    assert len(summary.results) == 4
    for result in summary.results:
        own = {"task": result.task, "model": result.model}
        clean = by(rows_of(done, quantity="metric", method="clean", **own), "prompt")
        assert len(clean) == COUNT
        assert result.accuracy.estimate == sum(value > 0 for value in clean.values()) / COUNT
        assert result.clean.estimate == pytest.approx(math.fsum(clean.values()) / COUNT)
        corrupt = by(rows_of(done, quantity="metric", method="corrupt", **own), "prompt")
        change = cluster_interval(
            [clean[place] - corrupt[place] for place in clean],
            np.arange(COUNT),
            resamples=summary.config.resamples,
            seed=summary.config.seed,
        )
        bar = summary.config.accuracy_bar
        solved[result.task, result.model] = result.accuracy.estimate >= bar and change.low > 0
        # Two ablations of heads and component edges, one of token edges; signed and absolute, by
        # prompt and by task, and random.
        assert len(result.curves) == 25
        for curve in result.curves:
            names = {name: getattr(curve, name) for name in ("component", "ablation", "ranking")}
            points = explained(done, clean, **own, **names, scope=curve.scope)
            assert [point.size for point in curve.points] == list(points)
            np.testing.assert_allclose(
                [point.explained for point in curve.points], list(points.values()), rtol=1e-9
            )
            crossed = crossing(points, summary.config.fraction)
            assert curve.crossing.estimate == pytest.approx(crossed)
            crossings[(*own.values(), *names.values(), curve.scope)] = crossed
            shares = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
            full = max(points)
            f = [points.get(int(share * full), 0.0) for share in shares]
            pairs = list(zip(shares, f, strict=True))
            steps = [(b[0] - a[0], a[1], b[1]) for a, b in itertools.pairwise(pairs)]
            assert curve.cpr == pytest.approx(sum(width * (a + b) / 2 for width, a, b in steps))
            distance = sum(width * (abs(1 - a) + abs(1 - b)) / 2 for width, a, b in steps)
            assert curve.cmd == pytest.approx(distance)
            # The triangle inequality of one ranking.
            assert curve.cpr + curve.cmd >= 0.999 - 1e-9
        # Of heads in both directions; two methods of component edges.
        kinds = [(each.component, each.method) for each in result.agreements]
        counts = {("heads", "attribution"): 2, ("token_edges", "attribution"): 1}
        counts |= dict.fromkeys([("component_edges", "eap"), ("component_edges", "eap_ig")], 1)
        assert Counter(kinds) == {kind: len(RULES) * times for kind, times in counts.items()}
        place = ("layer", "head", "query", "key", "writer", "reader")
        effects = by(
            rows_of(done, quantity="effect", **own),
            *("component", "direction", "method", "rules"),
            *place,
        )
        for agreement in result.agreements:
            kind = (agreement.component, agreement.direction)
            exact, estimates = (
                [value for place, value in effects.items() if place[:4] == (*kind, *names)]
                for names in (("exact", None), (agreement.method, agreement.rules))
            )
            assert len(exact) == len(estimates) == agreement.compared
            if np.ptp(exact) == 0 or np.ptp(estimates) == 0:
                assert agreement.spearman is None
                continue
            want = stats.spearmanr(exact, estimates).statistic
            assert agreement.spearman.estimate == pytest.approx(want)
            assert agreement.spearman.n == agreement.compared
            assert agreement.spearman.low <= agreement.spearman.high <= 1
            assert agreement.spearman.estimate in agreement.spearman
        found = [each.spearman.estimate for each in result.agreements if each.spearman]
        # Where one head alone writes, some effects do not vary, and have no correlation.
        assert len(found) > 8 or result.model == "control"
        correlations.setdefault(result.task, set()).update(found)
    assert all(len(found) > 8 for found in correlations.values())
    assert {ratio.model for ratio in summary.ratios} == {"control"} and len(summary.ratios) == 40
    for ratio in summary.ratios:
        kind = (ratio.component, ratio.ablation, ratio.ranking, ratio.scope)
        dense, control = (crossings[(ratio.task, model, *kind)] for model in ("dense", "control"))
        unsolved = [name for name in ("dense", "control") if not solved[ratio.task, name]]
        # Other reasons are of other curves (`test_analysis`).
        if unsolved:
            assert ratio.why == f"{' and '.join(unsolved)} did not solve the task"
            assert ratio.ratio is None
        else:
            assert ratio.ratio.estimate == pytest.approx(dense / control)
        by_chance = [
            crossings[(ratio.task, name, *kind[:2], "random", "prompt")]
            for name in ("dense", "control")
        ]
        assert ratio.random.estimate == pytest.approx(by_chance[0] / by_chance[1])


def test_a_circuit_of_another_wording_is_that_of_its_rows(done):
    summary = load_result(done / frame.SUMMARY, CircuitSummary)
    assert [each.model for each in summary.transfers] == ["dense", "control"]
    kind = {"quantity": "effect", "component": "heads", "method": "exact", "direction": "noising"}
    for each in summary.transfers:
        assert (each.source, each.task) == ("ioi", "mine")
        sides = [
            by(rows_of(done, task=task, model=each.model, **kind), "layer", "head")
            for task in ("ioi", "mine")
        ]
        kept = [set(sorted(side, key=lambda place: side[place])[: each.size]) for side in sides]
        assert each.jaccard == len(kept[0] & kept[1]) / len(kept[0] | kept[1])
        values = [[side[place] for place in sides[0]] for side in sides]
        assert each.spearman == pytest.approx(stats.spearmanr(*values).statistic)
        own = {"task": "mine", "model": each.model}
        clean = by(rows_of(done, quantity="metric", method="clean", **own), "prompt")
        for ranking, result in (("transferred", each.transferred), ("own", each.own)):
            points = explained(done, clean, **own, ranking=ranking)
            assert list(points) == [each.size]
            assert result.estimate == pytest.approx(points[each.size])


def test_component_edges_are_exported_with_the_scores_of_the_rows(done):
    """Positive where the model needs the edge, so with the other sign than effects by noising."""
    graph = load_graph(done / MIB / "ioi_dense.json")
    own = ComponentGraph(LAYERS, HEADS, 2, graph.graph.hidden_size)
    kind = {"quantity": "effect", "component": "component_edges", "method": "eap_ig"}
    rows = rows_of(done, task="ioi", model="dense", rules="exact", **kind)
    scores = by(rows, "writer", "reader")
    assert len(scores) == SMALL["edge_sample"]
    wide = own.expand(np.arange(own.num_writers * own.num_readers).reshape(own.mask_UR.shape))
    size = np.abs(graph.scores_UR).max()
    for (writer, reader), score in scores.items():
        places = np.argwhere(wide == writer * own.num_readers + reader)
        assert len(places)
        # Query heads that share a key add up to its score.
        total = sum(graph.scores_UR[u, r] for u, r in places)
        assert total == pytest.approx(-score, abs=1e-5 * size)
    assert max(map(abs, scores.values())) > 1e-3


def test_one_planted_head_is_a_circuit_of_one(done, models):
    """It is found by its absolute effect; by the sign it may be harmful, and so the last kept."""
    summary = load_result(done / frame.SUMMARY, CircuitSummary)
    result = next(each for each in summary.results if (each.task, each.model) == ("ioi", "control"))
    heads = [each for each in result.curves if each.component == "heads"]
    absolutes = [each for each in heads if each.ranking == "absolute"]
    assert {each.scope for each in absolutes} == {"prompt", "task"}
    for absolute in absolutes:
        assert (absolute.crossing.estimate, absolute.crossing.high) == (1, 1)
    absolute = next(each for each in absolutes if each.scope == "task")
    assert absolute.cmd < 0.2 < next(each for each in heads if each.ranking == "random").cmd
    kind = {"quantity": "effect", "method": "exact", "component": "heads", "model": "control"}
    exact = by(rows_of(done, **kind, task="ioi"), "direction", "layer", "head", "prompt")
    # A patched run begins at the layer of its head, and gives the metric of the whole run but for
    # roundings: of sums over as many products as the model is wide, none larger than the metric.
    width = open_pretrained(models / "planted").cfg.hidden_size
    sizes = [abs(each.estimate) for each in (result.clean, result.corrupt)]
    slack = error_bound.DEVIATIONS * math.sqrt(width) * 2.0**-24 * max(1.0, *sizes)
    others = [abs(value) for (_, *place, _), value in exact.items() if place != [1, 2]]
    assert max(others) <= slack
    best, second, *_ = result.heads
    assert best.name == "L1H2" and abs(second.effect.estimate) <= slack
    assert abs(best.effect.estimate) > 100 * slack
    changes = [
        value for (way, *place, _), value in exact.items() if (way, place) == ("noising", [1, 2])
    ]
    assert best.effect.estimate == pytest.approx(np.mean(changes))
    # It is all that reads what is corrupted.
    assert best.metric == pytest.approx(result.corrupt.estimate, rel=1e-4)
    drawn = load_result(drawn_file(done, "control", "ioi"), DrawnPrompt)
    if exact["noising", 1, 2, 0] < 0:
        assert [(head.layer, head.head) for head in drawn.heads] == [(1, 2)]
    assert {edge.head for edge in drawn.edges if edge.importance != 0} <= {2}


def test_the_paper_is_beside_its_own_tasks_alone(done):
    """A user's file may have the name of one of them."""
    summary = load_result(done / frame.SUMMARY, CircuitSummary)
    ratios = tuple(dataclasses.replace(each, model="sparse") for each in summary.ratios)
    drawn = dataclasses.replace(summary, ratios=ratios)
    files = tuple(dataclasses.replace(task, seed=None) for task in summary.tasks)
    printed = "97 (Fig. 5", "42.8 (Fig. 5", "2.2 (Fig. 4"
    for each, wanted in ((drawn, printed[1:]), (dataclasses.replace(drawn, tasks=files), ())):
        text = str(report.published(each))
        assert "Ours" in text and "ioi" in text
        assert tuple(part for part in printed if part in text) == wanted
        assert "Ours, dense : sparse" in text and "Ours, control : sparse" not in text
    # A dense model that does not solve a task has no ratio, and the control may have one.
    found = Interval(3.94, 1.37, 13.75, 100)
    by_control = tuple(dataclasses.replace(r, reference="control", ratio=found) for r in ratios)
    lost = tuple(dataclasses.replace(r, ratio=None, why="dense fails") for r in ratios)
    text = str(report.published(dataclasses.replace(drawn, ratios=(*lost, *by_control))))
    assert "Ours, control : sparse" in text and "none: dense fails" in text
    assert "3.94 [1.37, 13.75]" in text


def test_no_task_has_prompts_of_the_training_text(models, tmp_path):
    config = from_plain(settings(models, tasks=("ioi",), rephrased="ioi_rephrased"), CircuitConfig)
    opened = {role: open_model(role, source) for role, source in config.models.items()}
    before = read_tasks(config, opened)
    text = tmp_path / "pretrain.jsonl"
    for task in before.values():
        lines = [each.clean + each.answers[0] for each in task.examples[1:]]
        rows = [{"text": "an article"}, {"text": "\n".join(lines), "prompts": lines}]
        with text.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    config = dataclasses.replace(config, trained_on=(str(text),))
    for name, task in read_tasks(config, opened).items():
        old = before[name].examples
        assert [each in task.examples for each in old] == [True] + [False] * (COUNT - 1)
        facts = task_facts(name, task, None)
        assert facts.kept == COUNT and facts.dropped["in the training text"] == COUNT - 1
    for line, message in (("[1]", "has no JSON object a line"), (None, "No such file")):
        if line:
            text.write_text(line)
        else:
            text.unlink()
        with pytest.raises(BadInputError, match=rf"pretrain\.jsonl.* {message}"):
            read_tasks(config, opened)


def all_rows(folder):
    """All rows, without the metadata of the file, which says when they were measured."""
    return pq.read_table(folder / ROWS).replace_schema_metadata()


@pytest.fixture
def measured(monkeypatch):
    """Parts that are measured from now on: task, model and part."""
    seen = []
    real = Measurement.measure

    def counted(self, part, source):
        seen.append((*self._names.values(), part))
        return real(self, part, source)

    monkeypatch.setattr(Measurement, "measure", counted)
    return seen


def shards_of(folder, *units):
    """The shards that hold these units; all units have one of their own."""
    held = {}
    for file in folder.glob("rows-*.parquet"):
        ((unit, _),) = json.loads(pq.read_metadata(file).metadata[b"units"])
        held[tuple(unit)] = file
    return [held[unit] for unit in units]


def test_parts_that_were_lost_are_measured_from_what_is_stored(models, done, tmp_path, measured):
    """As after a kill: the second model, with effects stored and curves not, and a transfer."""
    folder = shutil.copytree(done, tmp_path / "study")
    ranking = ("counterfactual", "signed", "prompt", "0")
    lost = [
        ("control", "ioi", "heads", "curve", *ranking),
        ("control", "ioi", "token_edges", "curve", *ranking),
        ("control", "ioi", "", "figures"),
        ("control", "mine", "heads", "transfer"),
    ]
    attribution = ("control", "ioi", "token_edges", "attribution")
    gone = shards_of(folder / "shards", *lost) + shards_of(folder / "attributions", attribution)
    files = [drawn_file(folder, "control", "ioi"), folder / MIB / "ioi_control.json"]
    for file in (*gone, *files, folder / "finished.json", folder / ROWS):
        file.unlink()
    run(settings(models), folder)
    # The drawing is no measurement, and the attribution is made again for the curve.
    assert sorted((role, task, *part.unit) for task, role, part in measured) == sorted(
        [unit for unit in lost if unit[3] != "figures"] + [attribution]
    )
    for file in (folder / frame.SUMMARY, *files):
        assert file.read_bytes() == (done / file.relative_to(folder)).read_bytes(), file
    assert all_rows(folder).equals(all_rows(done))


def test_parts_of_other_weights_are_refused_even_by_force(models, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "study")
    shutil.copytree(models, tmp_path / "models")
    shutil.copytree(models / "planted", tmp_path / "models" / "dense", dirs_exist_ok=True)
    with pytest.raises(UsageError, match="another model, data set or setting made them"):
        frame.execute(STUDY, settings(tmp_path / "models"), folder, resume="force")


@pytest.mark.slow
def test_every_order_takes_the_open_edges_of_a_sparse_model_first(models, tmp_path):
    changes = {"control": "", "sparse": str(models / "sparse"), "rephrased": "", "points": 24}
    run(settings(models, **changes, components=("token_edges",)), tmp_path)
    summary = load_result(tmp_path / frame.SUMMARY, CircuitSummary)
    dense, sparse = summary.results
    assert dense.open["token_edges"] > sparse.open["token_edges"]
    assert [model.gated for model in summary.models] == [False, True]
    kind = {"quantity": "open", "component": "token_edges", "model": "sparse"}
    most = max(row["value"] for row in rows_of(tmp_path, **kind))
    own = [each for each in sparse.curves if each.component == "token_edges"]
    assert {each.ranking for each in own} == {"signed", "absolute", "random"}
    for curve in own:
        # With all open edges kept, the closed ones change nothing, whatever their order.
        full = [point.explained for point in curve.points if point.size >= most]
        assert len(full) > 1 and most < curve.points[-1].size
        assert all(math.isclose(each, 1, abs_tol=1e-3) for each in full)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("iio",)}, r"'iio', which is no task.*did you mean 'ioi'"),
        ({"tasks": ("copy", "copy.jsonl")}, r"called copy, copy; give each another name"),
        ({"ablations": ("zeros",)}, r"'zeros'; did you mean 'zero'"),
        ({"ablations": ("resample",)}, r"none that is defined for token edges; add zero or mean"),
        ({"components": ("head",)}, r"'head'; did you mean 'heads'"),
        ({"metric": "logit_diff"}, r"did you mean 'logit_difference'"),
        ({"rules": "gimm"}, r"config.rules = 'gimm'; did you mean 'gim'"),
        ({"rephrased": "ioi_rephrase"}, r"is no task.*did you mean 'ioi_rephrased'"),
        ({"tasks": ("ioi", "copy"), "rephrased": "ioi_long"}, r"belongs to one task"),
        ({"count": 1, "fraction": 1.0}, r"count = 1 must be at least 2; .*fraction = 1.0 must be"),
        ({"dense": ""}, r"names no model; give --dense=FOLDER"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        CircuitConfig(**changes)


def test_models_and_files_that_cannot_be_used_are_refused(models, tmp_path):
    def attempt(**changes):
        run(STUDY.settings("smoke", **changes), tmp_path / "run")

    dense = str(models / "dense")
    with pytest.raises(
        BadInputError, match=r"--dense=nowhere: .*is no folder or \.gguf file.*it takes a Hugging"
    ):
        attempt(dense="nowhere")
    with pytest.raises(BadInputError, match=r"--sparse=.*has no sparse\.json.*posttrain exported"):
        attempt(dense=dense, sparse=dense)
    one = example("Mary", "John", "Anna")
    bad = write_lines(tmp_path / "mine.jsonl", one, one | {"clean": 3})
    with pytest.raises(BadInputError, match=r"mine\.jsonl:2: clean = 3 \(int\); give a text"):
        attempt(dense=dense, tasks=(bad,))
    single = write_lines(tmp_path / "one.jsonl", one)
    with pytest.raises(BadInputError, match="one example; intervals need two"):
        attempt(dense=dense, tasks=(single,))
    assert not (tmp_path / "run").exists()
