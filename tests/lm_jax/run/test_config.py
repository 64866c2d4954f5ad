"""Settings become frozen dataclasses strictly, and equal settings have equal text and hash."""

import dataclasses
import json
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import config_dict
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.config import (
    LATER,
    as_stored,
    canonical_json,
    config_difference,
    config_hash,
    from_plain,
    to_plain,
)


@dataclasses.dataclass(frozen=True)
class Linear:
    factor: float


@dataclasses.dataclass(frozen=True)
class Ramp:
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Model:
    width: int
    scaling: Linear | Ramp | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    lr: float
    degrees: tuple[int, ...]
    pair: tuple[int, str]
    norm: Literal["rms", "layer"]
    model: Model
    note: str | None = None
    debug: bool = False


def _config(**changes):
    base = {
        "lr": 1e-3,
        "degrees": [2, 4],
        "pair": (1, "a"),
        "norm": "rms",
        "model": {"width": 8, "scaling": {"low": 1, "high": 2.0}},
    }
    return config_dict.ConfigDict(base | changes)


def test_freeze_builds_nested_hashable_values():
    frozen = from_plain(_config(lr=1), Experiment)
    expected = Experiment(1.0, (2, 4), (1, "a"), "rms", Model(8, Ramp(1.0, 2.0)))
    assert frozen == expected
    assert hash(frozen) == hash(expected)
    assert type(frozen.lr) is float


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lrr": 1.0}, "config.lrr is not a field of Experiment; did you mean 'lr'?"),
        ({"lr": "fast"}, "config.lr = 'fast' (str); give a number"),
        ({"lr": float("nan")}, "config.lr = nan; give a finite number"),
        ({"degrees": (2, 4.5)}, "config.degrees[1] = 4.5 (float); give a whole number"),
        ({"pair": (1,)}, "config.pair = [1] (list); give a list of a whole number and a text"),
        ({"degrees": 2}, "config.degrees = 2 (int); give a list of whole numbers"),
        ({"debug": "yes"}, "config.debug = 'yes' (str); give a truth value (True or False)"),
        ({"norm": "rmss"}, "config.norm = 'rmss' is not one of the choices; did you mean 'rms'?"),
        ({"model": {}}, "config.model.width is missing"),
        ({"model": 3}, "config.model = 3; give a section with the fields of Model"),
        ({"model": {"width": 1, "scaling": {"fact": 1}}}, "give a Linear or a Ramp"),
    ],
)
def test_freeze_names_field_and_remedy(changes, words):
    with pytest.raises(UsageError) as caught:
        from_plain(_config(**changes), Experiment)
    assert words in str(caught.value)


def test_a_key_that_would_make_dotted_names_ambiguous_is_refused():
    with pytest.raises(UsageError, match=r"config\.model has the key 'a\.b'"):
        config_hash({"model": {"a.b": 1}})


def test_freeze_reports_every_fault_at_once():
    config = _config(lrr=1.0, norm="no")
    del config.degrees
    with pytest.raises(UsageError) as caught:
        from_plain(config, Experiment)
    assert all(name in str(caught.value) for name in ("lrr", "norm", "degrees"))


@dataclasses.dataclass(frozen=True)
class Positive:
    count: int

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise BadInputError(f"config.count = {self.count}; give a positive number")


@dataclasses.dataclass(frozen=True)
class Nested:
    first: Positive
    second: Positive | None = None
    windows: tuple[int | None, ...] = ()


def test_what_a_dataclass_refuses_itself_passes_through():
    with pytest.raises(BadInputError, match=r"^config\.count = -1; give a positive number$"):
        from_plain({"first": {"count": -1}}, Nested)
    assert from_plain({"first": {"count": 1}, "windows": [None, 3]}, Nested) == Nested(
        Positive(1), None, (None, 3)
    )


def test_an_error_of_a_dataclass_is_among_the_other_errors():
    config = {"first": {"count": -1}, "second": {"count": "2"}, "windows": [None, 2.0]}
    with pytest.raises(UsageError) as caught:
        from_plain(config, Nested)
    assert str(caught.value).split("; ") == [
        "config.count = -1",
        "give a positive number",
        "config.second.count = '2' (str)",
        "give a whole number",
        "config.windows[1] = 2.0 (float)",
        "give a whole number",
    ]


def test_an_annotation_that_no_config_can_hold_is_a_fault_of_the_program():
    cls = dataclasses.make_dataclass("Odd", [("table", dict[str, int])], frozen=True)
    with pytest.raises(TypeError, match=r"config\.table"):
        from_plain({"table": {"a": 1}}, cls)


scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
keys = st.text().filter(lambda key: "." not in key)
trees = st.recursive(
    scalars.filter(lambda x: x not in (float("inf"), -float("inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


def _shuffled(tree):
    if isinstance(tree, dict):
        return {key: _shuffled(tree[key]) for key in reversed(tree)}
    return tuple(map(_shuffled, tree)) if isinstance(tree, list) else tree


@given(trees)
@settings(max_examples=100, deadline=None)
def test_canonical_text_ignores_order_and_sequence_type_and_loses_nothing(tree):
    config = {"tree": tree}
    assert canonical_json(_shuffled(config)) == canonical_json(config)
    assert json.loads(canonical_json(config)) == config


@given(trees, trees)
@settings(max_examples=100, deadline=None)
def test_hash_and_difference_agree_on_what_is_equal(left, right):
    left, right = {"a": left, "b": 1}, {"a": right, "b": 1}
    same = config_hash(left) == config_hash(right)
    assert same == (not config_difference(left, right))


def test_difference_names_each_field():
    stored = {"lr": 1, "model": {"width": 8, "old": True}}
    wanted = {"lr": 1, "model": {"width": 16}, "new": "x"}
    assert config_difference(stored, wanted) == [
        "config.model.old = true, not absent",
        "config.model.width = 8, not 16",
        'config.new = absent, not "x"',
    ]


@dataclasses.dataclass(frozen=True)
class Rate:
    peak: float = 1.0
    floor: float = dataclasses.field(default=0.0, metadata=LATER)


@dataclasses.dataclass(frozen=True)
class Grown:
    """A class that got `limit` and `names`, and a section that got `floor`, in a later version."""

    steps: int = 3
    rate: Rate = dataclasses.field(default_factory=Rate)
    limit: str = dataclasses.field(default="loss", metadata=LATER)
    names: tuple[str, ...] = dataclasses.field(default=(), metadata=LATER)


def test_a_later_field_is_stored_only_where_it_is_not_the_default():
    """So that what was stored before has the hash, and is resumed by the settings, of now."""
    stored = {"steps": 3, "rate": {"peak": 1.0}}
    whole = stored | {"rate": {"peak": 1.0, "floor": 0.0}, "limit": "loss", "names": []}
    config = config_dict.ConfigDict(dataclasses.asdict(Grown()))
    assert from_plain(stored, Grown) == from_plain(whole, Grown) == Grown()
    assert to_plain(Grown()) == stored
    for settings_ in (Grown(), config, whole):
        assert as_stored(settings_, Grown) == stored
        assert config_hash(as_stored(settings_, Grown)) == config_hash(stored)
    config.limit, config.rate.floor = "divergence", 0.5
    changed = stored | {"rate": {"peak": 1.0, "floor": 0.5}, "limit": "divergence"}
    assert as_stored(config, Grown) == to_plain(from_plain(config, Grown)) == changed
