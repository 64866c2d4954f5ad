"""The recall suite as a command: its smoke mode end to end, and after a stop."""

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import DivergedError
from lm_jax.run.results import load_result
from lm_jax.study import command, frame
from protot_jax.studies.recall import STUDY, numbers, report, run
from protot_jax.studies.recall.results import ROWS, DivergedTraining, RecallSummary
from protot_jax.studies.recall.settings import RecallConfig


def test_every_condition_of_every_run_has_its_rows(tmp_path):
    flags = ["--config=protot/recall:smoke", "--config.models=('protot', 'llama')"]
    assert command.run(STUDY, ["recall", *flags, f"--workdir={tmp_path}"]) == 0
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.remove_metadata() == ROWS
    # MQAR has 2 and 4 pairs at 16 tokens and at 24; the other tasks one condition at each.
    tested = table.filter(table["split"].to_numpy() == "test")
    assert len(tested) == 2 * 5 * (4 + 2 + 2)
    asked = {(row["task"], row["length"], row["pairs"]): row["asked"] for row in tested.to_pylist()}
    assert asked == {
        **{("mqar", length, pairs): pairs for length in (16, 24) for pairs in (2, 4)},
        **{("induction", length, None): length - length // 2 - 1 for length in (16, 24)},
        **{("needle", length, None): 1 for length in (16, 24)},
    }
    result = load_result(tmp_path / frame.SUMMARY, RecallSummary)
    assert [each.memory for each in result.sizes] == [64, None]
    assert [each.memory_per_token for each in result.sizes] == [0, 32]
    charts = [part.body.count('<figure class="plot chart"') for part in sections(result) if part]
    assert sum(charts) == 4


def sections(result):
    return report.build(SMALL, result, None).sections()


def test_a_training_that_diverges_ends_neither_the_suite_nor_the_rate_that_does_not(
    tmp_path, monkeypatch
):
    """ProtoT diverges at the second rate, LLaMA at both."""
    trained, fast, folder = [], 0.5, tmp_path / "run"

    def run_one(config, one, folder):
        trained.append(one.name)
        if one.model == "llama" or one.learning_rate == fast:
            raise DivergedError(f"step 3 has loss nan ({folder / 'runs' / one.name}/diverged.json)")
        columns = rows({(split, one.learning_rate, 0): [1, 2] for split in ("choice", "test")})
        return columns.to_pydict() | {"model": [one.model] * 4}

    monkeypatch.setattr(run, "run_one", run_one)
    config = RecallConfig(
        tasks=("mqar",),
        models=("protot", "llama"),
        memory=64,
        hidden_size=16,
        num_layers=1,
        vocab_size=24,
        lengths=(16,),
        pairs=(4,),
        train_length=16,
        learning_rates=(1e-3, fast),
        seeds=(0,),
        sequences=2,
    )
    result = frame.execute(STUDY, config, folder)
    assert len(trained) == 4
    (one,) = result.results
    assert (one.model, one.learning_rate) == ("protot", 1e-3)
    reason = "step 3 has loss nan (diverged.json)"
    lost = [("protot", fast), ("llama", 1e-3), ("llama", fast)]
    assert result.diverged == tuple(DivergedTraining(m, "mqar", r, 0, reason) for m, r in lost)
    text = report.format_tables(result)
    assert f"protot on mqar diverged at a rate of 0.5, seed 0: {reason}" in text
    assert "llama on mqar diverged at a rate of 0.001, seed 0, as at every rate" in text
    page = "".join(part.body for part in sections(result))
    assert page.count("no: diverged at every rate") == 2 and reason in page
    # None is trained again.
    (folder / "finished.json").unlink()
    assert frame.execute(STUDY, config, folder) == result and len(trained) == 4


SMALL = RecallConfig(
    tasks=("mqar",),
    models=("protot",),
    lengths=(16,),
    pairs=(4,),
    train_length=16,
    learning_rates=(1e-3, 4e-3),
    seeds=(0, 1),
    sequences=2,
)


def rows(right):
    """Rows of two seeds and two rates of one model, with as many right answers as told."""
    columns = {name: [] for name in ROWS.names}
    for (split, rate, seed), values in right.items():
        for sequence, value in enumerate(values):
            row = {
                "task": "mqar",
                "model": "protot",
                "learning_rate": rate,
                "seed": seed,
                "split": split,
                "length": 16,
                "pairs": 4,
                "sequence": sequence,
                "right": value,
                "asked": 4,
            }
            for name, cell in row.items():
                columns[name].append(cell)
    return pa.Table.from_pydict(columns, ROWS)


def test_a_rate_is_chosen_by_other_sequences_than_it_is_measured_on():
    # The first rate is better where it is chosen, and the second on the test.
    table = rows(
        {
            **{("choice", 1e-3, seed): [4, 3] for seed in (0, 1)},
            **{("choice", 4e-3, seed): [2, 3] for seed in (0, 1)},
            ("test", 1e-3, 0): [2, 2],
            ("test", 1e-3, 1): [3, 4],
            **{("test", 4e-3, seed): [4, 4] for seed in (0, 1)},
        }
    )
    (result,) = numbers.summarise(SMALL, table, sizes=(), device="none").results
    assert result.learning_rate == 1e-3 and result.chance == 0.25 and not result.longer
    assert [each.accuracy.estimate for each in result.by_seed] == [0.5, 0.875]
    assert (result.over_seeds.mean, result.over_seeds.low) == (0.6875, None)
    assert report.percent(result) == "68.8 % (50.0 to 87.5)"
    (line,) = report.findings(numbers.summarise(SMALL, table, sizes=(), device="none"))
    assert line.endswith("16 tokens, 4 pairs: protot 68.8 % (50.0 to 87.5).")
    # Seed 0 answers 2 of 4 in both sequences; 3 and 4 of 4 of seed 1 bound nothing: Student's t of
    # one degree of freedom reaches beyond 0 and 1.
    assert [(each.accuracy.low, each.accuracy.high) for each in result.by_seed] == [
        (0.5, 0.5),
        (0.0, 1.0),
    ]


def test_a_model_at_the_rate_of_a_guess_did_not_learn():
    config = dataclasses.replace(SMALL, learning_rates=(1e-3,))
    # A quarter is what a guess among four values has; one more right answer is no proof.
    for seed_1 in ([1, 1], [1, 2]):
        right = {(split, 1e-3, 0): [1, 1] for split in ("choice", "test")}
        right |= {(split, 1e-3, 1): seed_1 for split in ("choice", "test")}
        result = numbers.summarise(config, rows(right), sizes=(), device="none")
        _, line = report.findings(result)
        assert line.startswith("protot did not learn it: a guess among what may be asked for is")
        assert "right in 25.0 %" in line and line in report.format_tables(result)
    right |= {(split, 1e-3, 1): [2, 2] for split in ("choice", "test")}
    result = numbers.summarise(config, rows(right), sizes=(), device="none")
    assert len(report.findings(result)) == 1
