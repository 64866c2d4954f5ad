"""Values by which circuits are ranked, against means written out; tokens of the drawn prompt."""

import numpy as np
import pytest

from sparse_jax.circuits.config import CircuitConfig
from sparse_jax.circuits.measurements import rows
from sparse_jax.circuits.piece import Measurement, _rank_values
from sparse_jax.circuits.tasks import make_task
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

# Three components in two prompts, of which the second is shorter: it lacks the last component.
IMPORTANCE = np.array([[[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]])
REAL = np.isfinite(IMPORTANCE)


@pytest.mark.parametrize(
    ("ranking", "scope", "values"),
    [
        ("signed", "prompt", [[3.0, -4.0, 1.0], [-2.0, -2.0, -np.inf]]),
        ("absolute", "prompt", [[3.0, 4.0, 1.0], [2.0, 2.0, -np.inf]]),
        # The mean of the prompts that have a component, and the absolute value of that mean.
        ("signed", "task", [[0.5, -3.0, 1.0], [0.5, -3.0, -np.inf]]),
        ("absolute", "task", [[0.5, 3.0, 1.0], [0.5, 3.0, -np.inf]]),
    ],
)
def test_values_of_every_ranking_are_those_written_out(ranking, scope, values):
    result = _rank_values(IMPORTANCE, REAL, ranking, scope)
    np.testing.assert_array_equal(result, [values])


def test_the_drawn_prompt_begins_with_a_first_token_of_id_0():
    tokenizer = word_tokenizer(special=["<bos>"])
    task = make_task("ioi", tokenizer, count=2, seed=0)
    model = circuit_model(vocab_size=tokenizer.vocab_size)
    names = {"task": "ioi", "model": "dense"}

    def stored(part):
        kind = {"quantity": part.measurement.removesuffix("s"), "method": "clean"}
        return rows([1.0, 2.0], {"prompt": [0, 1]}, **kind, **names)

    config = CircuitConfig(components=("component_edges",), shown=1)
    drawn = Measurement(config, names, model, task, stored).drawn(tokenizer)
    ids = tokenizer.encode(task.examples[1].clean)
    assert ids[0] == 0 and drawn.metric == 2.0
    assert drawn.tokens == tuple(tokenizer.decode([each]) for each in ids)
