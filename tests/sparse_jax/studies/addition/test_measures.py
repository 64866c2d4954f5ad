"""Measurements of edges against counts by hand and by enumeration."""

import itertools

import numpy as np
import pytest

from sparse_jax.studies.addition import measures, problems
from tests.sparse_jax.studies.addition.patterns import T, pattern, trace

ONES, TENS, HUNDREDS = problems.ANSWERS[:3]
NO_CARRY, TENS_CARRY = 5321, 3628


def test_edges_are_counted_by_layer_and_in_all():
    two = pattern((0, ONES, 1), (0, ONES, 4), (1, TENS, 4))
    result = measures.edges(trace(two, two, pattern((0, ONES, 1), weight=0.001)), seed=0)
    assert result.all.estimate == pytest.approx((3 + 3 + 1) / 3)
    assert [layer.estimate for layer in result.by_layer] == pytest.approx([5 / 3, 2 / 3])
    assert result.heavy.estimate == pytest.approx(2)
    assert result.all.n == 3
    assert result.possible == 2 * 66


def test_digits_that_attend_to_their_operands():
    both = pattern((0, ONES, 1), (0, ONES, 4), (0, ONES, 9), (0, TENS, 0))
    one = pattern((0, ONES, 4), (1, ONES, 1))
    ones, tens = measures.operands(trace(both, one), 0)
    assert (ones.place, tens.place) == ("ones", "tens")
    assert ones.both.estimate == 0.5 and ones.both.n == 2
    assert ones.each.estimate == 0.75 and ones.each.n == 4
    assert ones.edges == 2
    assert ones.weight == pytest.approx(3 / 4)
    assert tens.both.estimate == 0 and tens.each.estimate == 0.25
    assert tens.weight == pytest.approx(1)
    assert ones.reached.estimate == 1 and tens.reached.estimate == 0
    # Three of eleven positions include both operands in 3 * 2 of 11 * 10 ways; one never does.
    assert ones.both_by_chance == pytest.approx((3 * 2 / 110 + 0) / 2)
    assert ones.each_by_chance == pytest.approx((3 + 1) / 2 / 11)


@pytest.mark.parametrize("drawn", [0, 1, 2, 5, 7])
def test_chance_is_that_of_every_way_to_draw(drawn):
    among, marked = 7, {1, 4}
    ways = list(itertools.combinations(range(among), drawn))
    held = [len(marked & set(way)) for way in ways]
    count = np.array([drawn])
    assert measures._chance_of_all(count, among, 2) == pytest.approx(held.count(2) / len(ways))
    none = measures._chance_of_none(count, among, np.array([2]))
    assert none == pytest.approx(held.count(0) / len(ways))


def test_information_on_a_digit_is_where_a_path_of_open_edges_leads():
    """4 reads 1, 6 reads 4 a layer later, and 8 reads 6 in the same layer, which is too early."""
    path = pattern((0, 4, 1), (1, 6, 4), (1, 8, 6), (2, 10, 8), layers=3)
    open_LPTS = path[:, None] > 0
    held = [
        np.flatnonzero(measures.informed(open_LPTS[:layers], (1,))[0]).tolist()
        for layers in range(4)
    ]
    assert held == [[1], [1, 4], [1, 4, 6], [1, 4, 6]]


def test_a_carry_is_read_from_a_lower_digit_or_from_a_position_that_has_read_it():
    direct = pattern((1, TENS, 4))
    relayed = pattern((0, 5, 1), (1, TENS, 5))
    elsewhere = pattern((0, 5, 0), (1, TENS, 5))
    itself = pattern((0, TENS, 1), (1, TENS, TENS))
    numbers = np.array([TENS_CARRY] * 4 + [NO_CARRY])
    result = trace(direct, relayed, elsewhere, itself, pattern())
    by = {(one.place, one.carry): one for one in measures.carry(result, numbers, 1)}
    assert set(by) == {("tens", True), ("tens", False), ("hundreds", False)}
    assert by["tens", True].attends == measures.rate(np.array([1, 1, 0, 0]))
    assert by["tens", False].attends.estimate == 0
    # One edge among ten positions, of which two hold the ones, or three where another has read one.
    assert by["tens", True].by_chance == pytest.approx((2 + 3 + 2 + 2) / 4 / 10)
    assert by["tens", False].by_chance == 0
    first = {(one.place, one.carry): one for one in measures.carry(result, numbers, 0)}
    assert first["tens", True].attends.estimate == 0.25


def test_accuracy_by_carries():
    result = trace(*[pattern()] * 3)
    result.exact_P[2] = False
    accuracy = measures.accuracy(result, np.array([NO_CARRY, TENS_CARRY, TENS_CARRY]))
    assert accuracy.all.estimate == pytest.approx(2 / 3)
    assert {count: one.n for count, one in accuracy.by_carries.items()} == {"0": 1, "1": 2}


def test_positions_of_a_pattern_are_those_of_the_input():
    assert pattern().shape == (2, T, T) and T == ONES + 1
