"""Tables of trained models: perplexities of four models, and the released arithmetic."""

from collections.abc import Callable
from typing import Any

from lm_jax.statistics import student_interval
from tools.page_blocks.sources import MODELS, interval, published, summary, table


def over_seeds(values: list[float]) -> str:
    """Mean, lowest to highest, and Student's 95 % interval of the mean."""
    mean = student_interval(values)
    return (
        f"{mean.estimate:.1f} ({min(values):.1f} to {max(values):.1f}; "
        f"{mean.low:.1f} to {mean.high:.1f})"
    )


def three_epochs(name: str) -> str:
    """Test and validation perplexity of four models over seeds, beside Table 1."""
    found, paper = summary(name), published("protot")["table_1"]
    rows = []
    for model, label in MODELS.items():
        runs = [run for run in found["finished"] if run["model"] == model]
        second = [
            each["validation_perplexity"]
            for each in found["evaluations"]
            if each["model"] == model and each["epochs"] == 3 and each["step"] == 1124
        ]
        rows.append(
            (
                label,
                over_seeds([run["test_perplexity"] for run in runs]),
                over_seeds([run["validation_perplexity"] for run in runs]),
                over_seeds(second),
                f"{paper[model]['test_perplexity']:.1f}",
            )
        )
    return table(
        (
            "",
            "test perplexity",
            "validation",
            "validation after two of the three epochs",
            "the paper, FineWeb-Edu, ten epochs",
        ),
        rows,
    )


def ten_epochs(name: str) -> str:
    """Perplexity of the best and, in brackets, of the last weights, by model and seed."""
    found, paper = summary(name), published("protot")["table_1"]
    seeds = (234, 124)
    runs = {(run["model"], run["seed"]): run for run in found["finished"]}
    evaluations: dict[tuple[str, int], dict[int, float]] = {}
    for each in found["evaluations"]:
        run = evaluations.setdefault((each["model"], each["seed"]), {})
        run[each["step"]] = each["validation_perplexity"]
    epoch = runs["protot", 234]["steps"] // 10

    def by_seed(model: str, text: Callable[[dict[str, Any]], str]) -> list[str]:
        return [text(runs[model, seed]) if (model, seed) in runs else "stopped" for seed in seeds]

    rows = []
    for model, label in MODELS.items():
        ratios = [
            f"{runs[model, seed]['test_perplexity'] / runs['llama', seed]['test_perplexity']:.2f}"
            for seed in seeds
            if (model, seed) in runs
        ]
        rows.append(
            (
                label,
                *by_seed(
                    model,
                    lambda run: f"{run['test_perplexity']:.1f} ({run['last_test_perplexity']:.1f})",
                ),
                ", ".join(by_seed(model, lambda run: f"{run['validation_perplexity']:.1f}")),
                ", ".join(by_seed(model, lambda run: str(run["best_step"] // epoch))),
                ", ".join(
                    f"{evaluations[model, seed][3 * epoch]:.1f}"
                    for seed in seeds
                    if 3 * epoch in evaluations.get((model, seed), {})
                ),
                "1" if model == "llama" else ", ".join(ratios),
                f"{paper[model]['test_perplexity']:.1f}",
            )
        )
    return table(
        (
            "",
            "test, seed 234",
            "test, seed 124",
            "validation, seeds 234 and 124",
            "lowest after epoch",
            "validation after three of the ten",
            "test, of LLaMA's of the seed",
            "the paper",
        ),
        rows,
    )


def arithmetic(name: str) -> str:
    """Models trained with exact and with released means, by context and seed."""
    rows = []
    for entry in summary(name)["entries"]:
        perplexity = entry["perplexity"]
        rows.append(
            (
                f"{entry['context']:,}",
                str(entry["seed"]),
                f"{perplexity['trained_exact_evaluated_exact']:.1f}",
                f"{perplexity['trained_released_evaluated_released']:.1f}",
                f"{perplexity['trained_released_evaluated_exact']:.1f}",
                interval(entry["trained_with_it"]["whole"], "+.3f"),
                f"{entry['swapped_in']['whole']['estimate']:+.3f}",
            )
        )
    return table(
        (
            "context",
            "seed",
            "perplexity, exact",
            "released",
            "trained released, evaluated exact",
            "trained with it",
            "swapped into the exact model",
        ),
        rows,
    )
