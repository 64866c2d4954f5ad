"""Settings of a check: the model, the recipe, the prompts, and which question is asked of them."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from lm_jax.errors import BadInputError
from lm_jax.report import slug
from lm_jax.run.config import LATER, config_hash, from_plain, to_plain
from lm_jax.run.finished import file_inputs
from lm_jax.run.results import load_result
from lm_jax.run.settings import READ_AT_ONCE, READS_FILE, READS_MODEL, Bound, Flag, at_least
from lm_jax.study import Settings
from polyattn_jax.audit import opening, ranking
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.ranking import Statistic
from polyattn_jax.audit.results import Search
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe
from polyattn_jax.recipes.row_maps import names_map, parse_recipe
from polyattn_jax.recipes.trained_heads import TrainedHeads, load_trained
from polyattn_jax.studies.check.tasks import Task, parse_task
from polyattn_jax.suites.texts import READS_TEXT, SHORTEST

FOLDER = Path("runs/check")
# Induction ranks the heads and decides nothing.
MOST_INDUCTION = 20
# The settings that an audit has by the same name.
_OF_AUDIT = (
    *("model", "dtype", "mesh", "seed", "batch_size", "text", "text_length", "text_n"),
    *("haystack", "calibration_length", "calibration_text", "top_heads"),
)
SHARES = Bound(
    "percentages from 0 to below 100",
    lambda values: bool(values) and all(0 <= share < 100 for share in values),
)
TASKS = Bound("one or more tasks", bool)
# Their questions are asked of texts alone.
_READS_HAYSTACK = dataclasses.replace(READS_TEXT, unless=("diagnose", "hybrid"))


@dataclasses.dataclass(frozen=True)
class CheckConfig(Settings):
    """Everything that decides the result of a check.

    Attributes:
      model: Hugging Face folder, GGUF file, or name of an asset such as smollm2.
      recipe: row map that is to replace softmax, a file of heads that --hybrid saved, or a folder
        trained/ of `iaj polyattn distill`.
      task: task that must keep its accuracy: needle, induction, mqar, copying, pass_key or another
        name of `suites.named`, prompts:FILE for a .jsonl file of your own, or choices:NAME for
        multiple choice such as arc_easy. The verdict is of all that softmax solves.
      chat: ask in the model's own chat template, whose assistant begins with the last sentence of a
        prompt if that is unfinished; multiple choice stays as it is.
      n: number of prompts of a task; preserve takes 73 or more.
      length: number of tokens of each prompt.
      calibration_length: number of tokens to calibrate b=auto on; 0 is --length.
      calibration_text: file of a text to calibrate b=auto on, or essays or speeches; by default the
        eight texts of the package, which are English.
      top_heads: number of heads of highest median S_2 to report separately.
      prompts: a .jsonl file of your own prompts; the same as one more --task=prompts:FILE.
      text: a file of your own texts: .jsonl of id and text, or plain text cut into pieces.
      text_length: most tokens of a text that are read.
      text_n: number of first texts of --text, or pieces of a plain text, that are read; 0 for all.
      diagnose: diagnose the rows of --text in one forward pass, and stop.
      hybrid: search the heads that may have the recipe, and save them to this new .json file.
      keep: percent of all heads that keep softmax, of the sets that --hybrid tries.
      by: what --hybrid replaces together: each head, all heads that read one key head, or a layer.
      draws: number of random sets of each size that --hybrid tries.
      max_loss: nats per token that the loss on text may rise under --hybrid.
      rank: statistic by which --hybrid ranks the heads: text, task, kl, unsafe, lost, s, output,
        entropy or random (`audit.ranking`).
      max_state: percent of the bytes of softmax's cache at --length that a set of --hybrid keeps at
        most; 0 is no limit.
      haystack: text around the needle: essays, speeches, or a text file.
      needle_words: file of words and frame of the needle, for another language or code
        (`suites.needle_file`); by default 200 English nouns.
      seed: random seed of the prompts and of the bootstrap.
      mesh: numbers of devices along data, fsdp, tensor.
      batch_size: number of prompts in one forward pass.
      dtype: dtype of the weights.
    """

    model: Annotated[str, Flag(required=True), READS_MODEL] = ""
    recipe: Annotated[str, Flag()] = "relu:p=4,b=auto"
    task: Annotated[tuple[str, ...], Flag(repeated=True), TASKS] = dataclasses.field(
        default=("needle",), metadata=LATER
    )
    chat: Annotated[bool, Flag()] = dataclasses.field(default=False, metadata=LATER)
    n: Annotated[int, Flag(), at_least(1)] = 120
    length: Annotated[int, Flag(), at_least(1), READ_AT_ONCE] = 256
    calibration_length: Annotated[int, Flag(), at_least(0)] = 0
    calibration_text: Annotated[str, Flag(), READS_TEXT] = dataclasses.field(
        default="", metadata=LATER
    )
    top_heads: Annotated[int, Flag(), at_least(1)] = 40
    prompts: Annotated[str, Flag(), READS_FILE] = ""
    text: Annotated[str, Flag(), READS_TEXT] = ""
    text_length: Annotated[int, Flag(), at_least(SHORTEST)] = 1024
    text_n: Annotated[int, Flag(), at_least(0)] = dataclasses.field(default=0, metadata=LATER)
    diagnose: Annotated[bool, Flag()] = False
    hybrid: Annotated[str, Flag()] = ""
    keep: Annotated[tuple[float, ...], Flag(), SHARES] = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 80.0)
    by: Annotated[Literal["head", "kv_head", "layer"], Flag()] = dataclasses.field(
        default="head", metadata=LATER
    )
    draws: Annotated[int, Flag(), at_least(0)] = 3
    max_loss: Annotated[float, Flag(), at_least(0.0)] = 0.05
    rank: Annotated[Statistic, Flag()] = dataclasses.field(default="text", metadata=LATER)
    max_state: Annotated[float, Flag(), at_least(0.0)] = dataclasses.field(
        default=0.0, metadata=LATER
    )
    haystack: Annotated[str, Flag(), _READS_HAYSTACK] = "essays"
    needle_words: Annotated[str, Flag(), READS_FILE] = dataclasses.field(default="", metadata=LATER)
    seed: Annotated[int, Flag(), at_least(0)] = 0
    mesh: Annotated[tuple[int, ...], Flag()] = (1, 1, 1)
    batch_size: Annotated[int, Flag(), at_least(1)] = 1
    dtype: Annotated[Literal["float32", "bfloat16"], Flag()] = "float32"

    def problems(self) -> list[str]:
        problems = []
        if not self.of_heads:
            parse_recipe(self.recipe)
        elif self.hybrid or self.diagnose:
            what = "a folder of trained heads" if self.of_trained else "a file of heads"
            problems.append(
                f"--recipe={self.recipe} is {what}, which --hybrid and --diagnose do not take; "
                "name a row map"
            )
        keys = [task.key(self.length) for task in self.tasks]
        if len(set(keys)) < len(keys):
            names = ", ".join(task.name for task in self.tasks)
            problems.append(
                f"--task names a task, or files of one name, twice: {names}; name each once"
            )
        if len(self.mesh) != 3:
            sizes = ",".join(map(str, self.mesh))
            problems.append(f"--mesh={sizes} is not three whole numbers; write 8,1,1")
        if self.diagnose and self.hybrid:
            problems.append("--diagnose and --hybrid are questions of their own; ask one of them")
        if self.diagnose and not self.text:
            problems.append("--diagnose reads the rows of texts; name a file, --text=FILE")
        if self.hybrid and not self.text:
            problems.append("--hybrid measures the loss on texts; name a file, --text=FILE")
        if self.hybrid and not self.of_heads:
            ranking.check_statistic(self.rank, parse_recipe(self.recipe))
        return problems

    @property
    def of_heads(self) -> bool:
        """Whether the recipe is a file of heads, or a folder of trained ones."""
        return self.of_trained or (self.recipe.endswith(".json") and not names_map(self.recipe))

    @property
    def of_trained(self) -> bool:
        """Whether the recipe is a folder of trained heads, or the path of none."""
        if names_map(self.recipe) or self.recipe.endswith(".json"):
            return False
        return Path(self.recipe).is_dir() or "/" in self.recipe

    @functools.cached_property
    def trained(self) -> TrainedHeads | None:
        """The heads of that folder; None for any other recipe."""
        if not self.of_trained:
            return None
        if not Path(self.recipe).is_dir():
            raise BadInputError(
                f"--recipe={self.recipe} is no folder; name the folder trained/ in a work folder "
                "of iaj polyattn distill"
            )
        return load_trained(self.recipe)

    @functools.cached_property
    def heads(self) -> HybridRecipe | None:
        """The heads of that file or folder; None for a recipe in all heads."""
        if self.trained is not None:
            return self.trained.hybrid
        if not self.of_heads:
            return None
        if not Path(self.recipe).is_file():
            raise BadInputError(f"--recipe={self.recipe} is no file; name one that --hybrid saved")
        return load_result(self.recipe, HybridRecipe)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks in their order, `prompts` last."""
        own = [f"prompts:{self.prompts}"] * bool(self.prompts)
        return tuple(parse_task(text) for text in (*self.task, *own))

    @property
    def files(self) -> dict[str, str]:
        """Digests of the files that are read, but for those that are gone."""
        own = {f"--task={task.name}": task.source for task in self.tasks if task.kind == "prompts"}
        words = {"--needle_words": self.needle_words}
        words |= {"--recipe": self.recipe} if self.of_heads else {}
        return opening.files(self.audit) | file_inputs(own | words)

    @property
    def audit(self) -> AuditConfig:
        """The same as an audit of one recipe, without ablation; rows depend on it."""
        recipe = parse_recipe(self.heads.recipe if self.heads else self.recipe).spec
        settings: dict[str, Any] = {name: getattr(self, name) for name in _OF_AUDIT} | {
            "niah_lengths": [self.length],
            "niah_n": self.n,
            "control_n": 1,
            "induction_length": self.length,
            "induction_n": min(self.n, MOST_INDUCTION),
            "mqar_n": 0,
            "repeated_n": 1,
            "recipes": [recipe],
            "sweep_length": self.length,
            "ablation_recipe": recipe,
        }
        return from_plain(settings, AuditConfig)

    @property
    def search(self) -> Search:
        """The sets of heads that `--hybrid` tries."""
        return Search(self.keep, self.draws, self.max_loss, self.rank, self.max_state)

    def default_folder(self) -> Path:
        named = slug(f"{Path(self.model).name[-40:]}-{self.recipe[-30:]}")
        # A text that has changed is another check, and not one with other inputs than it had.
        asked = {"settings": to_plain(self), "files": list(self.files.items())}
        return FOLDER / f"{named}-{config_hash(asked)[:8]}"


def smoke(config: CheckConfig) -> CheckConfig:
    """A check of two prompts, which only shows that everything runs."""
    return dataclasses.replace(config, n=2, length=64)
