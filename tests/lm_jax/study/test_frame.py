"""What `inputs` of a study hands on, and the rows of units that read those before them."""

import dataclasses

import pyarrow as pa
import pytest

from lm_jax.errors import BadInputError, StoppedError, UsageError
from lm_jax.report import Report
from lm_jax.run import stop
from lm_jax.run.rows import RowStore
from lm_jax.run.units import measure_units
from lm_jax.study import Opened, Settings, Study, Work, frame

SCHEMA = pa.schema([("value", pa.int64())])


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Summary:
    found: str


class Made(Study):
    """A study of functions that stand here."""

    def function(self, name):
        return getattr(self, f"_{name}")

    _report = staticmethod(lambda *_: Report("Made", list, lead=(), lines=["made"]))
    _run = staticmethod(lambda config, work: Summary(work.loaded))


STUDY = Made(
    command="made up",
    config=Config,
    modes={},
    summary=Summary,
    inputs="inputs",
    run="run",
    report="report",
)


def test_what_takes_long_to_load_is_loaded_before_the_folder_and_once(tmp_path, monkeypatch):
    calls = []

    def load():
        assert not (tmp_path / "run").exists()
        calls.append("loaded")
        return "the model"

    monkeypatch.setattr(Made, "_inputs", lambda _, config: Opened({}, load=load), raising=False)
    assert frame.execute(STUDY, Config(), tmp_path / "run").found == "the model"
    # It has finished, and needs no model.
    assert frame.execute(STUDY, Config(), tmp_path / "run").found == "the model"
    assert calls == ["loaded"]


@pytest.mark.parametrize("own", [True, False])
def test_rows_stay_by_force_only_where_their_fingerprint_does_not_change_with_the_inputs(
    own, tmp_path, monkeypatch
):
    """Else they would be taken for rows of the inputs of now."""
    measured, given = [], {"answers": "a" * 64}

    def run(config, work):
        def measure(item):
            measured.append(item)
            return {"value": [item]}

        bound = dataclasses.replace(work, fingerprint="what decides them") if own else work
        bound.units("rows", SCHEMA, {("one",): 1}, measure)
        return Summary(given["answers"][:1])

    monkeypatch.setattr(Made, "_inputs", lambda _, config: given, raising=False)
    monkeypatch.setattr(Made, "_run", staticmethod(run))
    frame.execute(STUDY, Config(), tmp_path / "run")
    given["answers"] = "b" * 64
    with pytest.raises(BadInputError, match="holds the results of other inputs"):
        frame.execute(STUDY, Config(), tmp_path / "run")
    if own:
        assert frame.execute(STUDY, Config(), tmp_path / "run", resume="force").found == "b"
    else:
        with pytest.raises(UsageError, match="rows"):
            frame.execute(STUDY, Config(), tmp_path / "run", resume="force")
        given["answers"] = "a" * 64
        assert frame.execute(STUDY, Config(), tmp_path / "run", resume="force").found == "a"
    assert measured == [1]


@pytest.mark.parametrize(
    ("resume", "seed", "message"),
    [("never", 0, "holds a run already"), ("auto", 1, "holds a run with config.seed = 0")],
)
def test_a_folder_that_would_be_refused_is_refused_before_what_takes_long(
    resume, seed, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(Made, "_inputs", lambda _, config: Opened({}, "it"), raising=False)
    frame.execute(STUDY, Config(), tmp_path / "run")
    (tmp_path / "run" / "finished.json").unlink()

    def load():
        raise AssertionError("loaded")

    monkeypatch.setattr(Made, "_inputs", lambda _, config: Opened({}, load=load))
    with pytest.raises(UsageError, match=message):
        frame.execute(STUDY, Config(seed), tmp_path / "run", resume=resume)
    with pytest.raises(UsageError, match="is a file"):
        frame.execute(STUDY, Config(), tmp_path / "run" / "config.json")


def test_a_unit_reads_the_rows_of_units_before_it(tmp_path):
    """Also after a kill, and no unit is measured twice."""
    work, measured = Work(tmp_path, "fingerprint"), []

    def measure_all(last):
        with work.store(SCHEMA) as store:

            def measure(k):
                measured.append(k)
                before = store.read_unit((k - 1,))["value"].to_pylist() if k else [1]
                return {"value": [2 * before[0]]}

            measure_units(store, "powers", {(k,): k for k in range(last)}, measure)
            return work.merge(store, "powers")["value"].to_pylist()

    assert measure_all(2) == [2, 4] and measure_all(4) == [2, 4, 8, 16]
    assert measured == [0, 1, 2, 3] and (tmp_path / "powers.parquet").is_file()


def test_a_request_to_stop_is_met_before_the_next_unit_which_is_named(tmp_path, monkeypatch):
    plan, measured = {("a",): 3, ("b",): 5}, []

    def measure(item):
        measured.append(item)
        stop.request()
        return SCHEMA.empty_table()

    with RowStore(tmp_path, SCHEMA, "fingerprint", flush_units=1) as store:
        with pytest.raises(StoppedError, match="before unit of 5"):
            measure_units(store, "made", plan, measure, label="unit of {}".format)
        stop._stop.clear()
        monkeypatch.setattr(stop, "request", lambda: None)
        measure_units(store, "made", plan, measure, label="unit of {}".format)
    assert measured == [3, 5]
