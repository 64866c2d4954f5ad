"""Collected gates are those of the model on the beginning of each document, and nothing is half."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax import sites
from lm_jax.errors import BadInputError
from lm_jax.train.data import Examples
from lm_jax.train.prepare import open_prepared, prepare
import protot_jax
from protot_jax.concepts import collect, shown


@pytest.fixture(scope="module")
def model(run):
    return protot_jax.load_run(run)


def examples(run, length=16, split="validation"):
    return Examples(open_prepared(run / "data"), split, context=length - 1)


@pytest.fixture(scope="module")
def collected(run, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("activations") / collect.ACTIVATIONS
    return collect.collect(model, examples(run), path, texts=11, batch_size=4), path


def forward(model, ids):
    """Logits and both gates of one text by itself, without padding."""
    record = {"mixer.write": sites.keep, "mixer.read": sites.keep}
    out = lm_jax.forward(
        model.params, jnp.array([ids]), model.cfg, mixer=model.mixer, record=record
    )
    return out.logits[0], {
        gate: np.asarray(out.records[f"mixer.{gate}"][:, 0]) for gate in collect.GATES
    }


def test_gates_and_losses_are_those_of_a_text_by_itself(run, model, collected):
    texts, path = collected
    assert len(texts.document_N) == 11
    rows = examples(run).read(np.arange(11))["tokens"]
    np.testing.assert_array_equal(texts.token_NT, rows)
    stored = {
        (gate, layer): collect.gates_of_layer(path, texts, gate, layer)
        for gate in collect.GATES
        for layer in range(model.cfg.num_layers)
    }
    # The last text is in a batch that had to be filled up.
    for text in (0, 10):
        ids = rows[text][rows[text] != 0]
        logits_TV, gates = forward(model, ids)
        for (gate, layer), gate_NTR in stored.items():
            # Float16 has eleven bits.
            np.testing.assert_allclose(
                gate_NTR[text, : len(ids)], gates[gate][layer], rtol=2**-10, atol=1e-6
            )
            assert not gate_NTR[text, len(ids) :].any()
        log_TV = jax.nn.log_softmax(logits_TV)
        losses = [-float(log_TV[i, ids[i + 1]]) for i in range(len(ids) - 1)]
        np.testing.assert_allclose(texts.loss_NT[text, 1 : len(ids)], losses, rtol=1e-4)
        assert texts.perplexity(text) == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_the_first_layer_goes_by_the_token_alone(collected):
    texts, path = collected
    gate_NTR = collect.gates_of_layer(path, texts, "write", 0)
    for token in np.unique(texts.token_NT[texts.read_NT]):
        gate_MR = gate_NTR[texts.token_NT == token]
        np.testing.assert_allclose(gate_MR, np.broadcast_to(gate_MR[0], gate_MR.shape), rtol=2**-9)


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
        "".join(shown.words(model.tokenizer, ids[counted]).words)
        for ids, counted in zip(texts.token_NT, texts.counted_NT, strict=True)
    ]
    assert words == documents[1:]
    assert texts.document_N.tolist() == [1, 2]
    # `<bos>` before, `<eos>` and `<eot>` behind.
    assert (texts.read_NT.sum(1) - texts.counted_NT.sum(1)).tolist() == [3, 3]

    shorter = Examples(open_prepared(tmp_path / "data"), "train", context=31, limit=1)
    with pytest.raises(BadInputError, match="no document of train has 5 tokens"):
        collect.collect(model, shorter, tmp_path / "b.parquet", texts=9, batch_size=2)
    assert [file.name for file in tmp_path.glob("*parquet*")] == ["a.parquet"]


def test_words_give_the_text_and_tokens_their_words(model):
    ids = model.tokenizer.encode("the people of a river town", add_special_tokens=False)
    split = shown.words(model.tokenizer, ids)
    assert split.words == ["the", " people", " of", " a", " river", " town"]
    joined = [
        "".join(token for token, of in zip(split.tokens, split.word_of, strict=True) if of == word)
        for word in range(6)
    ]
    assert joined == [word.strip() for word in split.words]
    gate_T = np.arange(len(ids), dtype=float)
    means = [np.mean(gate_T[np.array(split.word_of) == word]) for word in range(6)]
    assert split.means(gate_T) == pytest.approx(means)
