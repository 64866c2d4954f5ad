"""What attribution graphs are made of: models, their transcoders, prompts, labels; all checked."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.judge import check_judge, judge_inputs
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.run.finished import file_inputs
from lm_jax.run.identity import difference
from lm_jax.study import Opened
from lm_jax.text import corpora
from lm_jax.weights.load import identities
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.circuits.source_model import SourceModel, open_identity
from sparse_jax.graphs import neurons
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.neurons import Neurons
from sparse_jax.graphs.replacement import check
from sparse_jax.studies.graphs import prompts as prompt_files
from sparse_jax.studies.graphs.labels import Labels, read_labels
from sparse_jax.studies.graphs.prompts import FINDINGS, EncodedPrompt, Prompt
from sparse_jax.studies.graphs.results import ComparedPrompt, ModelFacts
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig, labels_field
from sparse_jax.transcoders import files, fit
from sparse_jax.transcoders.transcoder import Transcoder

# Tokens of a row of the text on which a transcoder is tried.
_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class GraphModel:
    """A model with the features that stand for its MLPs: those of a transcoder, or its neurons."""

    facts: ModelFacts
    source: SourceModel
    features: Features


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a command reads.

    Attributes:
      models: model of each role.
      prompts: the same for all models.
      prompts_sha256: digest of the prompts.
      compared: prompts, with whether each counts in the comparison of two models.
      labels: labels of features, by role.
    """

    models: Mapping[str, GraphModel]
    prompts: tuple[EncodedPrompt, ...]
    prompts_sha256: str
    labels: Mapping[str, Labels]
    compared: tuple[ComparedPrompt, ...] = ()


def open_inputs(config: GraphConfig) -> Opened:
    """The identities of all inputs; they are read where the graphs have not been made.

    Raises:
      UsageError, BadInputError, CorruptError: as `identify` and `read`.
    """
    return Opened(identify(config), load=functools.partial(read, config))


def read(config: GraphConfig) -> Inputs:
    """Reads and checks all inputs; nothing is written.

    Raises:
      UsageError: no model or prompt is named, or models, transcoders and prompts do not go
        together.
      BadInputError: a file cannot be used.
      CorruptError: a file is damaged.
    """
    wanted = _wanted_prompts(config)
    models = {
        role: _load_neurons(role, source)
        if config.neurons
        else _load(role, source, transcoder, config, [each.prompt for each in wanted])
        for role, (source, transcoder) in config.sources.items()
    }
    tokenizers = {each.source.tokenizer.sha256 for each in models.values()}
    if len(tokenizers) > 1:
        raise UsageError(
            f"{' and '.join(f'--{role}' for role in models)} have different tokenizers, so that "
            "their prompts cannot be compared; give models of one tokenizer"
        )
    tokenizer = next(iter(models.values())).source.tokenizer
    longest = min(each.source.model.cfg.max_length for each in models.values())
    encoded = prompt_files.encode(wanted, tokenizer, max_length=longest)
    for each in models.values():
        for prompt in encoded:
            check(each.source.model, each.features, np.asarray(prompt.ids))
        # Some neuron is always active.
        if not config.neurons:
            _check_active(each, encoded)
    corpus = config.corpus
    if corpus.source:
        # Before the graphs, which take longer.
        options = {"unit": corpus.unit, "words": corpus.words, "field": corpus.field}
        next(iter(corpora.documents(corpus.source, **options)), None)
    files_of_labels = {role: getattr(config, labels_field(role)) for role in models}
    labels = {role: read_labels(file) if file else {} for role, file in files_of_labels.items()}
    check_judge(config.judge)
    compared: tuple[ComparedPrompt, ...] = ()
    if tuple(models) == COMPARED:
        encoded, compared = choose_targets(models, encoded)
    return Inputs(models, tuple(encoded), prompt_files.digest(wanted), labels, compared)


def choose_targets(
    models: Mapping[str, GraphModel], prompts: Sequence[EncodedPrompt]
) -> tuple[list[EncodedPrompt], tuple[ComparedPrompt, ...]]:
    """Prompts that all models answer rightly, with one target; why the others do not count.

    The target is the right answer that the models together find most probable: that of the largest
    product of their probabilities. Prompts that do not count keep their own targets.
    """
    logp = {role: _next_log_probabilities(each, prompts) for role, each in models.items()}
    piece = next(iter(models.values())).source.tokenizer.piece
    chosen, compared = [], []
    for b, prompt in enumerate(prompts):
        first = {role: int(logp_BV[b].argmax()) for role, logp_BV in logp.items()}
        answers = {role: piece(token) for role, token in first.items()}
        wrong = [
            f"{role} answers {answers[role]!r}"
            for role, token in first.items()
            if token not in prompt.right
        ]
        target, why = "", " and ".join(wrong)
        if not prompt.right:
            why = "it has no right answer of one token (answers in the file of prompts)"
        if not why:
            total_V = np.sum([logp_BV[b] for logp_BV in logp.values()], 0)
            best = max(prompt.right, key=lambda token: total_V[token])
            target = piece(best)
            prompt = dataclasses.replace(prompt, targets=(best,))
        chosen.append(prompt)
        compared.append(ComparedPrompt(prompt.slug, answers, target, why))
    return chosen, tuple(compared)


def _next_log_probabilities(model: GraphModel, prompts: Sequence[EncodedPrompt]) -> np.ndarray:
    """Log-probabilities of the token after each prompt by the model itself, `[B, V]`."""
    tokens_BT, valid_BT = _pad([each.ids for each in prompts])
    last_B1 = valid_BT.sum(1, keepdims=True) - 1
    logits = _forward_at(model.source.model, tokens_BT, valid_BT, last_B1)
    return np.asarray(jax.nn.log_softmax(logits[:, 0].astype(jnp.float32)))


@exact_jit
def _forward_at(model, tokens_BT, valid_BT, at_B1):
    return model.forward(tokens_BT, valid_BT, logits_at=at_B1).logits


def _pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all rows, padded on the right, and where they are no padding."""
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    valid_BT = np.zeros(tokens_BT.shape, bool)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)], valid_BT[b, : len(row)] = row, True
    return tokens_BT, valid_BT


def identify(config: GraphConfig) -> dict[str, str]:
    """The models, transcoders and files of a command, without loading them.

    Raises:
      BadInputError, CorruptError: a model cannot be used.
    """
    sources = {f"models {role}": source for role, (source, _) in config.sources.items()}
    return {
        **identities(sources, open_identity),
        **{
            f"transcoders {role}": files.identity(folder).text
            for role, (_, folder) in config.sources.items()
            if folder and files.resolve(folder).is_dir()
        },
        "prompts": prompt_files.digest(_wanted_prompts(config)),
        **corpora.corpus_inputs({"config.corpus": config.corpus.source}),
        **file_inputs(
            {f"labels {role}": getattr(config, labels_field(role)) for role in config.sources}
        ),
        **judge_inputs(config.judge),
    }


def _wanted_prompts(config: GraphConfig) -> tuple[Prompt, ...]:
    own = tuple(Prompt(text, config.targets, against=config.against) for text in config.prompts)
    of_file = config.prompt_file
    if not own and not of_file:
        if tuple(config.sources) != COMPARED:
            raise UsageError("there is no prompt; give --prompt=TEXT or --prompts=FILE.jsonl")
        of_file = FINDINGS
    return own + (prompt_files.read_prompts(of_file) if of_file else ())


def _load_neurons(role: str, source: str) -> GraphModel:
    model = SourceModel.load(source)
    facts = dataclasses.replace(
        _facts(role, source, model), kind=neurons.KIND, features=model.model.cfg.mlp_size
    )
    return GraphModel(facts, model, Neurons.of(model.model))


def _facts(role: str, source: str, model: SourceModel) -> ModelFacts:
    """The facts of a model without a transcoder."""
    cfg = model.model.cfg
    return ModelFacts(
        role=role,
        source=source,
        sha256=model.sha256,
        family=cfg.family,
        layers=cfg.num_layers,
        heads=cfg.num_heads,
        gated=model.model.gates is not None,
        transcoder="",
        transcoder_sha256="",
        same_model=True,
        kind="",
        features=0,
        window=None,
    )


def _load(
    role: str, source: str, folder: str, config: GraphConfig, prompts: Sequence[str]
) -> GraphModel:
    flag = "--transcoder" if role not in COMPARED else f"--{role}_transcoder"
    as_read, origin = files.load(folder)
    transcoder = as_read
    if config.skip_start >= 0:
        transcoder = dataclasses.replace(transcoder, skip_start=config.skip_start)
    model = SourceModel.load(source)
    transcoder = transcoder.for_model(model.model.params, model.model.cfg)
    recorded = origin.model_sha256
    if recorded and (change := difference(recorded, model.identity.text, where=folder)):
        raise BadInputError(
            f"{flag}={folder} is of {origin.model_name}, and {source} is another model, with "
            f"{change}; give a transcoder that was trained on this model"
        )
    if not _can_write(transcoder):
        raise BadInputError(
            f"{flag}={folder}: all decoders are zero, so that no feature writes anything; give an "
            "earlier checkpoint"
        )
    transcoder.check(model.model.cfg)
    tried = _NOT_TRIED
    if not recorded:
        tried = _tried(f"{flag}={folder}", model, as_read, transcoder, config, prompts)
    facts = dataclasses.replace(
        _facts(role, source, model),
        transcoder=folder,
        transcoder_sha256=files.identity(folder).text,
        same_model=bool(origin.model_sha256),
        kind=transcoder.cfg.kind,
        features=transcoder.cfg.features,
        window=transcoder.cfg.window,
        skip_start=transcoder.skip_start,
        unexplained=tuple(map(float, tried.unexplained_L)),
        active=tuple(map(float, tried.active_L)),
        active_first=tuple(map(float, tried.active_first_L)),
    )
    return GraphModel(facts, model, transcoder)


_NOT_TRIED = fit.Fit(*(np.zeros(0),) * 3)


def _tried(
    what: str,
    model: SourceModel,
    as_read: Transcoder,
    transcoder: Transcoder,
    config: GraphConfig,
    prompts: Sequence[str],
) -> fit.Fit:
    """How a transcoder fits that does not say whose it is; or `_NOT_TRIED`.

    Raises:
      BadInputError: it leaves out nearly all, or there is too little text to say.
    """
    tokens_BT, valid_BT = _text(config, model, prompts)
    try:
        found = fit.measured(model.model, transcoder, tokens_BT, valid_BT)
    except UsageError as error:
        if config.unknown_origin:
            return _NOT_TRIED
        raise BadInputError(
            f"{what} does not say of which model it is, and there is too little text to try it on "
            f"({error}); name a text by --config.corpus.source, or add --unknown_origin"
        ) from error
    left_L = found.unexplained_L
    if fit.is_wrong(left_L) and not config.unknown_origin:
        others = _other_readings(model.model, as_read, tokens_BT, valid_BT)
        raise BadInputError(
            f"{what} does not say of which model it is, and leaves out {_percent(left_L)} of the "
            f"variance of MLP outputs of {model.name} on {int(valid_BT.sum()):,} tokens, so that "
            f"it is of another model or read wrongly; other readings leave out {others}; give the "
            "model's own, or add --unknown_origin"
        )
    return found


def _text(
    config: GraphConfig, model: SourceModel, prompts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Some 2,000 tokens of the corpus, or else the prompts, and where they are no padding."""
    corpus, texts = config.corpus, iter(prompts)
    if corpus.source:
        options = {"unit": corpus.unit, "words": corpus.words, "field": corpus.field}
        documents = corpora.documents(corpus.source, **options)
        # Those that are no UTF-8 are bytes.
        texts = (text for _, text in documents if isinstance(text, str))
    width, rows, count = min(_WIDTH, model.model.cfg.max_length), [], 0
    for text in texts:
        row = model.tokenizer.encode(text)[:width]
        if row:
            rows.append(row)
            count += len(row)
        if count >= fit.TOKENS:
            break
    return _pad(rows or [[0]])


def _other_readings(
    model: CircuitModel, transcoder: Transcoder, tokens_BT: np.ndarray, valid_BT: np.ndarray
) -> str:
    parts = []
    for name, other in fit.mistakes(transcoder, model):
        try:
            bound = other.for_model(model.params, model.cfg)
        except UsageError:
            parts.append(f"nothing that could be said ({name}, which this model does not have)")
            continue
        left_L = fit.unexplained(model, bound, tokens_BT, valid_BT)
        parts.append(f"{_percent(left_L)} ({name})")
    return ", ".join(parts)


def _percent(share_L: np.ndarray) -> str:
    """The range over layers, in words."""
    ends = dict.fromkeys(f"{100 * end:.3g}" for end in (share_L.min(), share_L.max()))
    return f"{' to '.join(ends)} %"


def _check_active(model: GraphModel, prompts: Sequence[EncodedPrompt]) -> None:
    """Raises where no feature is active on a prompt; one run for all, padded on the right."""
    tokens_BT, valid_BT = _pad([each.ids for each in prompts])
    active_B = np.asarray(_active(model.source.model, model.features, tokens_BT, valid_BT))
    for each, active in zip(prompts, active_B, strict=True):
        if not active:
            raise UsageError(
                f"transcoder: none of the features of {model.facts.transcoder} is active on "
                f"{each.text!r}; give a longer prompt or a transcoder with live features"
            )


@exact_jit
def _active(model, transcoder, tokens_BT, valid_BT):
    site = transcoder.site
    input_LBTD = model.forward(tokens_BT, valid_BT, record={site: keep}).records[site]
    L, B, T, D = input_LBTD.shape
    feature_LXF = transcoder.encode(input_LBTD.reshape(L, B * T, D).astype(jnp.float32))
    any_LBT = (feature_LXF != 0).any(-1).reshape(L, B, T)
    counted_BT = valid_BT & (jnp.arange(T) >= transcoder.skip_start)[None]
    return (any_LBT & counted_BT[None]).any((0, 2))


def _can_write(transcoder: Transcoder) -> bool:
    return bool(jnp.any(transcoder.decoder_norms() > 0))
