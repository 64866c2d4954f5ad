"""Results are read back as they were written, or refused with every fault and its place."""

import dataclasses
import json
import math
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
import jsonschema
import numpy as np
import pytest

from lm_jax.errors import CorruptError
from lm_jax.run.files import write_json
from lm_jax.run.results import Count, Real, Share, json_schema, load_result


@dataclasses.dataclass(frozen=True)
class Point:
    """A point."""

    x: Real
    share: Share


@dataclasses.dataclass(frozen=True)
class Name:
    name: str


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of points.

    Two sentences stand
    here. They are the description.

    Attributes:
      kind: which, spelled over
        two lines.
      ends: low and high.
    """

    points: tuple[Point, ...]
    ends: tuple[float, float]
    by_name: dict[str, Real]
    kind: Literal["small", "large"]
    one: Point | Name | None
    count: Count
    done: bool
    absent: float | None = None
    version: Literal[2] = 2


finite = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, st.floats(), st.floats(0, 1))
reports = st.builds(
    Report,
    points=st.lists(points, max_size=3).map(tuple),
    ends=st.tuples(finite, finite),
    by_name=st.dictionaries(st.text(), st.floats(), max_size=3),
    kind=st.sampled_from(["small", "large"]),
    one=st.none() | points | st.builds(Name, st.text()),
    count=st.integers(0),
    done=st.booleans(),
    absent=st.none() | finite,
)
SMALL = Report((Point(0.0, 0.5),), (0.0, 1.0), {"a": 1.0}, "small", Name("n"), 1, True)


@given(reports)
@settings(max_examples=100, deadline=None)
def test_a_written_result_is_read_back_and_fits_its_schema(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("results") / "report.json"
    write_json(path, report)
    # NaN equals nothing, and is spelled as itself.
    assert repr(load_result(path, Report)) == repr(report)
    jsonschema.validate(json.loads(path.read_text()), json_schema(Report))


def test_a_list_of_results_is_read_back_as_a_tuple(tmp_path):
    written = (Name("one"), Name("two"))
    write_json(tmp_path / "names.json", written)
    assert load_result(tmp_path / "names.json", tuple[Name, ...]) == written


def test_what_is_not_finite_is_spelled_by_json_and_read_back(tmp_path):
    path = tmp_path / "report.json"
    values = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "numpy": np.float32(0.5)}
    write_json(path, dataclasses.replace(SMALL, by_name=values))
    assert json.loads(path.read_text())["by_name"] == {
        "nan": None,
        "inf": "inf",
        "-inf": "-inf",
        "numpy": 0.5,
    }
    read = load_result(path, Report).by_name
    assert math.isnan(read.pop("nan"))
    assert read == {"inf": math.inf, "-inf": -math.inf, "numpy": 0.5}
    assert load_result(path, Report).absent is None


FAULTS = [
    ({"points": [{"x": "far", "share": 2.0}]}, "points[0].x = 'far' (str); give a number or null"),
    ({"points": [{"x": 1, "share": 2.0}]}, "points[0].share = 2.0 (float); give a number from 0"),
    ({"points": [{"share": 0.5}]}, "points[0].x is missing"),
    ({"ends": [1.0, None]}, "ends[1] = None (NoneType); give a number"),
    ({"by_name": {"a b": True}}, "by_name.a b = True (bool); give a number or null"),
    ({"kind": "smal"}, "kind = 'smal' is not one of the choices; did you mean 'small'?"),
    ({"count": -1}, "count = -1 (int); give a whole number >= 0"),
    ({"absent": "inf"}, "absent = 'inf' (str); give a number"),
    ({"kinds": "small"}, "kinds is not a field of Report; did you mean 'kind'?"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS)
def test_a_fault_is_named_with_its_place_and_breaks_the_schema(tmp_path, changes, words):
    path = tmp_path / "report.json"
    tree = dataclasses.asdict(SMALL) | changes
    path.write_text(json.dumps(tree))
    with pytest.raises(CorruptError) as caught:
        load_result(path, Report)
    assert f"{path} is no Report: {words}" in str(caught.value)
    assert not jsonschema.Draft202012Validator(json_schema(Report)).is_valid(
        json.loads(json.dumps(tree))
    )


def test_all_faults_are_named_at_once(tmp_path):
    path = tmp_path / "report.json"
    tree = dataclasses.asdict(SMALL)
    for changes, _ in [FAULTS[0], FAULTS[3], FAULTS[5], FAULTS[8]]:
        tree |= changes
    del tree["done"]
    path.write_text(json.dumps(tree))
    with pytest.raises(CorruptError) as caught:
        load_result(path, Report)
    places = ("points[0].x", "points[0].share", "ends[1]", "kind", "kinds", "done is missing")
    assert all(place in str(caught.value) for place in places)


@dataclasses.dataclass(frozen=True)
class Alone:
    schema: Literal["one"]
    value: int


@dataclasses.dataclass(frozen=True)
class Several:
    schema: Literal["several"]
    values: tuple[int, ...]


@pytest.mark.parametrize("written", [Alone("one", 2), Several("several", (2, 3))])
def test_of_a_union_the_file_says_which_it_is(tmp_path, written):
    write_json(tmp_path / "x.json", written)
    assert load_result(tmp_path / "x.json", Alone | Several) == written
    write_json(tmp_path / "x.json", dataclasses.asdict(written) | {"invented": 1})
    match = f"is no {type(written).__name__}: invented is not a field of {type(written).__name__}"
    with pytest.raises(CorruptError, match=match):
        load_result(tmp_path / "x.json", Alone | Several)


def test_the_schema_has_the_words_of_the_docstring_and_requires_every_field():
    schema = json_schema(Report)
    assert (schema["title"], schema["description"]) == (
        "A report of points",
        "Two sentences stand here. They are the description.",
    )
    assert schema["properties"]["kind"] == {
        "description": "which, spelled over two lines.",
        "enum": ["small", "large"],
        "type": "string",
    }
    assert schema["properties"]["ends"]["description"] == "low and high."
    assert schema["required"] == [field.name for field in dataclasses.fields(Report)]
    assert schema["properties"]["version"] == {"const": 2, "type": "integer"}
    jsonschema.Draft202012Validator.check_schema(schema)


def test_of_a_union_the_dataclass_that_fits_best_is_meant(tmp_path):
    path = tmp_path / "result.json"
    kinds = Point | Name
    for value in (Name("a"), Point(1.0, 0.5)):
        write_json(path, value)
        assert load_result(path, kinds) == value
    write_json(path, {"name": "a", "invented": 1})
    with pytest.raises(CorruptError, match=r"is no Name: invented is not a field of Name"):
        load_result(path, kinds)
    # Any other type is read as it is.
    write_json(path, {"a": 1})
    assert load_result(path, dict[str, int]) == {"a": 1}
