"""What a folder of a model holds for the Hugging Face hub: its kind, its files and its model card.

The card is rendered from the folder's own numbers (`summary.json`, `export.json`, `sparse.json`,
`transcoder.json` or `result.json`), and for a published model from `results/` of a checkout too.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from pathlib import Path
import re
from typing import Any

import yaml

from lm_jax.assets import published
from lm_jax.errors import BadInputError
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.run.finished import is_finished
from lm_jax.run.results import load_result
from lm_jax.run.stored_results import list_results, load_stored
from lm_jax.weights import card as cards
from lm_jax.weights import hub
from lm_jax.weights.load import open_pretrained
from lm_jax.weights.runs import is_run
from lm_jax.weights.safetensors import CONFIG

_LIBRARY = "interpretable-attention-jax"
_RESULT = "result.json"
_MODEL, _TRANSCODER = "model", "transcoder"
# The settings of a transcoder, in the layout of circuit-tracer.
_LAYOUT = "config.yaml"
# Numbers of a stored result that a card shows.
_SHOWN = 6
_NOT_MEASURED = re.compile(r"(settings|config|version|schema|device|model)\b")
_UNPACKED = 'snapshot_download("ORG/NAME")` of `huggingface_hub`'


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A folder that can be uploaded.

    Attributes:
      folder: folder of the files.
      files: paths of the files in it, without the card.
      body: model card without its front matter, in Markdown.
      library: name of the library that loads it, as the hub has it.
      tags: tags of the hub.
      text_generation: whether the hub may run it as a language model.
    """

    folder: Path
    files: tuple[str, ...]
    body: str
    library: str
    tags: tuple[str, ...]
    text_generation: bool = False


def describe(named: str) -> HubModel:
    """What a folder holds; the files of a model are compared with its manifest where it has one.

    Args:
      named: folder of a model or a transcoder, work folder of a training that has one, or name of
        a published model.

    Raises:
      BadInputError: it holds nothing that can be uploaded, no safetensors, or a training that has
        not finished.
      CorruptError: a file is damaged.
    """
    folder = _whole(published.resolve_model(named))
    if is_run(folder):
        model = _protot(folder)
    elif (folder / hub.GATES).is_file():
        model = _sparse(folder)
    elif (folder / _LAYOUT).is_file():
        model = _transcoder(folder)
    elif (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
        model = _dense(folder)
    else:
        raise BadInputError(
            f"{folder} holds no safetensors of a model or a transcoder{published.hint(named)}; "
            "name an export of iaj protot export, a folder that iaj sparse posttrain, pair or "
            "transcoder exported, or a Hugging Face folder"
        )
    return dataclasses.replace(model, body=model.body + _measured(named))


def front_matter(model: HubModel, *, licence: str, base_model: str | None) -> str:
    """The YAML at the beginning of a card, which the hub reads."""
    fields: dict[str, Any] = {"license": licence, "library_name": model.library}
    if base_model:
        fields["base_model"] = base_model
    if model.text_generation:
        fields["pipeline_tag"] = "text-generation"
    fields["tags"] = list(model.tags)
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _whole(folder: Path) -> Path:
    """The folder itself, or that of what a training in it exported.

    Raises:
      BadInputError: the training has not finished.
    """
    inside = ((_MODEL, CONFIG), (_TRANSCODER, _LAYOUT))
    name = next((name for name, file in inside if (folder / name / file).is_file()), None)
    if name is None:
        return folder
    if not is_finished(folder) and not (folder / _RESULT).is_file():
        raise BadInputError(f"{folder} has not finished; start its command again, so that it ends")
    return folder / name


def _files(folder: Path, *patterns: str) -> tuple[str, ...]:
    """The files of these patterns, and of licences: no pickles, nothing that names a machine."""
    wanted = (*patterns, "LICENSE*", "NOTICE*")
    found = {file.name for each in wanted for file in folder.glob(each) if file.is_file()}
    return tuple(sorted(found))


def _protot(folder: Path) -> HubModel:
    from protot_jax.training import card, exported
    from protot_jax.training.config import PretrainConfig
    from protot_jax.training.results import PretrainSummary

    if not exported.is_exported(folder):
        raise BadInputError(
            f"{folder} is a run, not an exported model; export it first: "
            f"iaj protot export --run={folder} --workdir=FOLDER"
        )
    manifest = exported.verify(folder)
    which = "best" if manifest["step"] == manifest["best_step"] else "last"
    config = from_plain(read_json(folder / CONFIG), PretrainConfig)
    summary = load_result(folder / "summary.json", PretrainSummary)
    body = card.card(config, summary, exported=which)
    body += f"\nFrom the hub, THIS_FOLDER is what `{_UNPACKED} returns.\n"
    files = (*manifest["files"], exported.FORMAT.name)
    kept = tuple(file for file in files if file != cards.CARD)
    return HubModel(folder, kept, body, _LIBRARY, ("jax", "interpretability", summary.model))


def _sparse(folder: Path) -> HubModel:
    from sparse_jax.gates import model

    body = model.verified_card(folder)
    body += f"\nFrom the hub, this folder is what `{_UNPACKED} returns.\n"
    tags = ("jax", "interpretability", "sparse-attention")
    return HubModel(folder, _files(folder, *hub.FILES), body, _LIBRARY, tags)


_LATER = "and writes into the outputs of its own and later ones."


def _transcoder(folder: Path) -> HubModel:
    from sparse_jax.transcoders import files

    transcoder, origin = files.load(folder)
    cfg = transcoder.cfg
    facts = {
        "model": cards.portable(origin.model_name),
        "layers": cfg.num_layers,
        "features a layer": cfg.features,
        "width": cfg.hidden_size,
        "activation": cfg.kind,
        "writes into": {None: "all later layers", 1: "its own layer"}.get(
            cfg.window, f"{cfg.window} layers"
        ),
        "identity of the model": origin.model_sha256 or "not recorded",
    }
    body = cards.card(
        "Transcoders of each layer" if cfg.window == 1 else "A cross-layer transcoder",
        "Sparse features in place of the MLPs of a language model: each reads the input of an MLP "
        + ("and writes into its output." if cfg.window == 1 else _LATER),
        facts | dict(origin.numbers),
        "Load it with `sparse_jax.transcoders.load(folder)`, or give its folder to "
        f"`iaj sparse graph --transcoder=`; the folder is what `{_UNPACKED} returns. The layout is "
        "that of circuit-tracer 0.4. It stands for the MLPs of the model above and of no other.",
    )
    tags = ("jax", "interpretability", "transcoder", "circuit-tracer")
    kept = _files(folder, "*.safetensors", files.CONFIG, files.NOTE)
    return HubModel(folder, kept, body, _LIBRARY, tags)


def _dense(folder: Path) -> HubModel:
    cfg = open_pretrained(folder).cfg
    file, result = folder / cards.CARD, folder.parent / _RESULT
    if file.is_file():
        body = cards.without_front_matter(file.read_text("utf-8"))
    else:
        numbers = read_json(result) if result.is_file() and folder.name == _MODEL else {}
        facts = {
            "family": cfg.family,
            "layers": cfg.num_layers,
            "heads a layer": cfg.num_heads,
            "width": cfg.hidden_size,
            "vocabulary": cfg.vocab_size,
            **dict(_numbers(numbers)),
        }
        body = cards.card(
            "A language model",
            f"A decoder of the family {cfg.family}, exported by {_LIBRARY}.",
            facts,
            'Load it with `transformers` or `lm_jax.load_pretrained("ORG/NAME", download=True)`.',
        )
    tags = ("jax", "interpretability")
    kept = _files(folder, *hub.FILES)
    return HubModel(folder, kept, body, "transformers", tags, text_generation=True)


def _numbers(tree: Mapping[str, Any], about: str = "") -> Iterator[tuple[str, int | float]]:
    """Numbers that are in no list, by their names; times of the machine are left out."""
    for key, value in tree.items():
        name = f"{about}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}, ")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "seconds":
            yield name, value


def _measured(named: str) -> str:
    """The end of a published model's card: its licence, and what `results/` of the checkout has."""
    if named not in published.names():
        return ""
    root = Path(published.__file__).parents[2] / "results"
    entry = published.entry(named)
    of_model = re.compile(rf"(?<![\w/-])({re.escape(entry.home)}|{re.escape(entry.name)})(?![\w-])")
    rows = []
    for name in list_results(root):
        about = load_stored(root, name).description
        command = about.reproduce.command if about.reproduce else ""
        if about.folder == entry.home or of_model.search(command):
            rows.append(
                (cards.shown(about.title), f"`iaj reproduce {name}`", _headline(root, name))
            )
    licence = f"\nLicence: {entry.licence}.\n"
    if not rows:
        return licence
    lines = [("measured", "measure it again", "numbers"), ("---",) * 3, *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{licence}\n## Measured\n\n{table}\n"


def _headline(root: Path, name: str) -> str:
    """The first numbers of a stored result, or where its tables are."""
    summary = load_stored(root, name).summary()
    tree = {key: x for key, x in summary.items() if not _NOT_MEASURED.match(key)}
    numbers = list(_numbers(tree))[:_SHOWN]
    return "; ".join(f"{about} {cards.shown(x)}" for about, x in numbers) or f"`results/{name}`"
