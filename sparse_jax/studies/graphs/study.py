"""Makes the graphs of all models and prompts, then the summary and the pages.

The work folder then holds

    graph/<name>.json, graph/graph-metadata.json    graphs for this page, Neuronpedia and
                                                    circuit-tracer (`graph_json`)
    features/<model>/<number>.json                  texts and logits of each shown feature
    pieces/<name>.json    numbers of each graph (`results.GraphResult`)
    shards/               mean cumulative masses, so that a killed command resumes
    masses.parquet        all of them
    data/                 the prepared corpus of those texts
    labels_<model>.json   labels of shown features, as `--labels` or `--<model>_labels` takes them
    answers.jsonl         answers of a local judge, so that none is asked for again
    summary.json          every number (`results.GraphSummary`)
    graph/<name>.html     the viewer of each graph, one offline file
    report.html           that of a single graph, else the page of all

Names are the slugs of the prompts, after the role where two models are compared.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from lm_jax.evaluate.judge import build_judge
from lm_jax.run import progress, stop
from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import storage_error, to_jsonable, write_json, write_text
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.rows import RowStore
from lm_jax.text.preparation import prepare_corpus
from lm_jax.weights import hub
from sparse_jax.graphs import features, graph_json, supernodes
from sparse_jax.graphs.features import FeatureData
from sparse_jax.studies.graphs import comparison, labels, page, report, stability
from sparse_jax.studies.graphs.config import GraphConfig
from sparse_jax.studies.graphs.inputs import Inputs
from sparse_jax.studies.graphs.page import FeatureExamples, TopText
from sparse_jax.studies.graphs.piece import GRAPHS, file_name, make_graph, scan
from sparse_jax.studies.graphs.prompts import EncodedPrompt
from sparse_jax.studies.graphs.results import FeatureCorpus, GraphResult, GraphSummary

METADATA, PIECES, FEATURES, DATA = "graph-metadata.json", "pieces", "features", "data"
ANSWERS = "answers.jsonl"
SHARDS, MASSES, SUMMARY, REPORT = "shards", "masses.parquet", "summary.json", "report.html"
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


def run(config: GraphConfig, inputs: Inputs, folder: Path) -> GraphSummary:
    """Makes what has not been made in an open work folder; returns the summary.

    Raises:
      BadInputError: the corpus cannot be used.
      StoppedError: on a signal, after the graph that was under way.
    """
    facts = tuple(each.facts for each in inputs.models.values())
    # Labels are put in at the end, so that other ones remake no graph.
    unlabelled = dataclasses.replace(
        config, labels="", dense_labels="", sparse_labels="", judge="null"
    )
    identity = {
        "format": _FORMAT,
        "config": to_plain(unlabelled),
        "models": {role: each.source.identity.text for role, each in inputs.models.items()},
        "transcoders": {each.role: each.transcoder_sha256 for each in facts},
        "prompts": inputs.prompts_sha256,
    }
    _record(config, inputs, identity, folder)
    pieces = [(role, prompt) for role in inputs.models for prompt in inputs.prompts]
    with RowStore(folder / SHARDS, SCHEMA, config_hash(identity), flush_units=1) as store:
        done = sum((role, prompt.slug) in store for role, prompt in pieces)
        with progress.track("graphs", total=len(pieces), unit="graphs", done=done) as advance:
            for role, prompt in pieces:
                if (role, prompt.slug) not in store:
                    stop.check(f"before {role} on {prompt.slug}")
                    make_piece(config, folder, store, inputs, role, prompt)
                    advance(note=f"{role} on {prompt.slug}")
        table = store.merge(folder / MASSES)
    results = tuple(
        load_result(folder / PIECES / f"{file_name(role, prompt.slug)}.json", GraphResult)
        for role, prompt in pieces
    )
    documents = {each.file: graph_json.read(folder / each.file) for each in results}
    metadata = [each["metadata"] for each in documents.values()]
    write_json(folder / GRAPHS / METADATA, {"graphs": metadata})
    judge = build_judge(config.judge, answers=folder / ANSWERS)
    corpora, data, decoders = [], {}, {}
    for role in inputs.models:
        own = {each.file: documents[each.file] for each in results if each.role == role}
        corpus, data[role] = collect_features(config, folder, inputs, role, list(own.values()))
        shown = {key: text for key, text in inputs.labels[role].items() if key in data[role]}
        shown |= labels.judged(judge, data[role], shown, labels.negative(own.values()))
        for file, document in own.items():
            documents[file] = labels.labelled(document, shown)
            graph_json.write(folder / file, documents[file])
        write_json(folder / f"labels_{role}.json", labels.to_json(shown))
        corpora.append(dataclasses.replace(corpus, labelled=len(shown), judge=judge.name))
        decoders |= {role: features.decoders(inputs.models[role].features, list(data[role]))}
    roles = list(inputs.models)
    counted = comparison.counted(table, inputs.compared)
    summary = GraphSummary(
        config=config,
        models=facts,
        prompts_sha256=inputs.prompts_sha256,
        graphs=results,
        features=tuple(corpora),
        masses=tuple(comparison.role_masses(config, counted, roles)),
        ratios=tuple(comparison.ratios(config, counted, roles)),
        device=jax.devices()[0].device_kind,
        stability=stability.measure(config, results, roles, inputs.compared),
        compared=inputs.compared,
    )
    write_json(folder / SUMMARY, summary)
    _write_pages(folder, summary, counted, documents, data, decoders)
    return summary


def _record(config: GraphConfig, inputs: Inputs, identity: dict[str, Any], folder: Path) -> None:
    digests = {
        f"{kind} {role}": sha256
        for kind in ("models", "transcoders")
        for role, sha256 in identity[kind].items()
        if sha256
    }
    for role, model in inputs.models.items():
        name, source = f"models {role}", model.source
        digests |= hub.identity(name, source.identity.text, source.revision)
    first = next(iter(inputs.models.values()))
    entry = collect_provenance(
        seeds={"bootstrap": config.seed},
        dtype="float32",
        data=digests | {"prompts": inputs.prompts_sha256},
        tokenizer=first.source.tokenizer.sha256,
    )
    record_provenance(folder, entry)


def make_piece(
    config: GraphConfig,
    folder: Path,
    store: RowStore,
    inputs: Inputs,
    role: str,
    prompt: EncodedPrompt,
) -> None:
    """Makes one graph and stores its rows; its files are written first."""
    name = file_name(role, prompt.slug)
    result, document, masses = make_graph(config, inputs, role, prompt)
    for part in (GRAPHS, PIECES):
        try:
            (folder / part).mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(folder / part, error) from error
    graph_json.write(folder / GRAPHS / f"{name}.json", document)
    write_json(folder / PIECES / f"{name}.json", result)
    rows = [
        {
            "role": role,
            "slug": prompt.slug,
            "component": each.component,
            "sign": each.sign,
            "positions": each.positions,
            "edges": each.edges,
            "unmediated": each.unmediated,
            "needed": each.needed,
            "mass": each.mass_C.tolist(),
        }
        for each in masses
    ]
    store.append((role, prompt.slug), pa.Table.from_pylist(rows, schema=SCHEMA))


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


def _write_pages(
    folder: Path,
    summary: GraphSummary,
    table: pa.Table,
    documents: dict[str, dict[str, Any]],
    data: dict[str, dict[features.Feature, FeatureData]],
    decoders: dict[str, dict[features.Feature, np.ndarray]],
) -> None:
    """The viewer of each graph, and the page of all where there are several."""
    origin = to_jsonable(read_provenance(folder))
    for each in summary.graphs:
        text = page.build(
            documents[each.file],
            proposals=supernodes.propose(documents[each.file], decoders=decoders[each.role]),
            features={key: _shown(own) for key, own in data[each.role].items()},
            provenance=report.facts(origin),
        )
        write_text((folder / each.file).with_suffix(".html"), text)
        if len(summary.graphs) == 1:
            write_text(folder / REPORT, text)
    if len(summary.graphs) > 1:
        write_text(folder / REPORT, report.build(summary, table, provenance=origin))


def _shown(data: FeatureData) -> FeatureExamples:
    texts, lowest = (
        [TopText(each.tokens, each.activations) for each in some]
        for some in (data.examples, data.lowest)
    )
    return FeatureExamples(texts, data.top_logits, data.bottom_logits, lowest)
