"""Makes the graphs of all models and prompts, then what is told of them together.

Besides what every study has, the work folder holds

    graph/<name>.json, graph/graph-metadata.json    graphs for this page, Neuronpedia and
                                                    circuit-tracer (`graph_json`)
    features/<model>/<number>.json                  texts and logits of each shown feature
    pieces/<name>.json    numbers of each graph (`results.GraphResult`)
    proposals/<name>.json proposed supernodes of each graph: a label, then ids of nodes
    masses.parquet        mean cumulative masses of all graphs
    data/                 the prepared corpus of those texts
    labels_<model>.json   labels of shown features, as `--labels` or `--<model>_labels` takes them
    answers.jsonl         answers of a local judge, so that none is asked for again
    graph/<name>.html     the viewer of each graph, one offline file

`report.html` is the viewer of a single graph, else the page of all. Names are the slugs of the
prompts, after the role where two models are compared.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa

from lm_jax import report
from lm_jax.evaluate.judge import Judge, build_judge
from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import make_folder, to_jsonable, write_json
from lm_jax.run.provenance import read_provenance
from lm_jax.run.results import load_result
from lm_jax.run.rows import Unit
from lm_jax.study import Work
from lm_jax.text.preparation import prepare_corpus
from lm_jax.weights import hub
from sparse_jax.graphs import features, graph_json, supernodes
from sparse_jax.graphs.features import FeatureData
from sparse_jax.studies.graphs import labels, numbers, page
from sparse_jax.studies.graphs.inputs import Inputs
from sparse_jax.studies.graphs.piece import GRAPHS, file_name, make_graph, scan
from sparse_jax.studies.graphs.prompts import EncodedPrompt
from sparse_jax.studies.graphs.results import (
    FEATURES,
    PROPOSALS,
    FeatureCorpus,
    GraphResult,
    GraphSummary,
    proposals_file,
)
from sparse_jax.studies.graphs.settings import GraphConfig

METADATA, PIECES, DATA = "graph-metadata.json", "pieces", "data"
ANSWERS = "answers.jsonl"
SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("slug", pa.string()),
        ("component", pa.string()),
        ("sign", pa.string()),
        ("positions", pa.string()),
        ("edges", pa.int64()),
        ("unmediated", pa.int64()),
        ("needed", pa.float64()),
        ("mass", pa.list_(pa.float64())),
    ]
)
# Of rows, whose meaning may change with the program.
_FORMAT = 4


def measure(config: GraphConfig, work: Work) -> GraphSummary:
    """Makes the graphs that have not been made, and the pages of all; returns the summary.

    Raises:
      BadInputError: the corpus cannot be used.
      StoppedError: on a signal, after the graph that was under way.
    """
    inputs, folder = work.loaded, work.path
    first = next(iter(inputs.models.values()))
    work.record(data=_digests(inputs), tokenizer=first.source.tokenizer.sha256)
    graphs: dict[Unit, tuple[str, EncodedPrompt]] = {
        (role, prompt.slug): (role, prompt) for role in inputs.models for prompt in inputs.prompts
    }
    decided_by = fingerprint(
        config,
        {role: each.source.identity.text for role, each in inputs.models.items()},
        {role: each.facts.transcoder_sha256 for role, each in inputs.models.items()},
        inputs.prompts_sha256,
    )
    # Graphs of other models or settings are never in one table, not even by force.
    table = dataclasses.replace(work, fingerprint=decided_by).units(
        "masses",
        SCHEMA,
        graphs,
        lambda one: make_piece(config, folder, inputs, *one),
        label=lambda one: f"{one[0]} on {one[1].slug}",
        task="graphs",
        noun="graphs",
    )
    results = tuple(
        load_result(folder / PIECES / f"{file_name(role, prompt.slug)}.json", GraphResult)
        for role, prompt in graphs.values()
    )
    documents = {each.file: graph_json.read(folder / each.file) for each in results}
    metadata = [each["metadata"] for each in documents.values()]
    write_json(folder / GRAPHS / METADATA, {"graphs": metadata})
    judge = build_judge(config.judge, answers=folder / ANSWERS)
    corpora = tuple(
        _describe(
            config,
            folder,
            inputs,
            role,
            {each.file: documents[each.file] for each in results if each.role == role},
            judge,
        )
        for role in inputs.models
    )
    provenance = report.facts(to_jsonable(read_provenance(folder)))
    for each in results:
        page.write(folder, each.file, provenance)
    return numbers.summarise(
        config,
        tuple(each.facts for each in inputs.models.values()),
        results,
        corpora,
        table,
        prompts_sha256=inputs.prompts_sha256,
        compared=inputs.compared,
        device=jax.devices()[0].device_kind,
    )


def fingerprint(
    config: GraphConfig,
    models: Mapping[str, str],
    transcoders: Mapping[str, str],
    prompts_sha256: str,
) -> str:
    """Hash of what decides the graphs.

    Labels are added last, so changing them does not recompute graphs.

    Args:
      config: settings.
      models: identities of the models, by role.
      transcoders: identities of the transcoders, by role; "" of neurons.
      prompts_sha256: digest of the prompts with their targets.
    """
    unlabelled = dataclasses.replace(
        config, labels="", dense_labels="", sparse_labels="", judge="null"
    )
    plain = to_plain(unlabelled)
    # The prompts' digest has it.
    plain.pop("against", None)
    return config_hash(
        {
            "format": _FORMAT,
            "config": plain,
            "models": models,
            "transcoders": transcoders,
            "prompts": prompts_sha256,
        }
    )


def _digests(inputs: Inputs) -> dict[str, str]:
    """Models with their revisions, transcoders and prompts, for the provenance."""
    digests = {"prompts": inputs.prompts_sha256}
    for role, model in inputs.models.items():
        if model.facts.transcoder_sha256:
            digests[f"transcoders {role}"] = model.facts.transcoder_sha256
        source = model.source
        digests |= hub.identity(f"models {role}", source.identity.text, source.revision)
    return digests


def _describe(
    config: GraphConfig,
    folder: Path,
    inputs: Inputs,
    role: str,
    documents: Mapping[str, dict[str, Any]],
    judge: Judge,
) -> FeatureCorpus:
    """Writes texts and labels of the features of a model, and proposes supernodes of its graphs.

    Args:
      config: settings.
      folder: work folder.
      inputs: models and labels.
      role: role of the model.
      documents: graphs of the model, by their files.
      judge: judge that names features without a label.
    """
    corpus, data = collect_features(config, folder, inputs, role, list(documents.values()))
    shown = {key: text for key, text in inputs.labels[role].items() if key in data}
    shown |= labels.judged(judge, data, shown, labels.negative(documents.values()))
    write_json(folder / f"labels_{role}.json", labels.to_json(shown))
    decoders = features.decoders(inputs.models[role].features, list(data))
    make_folder(folder / PROPOSALS)
    for file, document in documents.items():
        labelled = labels.labelled(document, shown)
        graph_json.write(folder / file, labelled)
        write_json(folder / proposals_file(file), supernodes.propose(labelled, decoders=decoders))
    return dataclasses.replace(corpus, labelled=len(shown), judge=judge.name)


def make_piece(
    config: GraphConfig, folder: Path, inputs: Inputs, role: str, prompt: EncodedPrompt
) -> pa.Table:
    """Makes one graph and writes its files; returns its rows."""
    name = file_name(role, prompt.slug)
    result, document, masses = make_graph(config, inputs, role, prompt)
    for part in (GRAPHS, PIECES):
        make_folder(folder / part)
    graph_json.write(folder / GRAPHS / f"{name}.json", document)
    write_json(folder / PIECES / f"{name}.json", result)
    # Columns of the schema are fields of `Mass`, but for the mass itself.
    rows = [
        {"role": role, "slug": prompt.slug, "mass": each.mass_C.tolist(), **vars(each)}
        for each in masses
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def collect_features(
    config: GraphConfig,
    folder: Path,
    inputs: Inputs,
    role: str,
    documents: Sequence[dict[str, Any]],
) -> tuple[FeatureCorpus, dict[features.Feature, FeatureData]]:
    """Texts and logits of all features that graphs of a model show; written as files too."""
    model = inputs.models[role]
    nodes = (node for document in documents for node in document["nodes"])
    shown = sorted({key for node in nodes if (key := graph_json.feature_of(node))})
    prepared = None
    if config.corpus.source and shown:
        prepared = prepare_corpus(folder / DATA, config.text, tokenizer=model.source.tokenizer)
    data = features.collect(
        model.source,
        model.features,
        shown,
        prepared,
        context=min(config.context, model.source.model.cfg.max_length),
        examples=config.examples,
    )
    features.write(folder / FEATURES, data, scan=scan(model))
    if prepared is None:
        return FeatureCorpus(role, len(data), 0, "", "", 0, 0, ""), data
    corpus = FeatureCorpus(
        role,
        features=len(data),
        silent=sum(not each.frequency for each in data.values()),
        source=config.corpus.source,
        sha256=prepared.manifest["documents_sha256"],
        tokens=prepared.manifest["splits"]["train"]["tokens"],
        labelled=0,
        judge="",
    )
    return corpus, data
