"""Recall of mixers at matched state size: MQAR, induction and a needle, by length and pairs.

sequences    rows of a task, and batches of them by number
state        the floats that a mixer carries, and models of equal memory
config       settings of the suite
study        trains and measures every model
summary      statistics of the measurements
results      their types
report       the page
"""
