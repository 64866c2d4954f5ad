"""Attributes the next word's logit to prototypes, layer by layer and pair by pair of tokens.

    iaj protot graph --run=runs/speeches --prompt="the people of the united"
    iaj protot graph --run=runs/speeches --prompt="the war with" --targets=mexico,spain

With gates, divisors of norms and MLP outputs held, a logit is an exact sum over what each prototype
of each layer carries from one token to another (`decomposition.py`). Next to it stands the effect
of every prototype on the logit in the model itself, with nothing held. A target is a word of one
token; without `--targets` they are the most probable next tokens. Into `--workdir`, by default a
folder below `attribution` of the run, it writes

    attribution.json      every number (`results.py`)
    report.html           maps of layers by prototypes, strongest pairs, certificates, on one page
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

from lm_jax.report import slug
from lm_jax.run import cli, terminal
from lm_jax.run.files import storage_error, to_jsonable, write_json, write_text
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import at_least
from lm_jax.run.workdir import open_workdir
from protot_jax.analysis.token_ids import prompt_tokens
from protot_jax.studies.attribution import report, report_data
from protot_jax.studies.attribution.decomposition import check_length
from protot_jax.studies.attribution.results import AttributionReport, Target
from protot_jax.training.run_options import RunOptions

FOLDER = "attribution"
RESULT = "attribution.json"
PAGE = "report.html"
# Pairs of a target that are printed.
PRINTED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The prompt, the words whose logits are attributed, and how much is listed.

    Attributes:
      prompt: text whose next token is attributed.
      targets: words of one token whose logits are attributed; default the most probable tokens.
      top: how many of the most probable tokens, without --targets.
      pairs: how many of the strongest pairs of tokens to list.
    """

    prompt: str = ""
    targets: tuple[str, ...] = ()
    top: Annotated[int, at_least(1)] = 3
    pairs: Annotated[int, at_least(1)] = 50


def format_report(result: AttributionReport) -> str:
    """The strongest pairs of each target, for a terminal."""
    lines = []
    for target in result.targets:
        lines.append(
            f"{target.token.text!r}: probability {target.probability:.3f}, logit "
            f"{target.logit:+.3f} nats over the mean; {target.pairs_for_90_percent:,} of "
            f"{target.entries:,} pairs have 90 % of the sum of all absolute parts; sums agree to "
            f"{target.certificate.largest:.1e}"
        )
        heads = ["prototype", "from", "to", "weight", report.PART]
        lines.append(terminal.format_table(heads, _rows(result, target), left=(0, 1, 2)))
    return "\n".join(lines)


def _rows(result: AttributionReport, target: Target) -> list[list[str]]:
    return [
        [
            f"L{pair.layer}P{pair.prototype}",
            *(f"{i} {result.tokens[i].text}" for i in (pair.key, pair.query)),
            f"{pair.weight:.3f}",
            f"{pair.share:+.4f}",
        ]
        for pair in target.pairs[:PRINTED]
    ]


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    model, run = options.load(), Path(options.run)
    # What cannot be used is refused before a folder is made.
    _ = model.prototypes
    ids = prompt_tokens(model.tokenizer, options.prompt)
    check_length(ids, model.cfg)
    report_data.target_ids(model.tokenizer, options.targets)
    config = {
        "run": str(run),
        "seed": model.seed,
        "step": model.step,
        "prompt": options.prompt,
        "targets": list(options.targets),
        "top": options.top,
        "pairs": options.pairs,
    }
    folder = arguments.workdir
    if folder is None:
        parent = run / FOLDER
        try:
            parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(parent, error) from error
        # Prompts that differ in what a file name cannot hold have folders of their own.
        digest = hashlib.sha256(str([options.prompt, *options.targets]).encode()).hexdigest()[:8]
        folder = parent / f"{slug(options.prompt)[:40]}-{digest}"
    with open_workdir(folder, config, resume=arguments.resume) as work:
        given = {"model": model.identity.text}
        if done := finish_time(work.path, given):
            print(f"finished {done}")
        else:
            record_provenance(
                work.path,
                collect_provenance(
                    seeds={"run": model.seed},
                    dtype="float32",
                    data=given,
                    tokenizer=model.tokenizer.sha256,
                ),
            )
            result = report_data.build_report_data(
                model, options.prompt, options.targets, top=options.top, pairs=options.pairs
            )
            write_json(work.path / RESULT, result)
            # The page is rendered from the file, not from the numbers in memory.
            written = load_result(work.path / RESULT, AttributionReport)
            provenance = to_jsonable(read_provenance(work.path))
            write_text(work.path / PAGE, report.render(written, provenance=provenance))
            mark_finished(work.path, given)
        print(format_report(load_result(work.path / RESULT, AttributionReport)))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)
