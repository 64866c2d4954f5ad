"""Collected gates are those of the model on the beginning of each document; files are whole."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import BadInputError
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import prepare
from lm_jax.text.prepared import open_prepared
import protot_jax
from protot_jax.studies.concepts import collect, examples
from tests import rounding
from tests.protot_jax.studies.concepts import stored


@pytest.fixture(scope="module")
def model(run):
    return protot_jax.load_run(run)


def split_examples(run, length=16, split="validation"):
    return Examples(open_prepared(run / "data"), split, context=length - 1)


@pytest.fixture(scope="module")
def collected(run, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("activations") / collect.ACTIVATIONS
    return collect.collect(model, split_examples(run), path, texts=11, batch_size=4), path


def test_gates_and_losses_are_those_of_a_text_by_itself(run, model, collected):
    texts, path = collected
    assert len(texts.document_N) == 11
    rows = split_examples(run).read(np.arange(11))["tokens"]
    np.testing.assert_array_equal(texts.token_NT, rows)
    kept = stored.gates(path, texts, model.cfg.num_layers)
    # The last text is in a batch that had to be filled up.
    for text in (0, 10):
        ids = rows[text][rows[text] != 0]
        wanted = stored.expected(model, ids[None])
        loss_BT = texts.loss_NT[text, 1 : len(ids)][None]
        gates = {gate: x[:, text, : len(ids)][:, None] for gate, x in kept.items()}
        rounding.assert_within((loss_BT, gates), wanted)
        assert not any(x[:, text, len(ids) :].any() for x in kept.values())
        loss_mask_BT = texts.token_mask_NT[text, 1 : len(ids)][None]
        of_counted = stored.perplexity(*(each[0][loss_mask_BT] for each in wanted))
        rounding.assert_within(texts.perplexity(text), of_counted)


def test_the_first_layer_goes_by_the_token_alone(model, collected):
    texts, path = collected
    gate_NTR = collect.gates_of_layer(path, texts, "write", 0)
    token_M, place_M = np.unique(texts.token_NT[texts.read_NT], return_inverse=True)
    assert np.bincount(place_M).max() > 1
    of_tokens = stored.expected(model, token_M[:, None])
    gate_MR, bound_MR = (gates["write"][0, :, 0] for _, gates in of_tokens)
    wanted = rounding.Expected(gate_MR[place_M], bound_MR[place_M])
    rounding.assert_within(gate_NTR[texts.read_NT], wanted)


def test_the_file_has_a_row_for_every_token(model, collected):
    texts, path = collected
    table = pq.read_table(path)
    assert table.num_rows == int(texts.read_NT.sum())
    text, position = (table[name].to_numpy() for name in ("text", "position"))
    np.testing.assert_array_equal(table["token"].to_numpy(), texts.token_NT[text, position])
    np.testing.assert_array_equal(table["document"].to_numpy(), texts.document_N[text])
    np.testing.assert_array_equal(table["loss"].is_null(), position == 0)
    marks = table["mark"].to_numpy()
    np.testing.assert_array_equal(marks, texts.token_NT[text, position] == model.tokenizer.bos_id)
    assert table.schema.field("write_1").type.list_size == 4


def test_marks_and_padding_do_not_count_and_short_documents_are_left_out(run, model, tmp_path):
    documents = ["the house", "the house of the river", "a town and its people"]
    # The shares send each to a split by its hash; all go to the first.
    prepare(
        ((name, name) for name in documents),
        model.tokenizer,
        tmp_path / "data",
        splits=(1.0, 0.0, 0.0),
        seed=0,
    )
    few = Examples(open_prepared(tmp_path / "data"), "train", context=31)
    texts = collect.collect(model, few, tmp_path / "a.parquet", texts=9, batch_size=2)
    words = [
        "".join(examples.words(model.tokenizer, ids[counted]).words)
        for ids, counted in zip(texts.token_NT, texts.token_mask_NT, strict=True)
    ]
    assert words == documents[1:]
    assert texts.document_N.tolist() == [1, 2]
    # `<bos>` before, `<eos>` and `<eot>` behind.
    assert (texts.read_NT.sum(1) - texts.token_mask_NT.sum(1)).tolist() == [3, 3]

    shorter = Examples(open_prepared(tmp_path / "data"), "train", context=31, limit=1)
    with pytest.raises(BadInputError, match="no document of train has 5 tokens"):
        collect.collect(model, shorter, tmp_path / "b.parquet", texts=9, batch_size=2)
    assert [file.name for file in tmp_path.glob("*parquet*")] == ["a.parquet"]


def test_words_concatenate_to_the_text_and_tokens_have_their_words(model):
    ids = model.tokenizer.encode("the people of a river town", add_special_tokens=False)
    split = examples.words(model.tokenizer, ids)
    assert split.words == ("the", " people", " of", " a", " river", " town")
    joined = [
        "".join(token for token, of in zip(split.tokens, split.word_of, strict=True) if of == word)
        for word in range(6)
    ]
    assert joined == [word.strip() for word in split.words]
    gate_T = np.arange(len(ids), dtype=float)
    means = [np.mean(gate_T[np.array(split.word_of) == word]) for word in range(6)]
    assert split.means(gate_T) == pytest.approx(means)
