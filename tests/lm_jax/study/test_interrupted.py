"""What a kill, `--resume=force` and other inputs leave of a finished study."""

import dataclasses

import pyarrow as pa
import pytest

from lm_jax.errors import BadInputError, StoppedError, UsageError
from lm_jax.report import Report
from lm_jax.run import processes, stop
from lm_jax.run.finished import NO_INPUTS, is_finished
from lm_jax.study import Settings, Study, Training, frame

SCHEMA = pa.schema([("value", pa.string())])


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    size: int = 1


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Training):
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Summary:
    found: tuple[str, ...]


class Killed(BaseException):
    """The power is gone."""


def shown(config, summary, folder):
    return Report("Toy", list, lead=(), lines=["shown"])


def toy(run, *, config=Config, inputs=None):
    """A study whose functions are given."""

    class Toy(Study):
        def function(self, name):
            return {"run": run, "report": shown, "inputs": lambda _: inputs}[name]

    return Toy(
        command="toy",
        config=config,
        modes={},
        summary=Summary,
        inputs=inputs and "inputs",
        run="run",
        report="report",
    )


def size(config, work):
    return Summary((f"size {config.size}",))


def killed(config, work):
    raise Killed


def test_a_part_of_other_settings_is_made_again_after_a_kill(tmp_path):
    part = toy(size)

    def whole(kill):
        def run(config, work):
            found = []
            for name in ("first", "second"):
                if kill and found:
                    raise Killed
                asked = Config(10 * config.size)
                found += frame.run_part(part, asked, work.part(name), NO_INPUTS).found
            return Summary(tuple(found))

        return toy(run)

    folder = tmp_path / "run"
    assert frame.execute(whole(False), Config(1), folder).found == ("size 10",) * 2
    with pytest.raises(Killed):
        frame.execute(whole(True), Config(2), folder, resume="force")
    assert frame.execute(whole(False), Config(2), folder).found == ("size 20",) * 2


@pytest.mark.parametrize("config", [Config, TrainingConfig])
def test_results_that_are_made_again_are_not_finished_meanwhile(tmp_path, config):
    frame.execute(toy(size, config=config, inputs={"config.text": "a"}), config(), tmp_path)
    other = toy(killed, config=config, inputs={"config.text": "b"})
    with pytest.raises(Killed):
        frame.execute(other, config(), tmp_path, resume="force")
    assert not is_finished(tmp_path)


def test_a_part_that_is_made_again_is_not_finished_meanwhile(tmp_path):
    def whole(step):
        def run(config, work):
            return frame.run_part(toy(step), Config(), work.part("part"), NO_INPUTS)

        return toy(run)

    frame.execute(whole(size), Config(1), tmp_path)
    with pytest.raises(Killed):
        frame.execute(whole(killed), Config(2), tmp_path, resume="force")
    assert not is_finished(tmp_path / "part")


def rows(kill):
    def run(config, work):
        def measure(unit):
            if kill and unit:
                raise Killed
            return {"value": [work.loaded or "row"]}

        table = work.units("rows", SCHEMA, {(0,): 0, (1,): 1}, measure)
        return Summary(tuple(table["value"].to_pylist()))

    return run


def test_rows_of_other_inputs_are_never_in_one_table(tmp_path):
    """Not even by force."""
    with pytest.raises(Killed):
        frame.execute(toy(rows(True), inputs={"config.text": "a"}), Config(), tmp_path)
    other = toy(rows(False), inputs={"config.text": "b"})
    with pytest.raises(BadInputError, match="text: content a, not b"):
        frame.execute(other, Config(), tmp_path)
    with pytest.raises(UsageError, match="another model, data set or setting"):
        frame.execute(other, Config(), tmp_path, resume="force")
    assert frame.execute(
        toy(rows(False), inputs={"config.text": "a"}), Config(), tmp_path, resume="force"
    )


def test_an_input_that_a_later_start_did_not_see_is_compared_all_the_same(tmp_path):
    given = {"model": "a", "text": "b"}
    for inputs in (given, {"model": "a"}):
        with pytest.raises(Killed):
            frame.execute(toy(killed, inputs=inputs), Config(), tmp_path)
    with pytest.raises(BadInputError, match="text: content b, not c"):
        frame.execute(toy(size, inputs=given | {"text": "c"}), Config(), tmp_path)


def test_a_stop_within_a_unit_ends_it_after_the_call_under_way_and_keeps_those_before(tmp_path):
    calls = []

    def slow(config, work):
        def measure(unit):
            values = []
            for call in range(100):
                processes.check_stop("between two calls")
                calls.append((unit, call))
                values.append(str(unit))
                if calls == [*((0, k) for k in range(100)), *((1, k) for k in range(7))]:
                    stop.request()
            return {"value": values}

        table = work.units("rows", SCHEMA, {(0,): 0, (1,): 1}, measure)
        return Summary(tuple(table["value"].to_pylist()))

    with pytest.raises(StoppedError, match="between two calls; run the same command again"):
        frame.execute(toy(slow), Config(), tmp_path)
    assert len(calls) == 107 and not is_finished(tmp_path)
    stop._stop.clear()
    assert frame.execute(toy(slow), Config(), tmp_path).found == ("0",) * 100 + ("1",) * 100
    # The first unit was on disk.
    assert calls[107:] == [(1, k) for k in range(100)]
