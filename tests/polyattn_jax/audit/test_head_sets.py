"""The flag of a ranking, on the counts that the paper prints."""

import numpy as np
import pytest

from polyattn_jax.audit import head_sets
from tests.polyattn_jax.synthetic_report import condition

PROMPTS = 200


def ablation(top, bottom, drawn, size=40):
    """Cells with these changes of accuracy in points, of 200 prompts that softmax gets right."""
    cells = {f"top-{size}": top, f"bottom-{size}": bottom}
    cells |= {f"random-{size}-{seed}": change for seed, change in enumerate(drawn)}
    return [
        condition(name, 1 + change / 100, PROMPTS)
        for name, change in {"softmax": 0.0, **cells}.items()
    ]


@pytest.mark.parametrize(
    ("top", "drawn", "beaten", "decisive"),
    [
        # Table 17: Qwen3 at K = 20, Gemma at K = 40 and, tied by 3 of 20 draws, at K = 80
        (-79.0, [-1.0] + 19 * [0.0], 20, True),
        (-100.0, [-98.0] + 19 * [0.0], 20, True),
        (-100.0, 3 * [-100.0] + 17 * [0.0], 17, False),
        # five draws, as in Table 6, are too few for the flag
        (-79.0, 5 * [0.0], 5, None),
        (-20.0, 19 * [-19.5], 19, True),
        (-20.0, 18 * [-19.5], 18, None),
    ],
)
def test_decisive_is_strictly_worse_than_every_draw(top, drawn, beaten, decisive):
    (result,) = head_sets.decisiveness(ablation(top, 0.0, drawn))
    assert (result.beaten, result.decisive) == (beaten, decisive)
    assert (result.size, result.n, result.bottom) == (40, PROMPTS, PROMPTS)
    assert result.random == tuple(round(2 * (100 + change)) for change in drawn)


def test_the_fewest_draws_hold_chance_at_one_in_twenty():
    """Sets of equal rank: the first is worst of all with a chance of 1 in d + 1."""
    rng = np.random.default_rng(0)
    worst = rng.uniform(size=(20_000, head_sets.FEWEST_DRAWS + 1)).argmin(1) == 0
    assert worst.mean() == pytest.approx(0.05, abs=0.006)


def test_top_and_bottom_have_no_head_in_common():
    ranking = np.array([4, 0, 5, 1, 3, 2, 6])
    sets = head_sets.draw(ranking, (2, 80, 6), 1)
    assert list(sets) == ["top-2", "bottom-2", "random-2-0", "top-3", "bottom-3", "random-3-0"]
    assert list(sets["top-2"]) == [4, 0]
    assert list(sets["bottom-2"]) == [2, 6]
    # Gemma 3 270M has 72 heads: 40 at either end would share 8.
    for total in (1, 2, 72, 79, 80):
        sets = head_sets.draw(np.arange(total), (20, 40), 0)
        for size in {name.split("-")[1] for name in sets}:
            assert not set(sets[f"top-{size}"]) & set(sets[f"bottom-{size}"])
        assert max((len(heads) for heads in sets.values()), default=0) == min(40, total // 2)


def test_single_heads_of_both_ends_are_named_by_their_place_in_the_model():
    ranking = np.array([4, 0, 5, 1, 3, 2])
    cells = head_sets.singles(ranking, 2, width=3)
    assert {name: list(heads) for name, heads in cells.items()} == {
        "single-1-1": [4],
        "single-0-0": [0],
        "single-0-2": [2],
        "single-1-0": [3],
    }
    assert set(map(head_sets.layer_and_head, cells)) == {(1, 1), (0, 0), (0, 2), (1, 0)}
    assert len(head_sets.singles(ranking, 5, width=3)) == 6
    rows = head_sets.table(cells | {"top-2": ranking[:2]}, (2, 3)).to_pylist()
    assert [(row["group"], row["size"], row["layer"], row["head"]) for row in rows] == [
        ("single", 1, 1, 1),
        ("single", 1, 0, 0),
        ("single", 1, 0, 2),
        ("single", 1, 1, 0),
        ("top", 2, 0, 0),
        ("top", 2, 1, 1),
    ]
