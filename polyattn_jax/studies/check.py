"""May this recipe replace the softmax of this model? The needle verdict of an audit, alone.

    iaj polyattn check --model=smollm2 --recipe=relu:p=4,b=auto
    iaj polyattn check --model=FOLDER --n=200 --length=512 --workdir=runs/check
    iaj polyattn check --model=smollm2 --text=FILE --diagnose
    iaj polyattn check --model=smollm2 --recipe=relu:p=2,b=auto --text=FILE --hybrid=heads.json

A negative screen, after "When Does Polynomial Attention Concentrate?", section 6, in the stages of
`stages.py`:

1. calibrate b_auto, unless the recipe gives its own bias;
2. measure S_p on the last row of needle and induction prompts, where the recipe is a normalised
   power, or S_phi where it is a feature map, and S of softmax on the same rows; induction ranks the
   heads;
3. ask for the needle with softmax and with the recipe in every head, on the same prompts.

Its one control is the accuracy of softmax on these prompts, which must show that it solves the
probe. Only an audit tests whether softmax also finds a needle that was left out, and whether its
loss falls on repeated tokens; there these controls enter the verdict.

With `--text` the rows of the user's own texts are diagnosed too, and their language-modelling loss
is measured with softmax and with the recipe; `--diagnose` does the former alone (`diagnosis.py`),
and `--hybrid=FILE` looks for the heads that may have the recipe (`hybrid.py`); with `--workdir` it
leaves a page too.

The table goes to standard output, progress to standard error. The exit code is 0 for preserve, 10
for no-go and 11 for undecided (`decision.verdict`). With `--workdir` a killed check resumes where
it stopped, and `check.json` holds the numbers; without it no file is kept.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Literal

from lm_jax import statistics
from lm_jax.errors import EXIT_FINISHED, EXIT_NO_GO, EXIT_UNDECIDED, UsageError
from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions, at_least
from lm_jax.run.workdir import open_workdir
from lm_jax.weights import hub
from polyattn_jax.audit import (
    bias_tables,
    concentration,
    decision,
    model_calibration,
    opening,
    recipe_rows,
    stages,
    summary,
    units,
)
from polyattn_jax.audit.audit_suites import PROMPTS, TEXTS, build_suites
from polyattn_jax.audit.audited_model import AuditedModel, load
from polyattn_jax.audit.columns import Columns, columns, where
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.hybrid_results import Search
from polyattn_jax.audit.provenance import read_provenance
from polyattn_jax.audit.results import (
    CheckResult,
    ConditionResult,
    PromptResults,
    RowShares,
    SoftmaxComparison,
    TextLoss,
    TextResults,
)
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import SOFTMAX, Calibrated, parse_recipe, resolve_bias
from polyattn_jax.report import check_table
from polyattn_jax.report import hybrid as hybrid_report
from polyattn_jax.studies import diagnosis, hybrid
from polyattn_jax.studies.diagnosis import folder_or_temporary
from polyattn_jax.suites import Suite, read_jsonl, read_texts
from polyattn_jax.suites.texts import SHORTEST

RESULT = "check.json"
EXIT_CODES = {"preserve": EXIT_FINISHED, "no-go": EXIT_NO_GO, "undecided": EXIT_UNDECIDED}
# Induction ranks the heads and decides nothing.
MOST_INDUCTION = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The model, the recipe, and the prompts of the check.

    Attributes:
      model: Hugging Face folder, GGUF file, or name of an asset such as smollm2.
      recipe: row map that is to replace softmax.
      n: number of needle prompts; preserve takes 73 or more.
      length: number of tokens of each prompt.
      calibration_length: number of tokens to calibrate b=auto on; 0 is --length.
      top_heads: number of heads of highest median S_2 to report separately.
      prompts: a .jsonl file of your own prompts, evaluated besides the needle prompts.
      text: a file of your own texts: .jsonl of id and text, or plain text cut into pieces.
      text_length: most tokens of a text that are read.
      diagnose: diagnose the rows of --text in one forward pass, and stop.
      hybrid: search the heads that may have the recipe, and save them to this new .json file.
      keep: percent of all heads that keep softmax, of the sets that --hybrid tries.
      draws: number of random sets of each size that --hybrid tries.
      max_loss: nats per token that the loss on text may rise under --hybrid.
      haystack: text around the needle: essays, speeches, or a text file.
      seed: random seed of the prompts and of the bootstrap.
      mesh: numbers of devices along data, fsdp, tensor.
      batch_size: number of prompts in one forward pass.
      dtype: dtype of the weights.
    """

    model: str
    recipe: str = "relu:p=4,b=auto"
    n: Annotated[int, at_least(1)] = 120
    length: Annotated[int, at_least(1)] = 256
    calibration_length: int = 0
    top_heads: int = 40
    prompts: str = ""
    text: str = ""
    text_length: Annotated[int, at_least(SHORTEST)] = 1024
    diagnose: bool = False
    hybrid: str = ""
    keep: tuple[str, ...] = ("0", "5", "10", "20", "40", "60", "80")
    draws: Annotated[int, at_least(0)] = 3
    max_loss: Annotated[float, at_least(0.0)] = 0.05
    haystack: str = "essays"
    seed: Annotated[int, at_least(0)] = 0
    mesh: tuple[str, ...] = ("1", "1", "1")
    batch_size: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"


def config_from_options(options: Options) -> AuditConfig:
    """The options as an audit of one recipe, without ablation.

    Raises:
      UsageError: for an unknown recipe, or a value that `AuditConfig` refuses.
    """
    mesh = options.mesh
    if len(mesh) != 3 or not all(size.lstrip("-").isdecimal() for size in mesh):
        raise UsageError(f"--mesh={','.join(mesh)} is not three whole numbers; write 8,1,1")
    recipe = parse_recipe(options.recipe).spec
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "mesh": [int(size) for size in mesh],
        "seed": options.seed,
        "batch_size": options.batch_size,
        "prompts": options.prompts,
        "text": options.text,
        "text_length": options.text_length,
        "haystack": options.haystack,
        "niah_lengths": [options.length],
        "niah_n": options.n,
        "control_n": 1,
        "induction_length": options.length,
        "induction_n": min(options.n, MOST_INDUCTION),
        "mqar_n": 0,
        "repeated_n": 1,
        "calibration_length": options.calibration_length,
        "recipes": [recipe],
        "sweep_length": options.length,
        "ablation_recipe": recipe,
        "top_heads": options.top_heads,
    }
    return from_plain(settings, AuditConfig)


def search_from_options(options: Options) -> Search:
    """The sets of heads that `--hybrid` tries.

    Raises:
      UsageError: for a `--keep` that is no list of percentages.
    """
    try:
        keep = tuple(float(share) for share in options.keep)
    except ValueError as error:
        raise UsageError(f"--keep={','.join(options.keep)}: {error}; write 5,10,20") from error
    return Search(keep, options.draws, options.max_loss)


def run(audited: AuditedModel, folder: Path) -> CheckResult:
    """Runs or resumes a check in an open work folder and returns its result."""
    config = audited.config
    recipe = parse_recipe(config.recipes[0])
    degree = recipe.degree
    measured = degree is not None or recipe_rows.measured(recipe)
    probe = f"niah_{config.sweep_length}"
    built = build_suites(audited)
    suites = {name: built[name] for name in (probe, "induction", PROMPTS, TEXTS) if name in built}
    record_provenance(
        folder,
        collect_provenance(
            seeds={"check": config.seed},
            dtype=config.dtype,
            data=hub.identity("model", audited.model.identity.text, audited.model.revision)
            | {n: s.sha256 for n, s in suites.items()},
            tokenizer=audited.tokenizer.sha256,
        ),
    )
    calibration, b_auto = None, None
    unmeasured: tuple[RowShares, SoftmaxComparison | None] = RowShares(), None
    of_suite = {probe: unmeasured, TEXTS: unmeasured}
    fingerprint = opening.fingerprint(audited, suites)
    with units.open_stores(folder, fingerprint, config.degrees) as stores:
        if recipe.bias == "auto" or (degree is not None and recipe.bias == 0.0):
            calibration = model_calibration.calibrated(audited, folder)
            b_auto = calibration.bias
        calibrated = bias_tables.calibrated(audited, folder, config.by_name, b_auto)
        bias = resolve_bias(recipe, calibrated)
        if degree is not None:
            biases = {"zero": 0.0, "auto": bias if b_auto is None else b_auto}
            stages.diagnose(audited, stores, suites, biases)
            rows, at_zero = columns(stores.rows.read()), recipe.bias == 0.0
            for name in of_suite.keys() & suites.keys():
                of_suite[name] = row_findings(audited, rows, name, degree, at_zero=at_zero)
        elif recipe_rows.measured(recipe):
            recipe_rows.diagnose(audited, stores, suites, {recipe: bias})
            rows = columns(stores.recipe_rows.read())
            for name in of_suite.keys() & suites.keys():
                of_suite[name] = recipe_rows.shares(rows, audited, recipe, name)
        safe, against = of_suite[probe]
        base, entry = answered(audited, stores, suites, probe, calibrated)
        own = None
        if config.prompts:
            own = PromptResults(*answered(audited, stores, suites, PROMPTS, calibrated))
        texts = None
        if config.text:
            losses = losses_on_texts(audited, stores, suites[TEXTS], calibrated)
            shares, change = of_suite[TEXTS]
            texts = TextResults(*losses, _unsafe(shares), change)
    decided = decision.explain(
        entry,
        base,
        safe.recipe,
        safe.recipe_top,
        unmeasured="no row has a target" if measured else recipe.unmeasured,
        tolerance=config.tolerance,
        ablated=False,
        dead=(safe.dead, safe.dead_top),
    )
    return CheckResult(
        model=config.model,
        provenance=read_provenance(folder, config),
        recipe=recipe.spec,
        degree=recipe.map.degree,
        bias=bias_tables.plain(bias),
        calibration=calibration,
        measured=measured,
        length=config.sweep_length,
        heads=min(config.top_heads, audited.model.cfg.num_layers * audited.model.cfg.num_heads),
        unsafe=_unsafe(safe),
        against_softmax=against,
        prompts=own,
        texts=texts,
        softmax=base.accuracy,
        substituted=entry.accuracy,
        delta=entry.delta,
        p_value=entry.p_value,
        lost=entry.lost,
        won=entry.won,
        dead_rows_per_prompt=entry.dead_rows_per_prompt,
        could_decide=decided.could_decide,
        least_prompts=decided.least_prompts,
        linear=linear_state(recipe, bias, audited.model.cfg),
        verdict=decided.verdict,
        reason=decided.reason,
        next=decided.next,
    )


def answered(
    audited: AuditedModel,
    stores: units.ResultStores,
    suites: dict[str, Suite],
    name: str,
    calibrated: Calibrated,
) -> tuple[ConditionResult, ConditionResult]:
    """Runs or resumes the answers to one suite; the results of softmax and of the recipe."""
    stage = PROMPTS if name == PROMPTS else "sweep"
    conditions = stages.sweep_conditions(audited, calibrated, stage)
    stages.evaluate(audited, stores, conditions, {name: suites[name]})
    result = summary.behaviour(columns(stores.answers.read()), stage, audited.config)
    by_cell = {entry.cell: entry for entry in result}
    return by_cell[SOFTMAX.name], by_cell[conditions[-1].name]


def losses_on_texts(
    audited: AuditedModel, stores: units.ResultStores, suite: Suite, calibrated: Calibrated
) -> tuple[TextLoss, TextLoss]:
    """Measures or resumes the loss on texts of the user, with softmax and with the recipe."""
    conditions = stages.sweep_conditions(audited, calibrated, TEXTS)
    stages.text_losses(audited, stores, conditions, suite)
    result = summary.text_losses(
        columns(stores.text_losses.read()), TEXTS, one_document=audited.config.one_document
    )
    by_cell = {entry.cell: entry for entry in result}
    return by_cell[SOFTMAX.name], by_cell[conditions[-1].name]


def row_findings(
    audited: AuditedModel, rows: Columns, suite: str, degree: float, *, at_zero: bool
) -> tuple[RowShares, SoftmaxComparison | None]:
    """The shares of the rows of one suite that are safe, what the recipe loses and sharpens.

    Rows were measured at b = 0 and at one other bias: the recipe's own, or b_auto where the recipe
    has b = 0 (`at_zero`). Heads are ranked at the other one.
    """
    config, cfg = audited.config, audited.model.cfg
    by_head = summary.heads(rows, (cfg.num_layers, cfg.num_heads))
    top = summary.ranking(by_head)[: config.top_heads]
    kind = "zero" if at_zero else "auto"
    maps = itertools.product((degree, None), (None, top))
    safe = [concentration.safe_fraction(rows, suite, p, kind, config, k) for p, k in maps]
    dead = [concentration.dead_fraction(rows, suite, kind, config, k) for k in (None, top)]
    compared = concentration.against_softmax(where(rows, suite=suite, bias_kind=kind), config)
    against = next((entry for entry in compared if entry.p == degree), None)
    return RowShares(*safe, *dead), against


def _unsafe(safe: RowShares) -> RowShares:
    """The shares of rows that are not safe, from those of rows that are."""
    names = ("recipe", "recipe_top", "softmax", "softmax_top")
    return dataclasses.replace(safe, **{name: _complement(getattr(safe, name)) for name in names})


def _complement(safe: statistics.Interval | None) -> statistics.Interval | None:
    """The share of rows that are not safe, from the share of those that are."""
    if safe is None:
        return None
    return statistics.Interval(1.0 - safe.estimate, 1.0 - safe.high, 1.0 - safe.low, safe.n)


def main(arguments: cli.Arguments) -> int:
    """The command."""
    config = config_from_options(arguments.options)
    if config.prompts:
        read_jsonl(config.prompts)
    if config.text:
        read_texts(config.text)
    if arguments.options.diagnose:
        result = diagnosis.diagnose(config, arguments.workdir, resume=arguments.resume)
        print(diagnosis.format_diagnosis(result))
        return EXIT_FINISHED
    if target := arguments.options.hybrid:
        search = search_from_options(arguments.options)
        hybrid.check_target(Path(target))
        tried = hybrid.find(config, search, arguments.workdir, resume=arguments.resume)
        print(hybrid_report.format_hybrid(tried))
        if tried.best is not None:
            write_json(target, tried.best)
            print(f"\nSaved to {target}\npolyattn_jax.load_recipe(FILE, model) reads it.")
        return EXIT_FINISHED
    with (
        folder_or_temporary(arguments.workdir) as folder,
        open_workdir(folder, config, resume=arguments.resume) as work,
    ):
        given = opening.inputs(config)
        if not finish_time(work.path, given):
            write_json(work.path / RESULT, run(load(config), work.path))
            mark_finished(work.path, given)
        result = load_result(work.path / RESULT, CheckResult)
    print(check_table.format_result(result))
    return EXIT_CODES[result.verdict]


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)
