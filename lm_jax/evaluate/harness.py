"""A model class of EleutherAI's lm-evaluation-harness over any function from tokens to logits.

`pip install 'interpretable-attention-jax[eval]'` brings the harness, which is imported inside these
functions alone.

    model(scorer, generate)      a model that `lm_eval.simple_evaluate` and `lm_eval.evaluate` take
    evaluate(scorer, questions)  our questions through the harness, without network or remote code

The harness makes the requests, picks the answers and takes the means; tokens and log-likelihoods
are those of `likelihood`, with its cache. The harness's own cache (`use_cache`) is pickle in SQLite
and knows requests but no models: leave it off.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib.resources
import importlib.util
import itertools
from typing import Any

from lm_jax.errors import UsageError
from lm_jax.evaluate.multiple_choice.comparison import DELIMITER, METRICS
from lm_jax.evaluate.multiple_choice.likelihood import Pair, Scorer, encode, pair, score
from lm_jax.evaluate.multiple_choice.questions import Question
from lm_jax.text.tokenizer import Tokenizer

# Prompts of ids and the most new tokens, to the new ids of every prompt, each the likeliest.
Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]

_SPLIT = "questions"
# Of a task that does not say, as the harness's own models have it.
_NEW_TOKENS = 256


def model(scorer: Scorer, generate: Generate | None = None) -> Any:
    """A `lm_eval.api.model.TemplateLM` that scores continuations and texts, and generates.

    Args:
      scorer: the model.
      generate: the same model's greedy decoding, as `lm_jax.generate` does it:
        `lambda prompts, most: lm_jax.generate(params, prompts, cfg, max_new_tokens=most,
        stop_id=scorer.tokenizer.stop_ids)`. A text ends at the first of these ids in any case.

    Raises:
      UsageError: the harness is not installed; and from the model, for a request to generate where
        `generate` is None, or to sample.
    """
    _require()
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class Decoder(TemplateLM):
        """Requests of the harness as token ids."""

        @property
        def eot_token_id(self) -> int:
            return _end(scorer)

        @property
        def prefix_token_id(self) -> int:
            begin = scorer.tokenizer.bos_id
            return self.eot_token_id if begin is None else begin

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return encode(scorer.tokenizer, string, begin=add_special_tokens is not False)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            ids = pair(scorer.tokenizer, context, continuation)
            return list(ids.context), list(ids.continuation)

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, **options: Any
        ) -> list[tuple[float, bool]]:
            pairs = [Pair(tuple(context), tuple(choice)) for _, context, choice in requests]
            return [tuple(each) for each in score(scorer, pairs, quiet=disable_tqdm)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Sums over disjoint windows, each read after as much of the text as fits."""
            pairs, owners = [], []
            for owner, request in enumerate(requests):
                windows = utils.get_rolling_token_windows(
                    token_list=encode(scorer.tokenizer, request.args[0], begin=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=scorer.max_length,
                    context_len=1,
                )
                for context, text in map(utils.make_disjoint_window, windows):
                    pairs.append(Pair(tuple(context), tuple(text)))
                    owners.append(owner)
            sums = [0.0] * len(requests)
            for owner, result in zip(owners, score(scorer, pairs, quiet=disable_tqdm), strict=True):
                sums[owner] += result.log_likelihood
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            if generate is None:
                raise UsageError(
                    "the task generates text; give harness.model a generate, as lm_jax.generate"
                )
            return _texts(scorer, generate, [request.args for request in requests])

    return Decoder()


def evaluate(
    scorer: Scorer, questions: Mapping[str, Sequence[Question]]
) -> dict[str, dict[str, float]]:
    """`acc` and `acc_norm` of every task, as the harness computes them.

    Raises:
      UsageError: the harness is not installed, or a task has no questions.
      BadInputError: as from `likelihood.score`.
    """
    _require()
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask

    tasks = {
        task: ConfigurableTask(config=_config(task, asked)) for task, asked in questions.items()
    }
    result = evaluator.evaluate(
        model(scorer),
        {"tasks": tasks, "groups": {}, "group_map": {}},
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {metric: float(result["results"][task][f"{metric},none"]) for metric in METRICS}
        for task in questions
    }


def truthfulqa_preset() -> str:
    """The six answered questions that precede every question in the harness's TruthfulQA.

    Raises:
      UsageError: the harness is not installed, or its task is not laid out as in 0.4.13.
    """
    _require()
    import jinja2
    import yaml

    file = importlib.resources.files("lm_eval") / "tasks" / "truthfulqa" / "truthfulqa_mc1.yaml"
    prompt = yaml.safe_load(file.read_text(encoding="utf-8"))["doc_to_text"]
    mark = "the question"
    before, result, _ = (
        jinja2.Template(prompt).render(question=mark).partition(f"\n\nQ: {mark}\nA:")
    )
    if not result:
        raise UsageError(f"{file} has another prompt; install lm-eval 0.4.13, or give the preset")
    return before.strip()


def _texts(
    scorer: Scorer, generate: Generate, requests: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """The text that follows each context, up to the first of its `until`."""
    prompts, limits = [], []
    for context, options in requests:
        if options.get("do_sample") or options.get("temperature"):
            raise UsageError(
                "the task samples; give gen_kwargs do_sample=False and temperature=0, for "
                "harness.model decodes greedily"
            )
        most = int(options.get("max_gen_toks", _NEW_TOKENS))
        if not 0 < most < scorer.max_length:
            raise UsageError(
                f"max_gen_toks = {most} leaves no place for a prompt in a context of "
                f"{scorer.max_length} tokens; lower it in gen_kwargs"
            )
        prompts.append(encode(scorer.tokenizer, context)[most - scorer.max_length :])
        limits.append(most)
    texts = [""] * len(requests)
    for most, rows in _batches(prompts, limits, scorer.batch_tokens):
        for row, ids in zip(rows, generate([prompts[r] for r in rows], most), strict=True):
            texts[row] = _cut(scorer.tokenizer, ids, requests[row][1].get("until") or [])
    return texts


def _batches(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], batch_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """A limit and the numbers of prompts that share it, of like lengths."""
    order = sorted(range(len(prompts)), key=lambda r: (limits[r], len(prompts[r])), reverse=True)
    while order:
        most = limits[order[0]]
        rows = max(1, batch_tokens // (len(prompts[order[0]]) + most))
        batch = [r for r in order[:rows] if limits[r] == most]
        yield most, batch
        order = order[len(batch) :]


def _cut(tokenizer: Tokenizer, ids: Sequence[int], until: str | Sequence[str]) -> str:
    text = tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.stop_ids, ids))
    for end in [until] if isinstance(until, str) else until:
        text = text.split(end)[0] if end else text
    return text


def _require() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "the lm-evaluation-harness is not installed; run: "
            "pip install 'interpretable-attention-jax[eval]'"
        )


def _end(scorer: Scorer) -> int:
    tokenizer = scorer.tokenizer
    end = tokenizer.bos_id if tokenizer.eos_id is None else tokenizer.eos_id
    if end is None:
        raise UsageError("the tokenizer has no token that ends or begins a text; give a context")
    return end


def _config(task: str, questions: Sequence[Question]) -> dict[str, Any]:
    import datasets

    if not questions:
        raise UsageError(f"task {task} has no questions; give one or more")
    rows = [dataclasses.asdict(question) for question in questions]
    return {
        "task": task,
        # A function in place of a name of the hub: nothing is looked up, nothing written.
        "custom_dataset": lambda **_: {_SPLIT: datasets.Dataset.from_list(rows)},
        "test_split": _SPLIT,
        "output_type": "multiple_choice",
        "doc_to_text": lambda row: row["context"],
        "doc_to_choice": lambda row: row["choices"],
        "doc_to_target": lambda row: row["gold"],
        "target_delimiter": DELIMITER,
        "num_fewshot": 0,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in METRICS
        ],
    }
