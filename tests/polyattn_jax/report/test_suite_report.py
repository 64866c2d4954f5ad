"""Page and terminal show the named suites by length: accuracy, safe rows, wrong answers."""

import dataclasses

from lm_jax.report.markup import number
from lm_jax.statistics import Interval, wilson
from polyattn_jax.audit.results import SuiteResult
from polyattn_jax.report import figures, suites
from tests.polyattn_jax.synthetic_report import (
    SETTINGS,
    audit,
    build,
    condition,
    lines,
    parsed,
    percent,
    printed,
    text_of,
)

N = 40
RIGHT = {64: {"softmax": 40, "relu_p4_b0": 31}, 256: {"softmax": 38, "relu_p4_b0": 12}}


def results(lengths=(64, 256)):
    entries = []
    for length in lengths:
        conditions, failures = [], {}
        for name, right in RIGHT[length].items():
            verdict = "undecided" if name == "softmax" else "no-go"
            changes = {"accuracy": wilson(right, N), "verdict": verdict}
            conditions.append(dataclasses.replace(condition(name, 0.0, N), **changes))
            failures[name] = {"other": 2, "fake": N - right - 2} if right < N - 2 else {}
        safe = {"softmax": Interval(0.3, 0.2, 0.4, N), "relu_p4_b0": Interval(0.6, 0.5, 0.7, N)}
        dead = {"softmax": None, "relu_p4_b0": Interval(0.25, 0.2, 0.3, N)}
        entries.append(SuiteResult("decoys", length, tuple(conditions), failures, safe, dead))
    return tuple(entries)


def summary(entries):
    config = dataclasses.replace(SETTINGS, suites=("decoys",), suite_lengths=(64, 256), suite_n=N)
    return audit(config, suites=entries)


def test_a_suite_is_shown_over_its_lengths():
    # Lengths are in order, whatever the order of the settings.
    made = summary(results()[::-1])
    tree = parsed(build(*made))
    base, own = lines(tree, "decoys by the number of tokens")
    assert (base[0], own[0]) == ("softmax", "relu_p4_b0")
    for row, name in ((base, "softmax"), (own, "relu_p4_b0")):
        want = [percent(RIGHT[length][name] / N) for length in (64, 256)]
        assert [cell.split("[")[0] for cell in row[1:3]] == want
    assert [cell.split("[")[0] for cell in own[3:]] == [percent(0.6), percent(0.6)]
    assert all(cell.endswith(", 25.0 dead") for cell in own[3:])
    table = lines(tree, "decoys. Right")
    assert [row[1] for row in table] == ["64", "64", "256", "256"]
    assert table[-1][-1] == f"{N - 12 - 2} fake, 2 other" and table[0][-1] == ""
    assert table[-1][2].endswith("no-go")
    assert "Other suites" not in text_of(parsed(build(*audit())))


def test_charts_hold_the_numbers_of_the_table():
    entries = results()
    chart = figures.accuracy_by_length(entries, name="decoys", n="40")
    rows = {(r["series"], *(v for v in r.values() if v in RIGHT)): r for r in chart.data.values}
    assert len(rows) == 4
    for length, by_recipe in RIGHT.items():
        for name, right in by_recipe.items():
            assert 100 * right / N in rows[name, length].values()
    safe = figures.safe_by_length(entries, name="decoys", n="40")
    assert {60.0, 30.0} <= {v for r in safe.data.values for v in r.values() if v in (60.0, 30.0)}
    # One length makes a table and no chart.
    assert len(suites.by_length(entries[:1], summary(entries)[0])) == 1


def test_the_terminal_has_a_line_for_each_suite_and_length():
    text = printed(summary(results())[0])
    (first, second) = (row for row in text.splitlines() if row.startswith("decoys"))
    assert first.split() == ["decoys", "64", "100.0", "relu_p4_b0", "77.5", "1", "no-go"]
    assert second.split()[1:3] == ["256", number(95.0, ".1f")]
    assert max(map(len, text.splitlines())) <= 100
