"""Multiple choice: a model's answer is the choice that it gives the highest likelihood.

    questions     ARC-Easy, PIQA and OpenBookQA, from the asset `mc`
    truthfulqa    TruthfulQA MC1, from a user's file
    likelihood    log-likelihoods of choices under any function from tokens to logits, cached
    benchmarks    the questions of several tasks by name
    comparison    accuracies with intervals, models side by side, the paired test
    results       the dataclasses of such a comparison
    harness       the same scoring as a model class of the lm-evaluation-harness

    scorers = {name: Scorer(logits, tokenizer, max_length) for name, logits in models.items()}
    print(table(compare(scorers, {"arc_easy": questions.read("arc_easy", limit=500)})))

Prompts, tokenisation and both accuracies are those of EleutherAI's lm-evaluation-harness 0.4.13
(tasks arc_easy, piqa, openbookqa and truthfulqa_mc1, without examples); a test holds the two to
equal numbers.
"""

from lm_jax.evaluate.multiple_choice.benchmarks import TRUTHFULQA, read_tasks, task_problems
from lm_jax.evaluate.multiple_choice.comparison import compare, table
from lm_jax.evaluate.multiple_choice.likelihood import Logits, Scorer, open_cache
from lm_jax.evaluate.multiple_choice.questions import TASKS, Question, read
from lm_jax.evaluate.multiple_choice.truthfulqa import truthfulqa

__all__ = [
    "TASKS",
    "TRUTHFULQA",
    "Logits",
    "Question",
    "Scorer",
    "compare",
    "open_cache",
    "read",
    "read_tasks",
    "table",
    "task_problems",
    "truthfulqa",
]
