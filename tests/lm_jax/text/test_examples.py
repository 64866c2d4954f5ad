"""From a prepared folder to batches: every omission is counted, and batch k is always the same."""

import dataclasses
import itertools
import subprocess
import sys
import time
import timeit

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text import examples as data
from lm_jax.text import preparation
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.tokenizer import Tokenizer
from tests.lm_jax.text.synthetic_corpus import ALL_TRAIN, WORDS, same, stored, texts


def test_truncation_keeps_the_beginning_and_fills_up_with_padding(prepared):
    examples = Examples(prepared, context=31)
    documents = stored(prepared)
    batch = examples.read(np.arange(53))
    assert batch["tokens"].shape == (53, 32) and batch["tokens"].dtype == np.int32
    assert batch["document"].dtype == np.int64
    for row, ids in zip(batch["tokens"].tolist(), documents, strict=True):
        assert row == (ids + [0] * 32)[:32]
    assert examples.truncated == sum(len(ids) > 32 for ids in documents) > 0
    used = int((batch["tokens"] != 0).sum())
    assert used + examples.unused_tokens == sum(map(len, documents))


def test_packing_loses_no_token_but_the_tail(prepared):
    examples = Examples(prepared, context=16, mode="pack")
    documents = stored(prepared)
    order = data.epoch_order(53, seed=5, epoch=2)
    batch = examples.read(np.arange(examples.count), order)
    joined = list(itertools.chain.from_iterable(documents[i] for i in order))
    kept = len(joined) - examples.unused_tokens
    assert examples.unused_tokens < 17 and kept == examples.count * 17
    assert batch["tokens"].reshape(-1).tolist() == joined[:kept]
    owners = list(itertools.chain.from_iterable([int(i)] * len(documents[i]) for i in order))
    assert batch["document"].tolist() == owners[:kept:17]


def test_windows_stay_in_one_document_and_predict_every_id_but_its_first(prepared):
    context = 16
    examples = Examples(prepared, context=context, mode="window")
    documents = stored(prepared)
    batch = examples.read(np.arange(examples.count))
    rows = iter(zip(batch["tokens"].tolist(), batch["document"].tolist(), strict=True))
    for number, ids in enumerate(documents):
        for start in range(0, len(ids) - 1, context):
            kept = ids[start : start + context + 1]
            assert next(rows) == (kept + [-1] * (context + 1 - len(kept)), number)
    assert next(rows, None) is None
    targets = int((batch["tokens"][:, 1:] != -1).sum())
    assert targets == sum(len(ids) - 1 for ids in documents)
    assert examples.truncated == examples.unused_tokens == 0


def test_an_epoch_draws_windows_one_by_one(prepared):
    examples = Examples(prepared, context=4, mode="window")
    stored_rows = examples.read(np.arange(examples.count))
    batches = Batches(examples, batch_size=examples.count, seed=1)
    drawn, other = batches.at(0), batches.at(1)
    as_text = [sorted(map(tuple, b["tokens"].tolist())) for b in (stored_rows, drawn, other)]
    assert as_text[0] == as_text[1] == as_text[2]
    assert not same(drawn, other)

    def side_by_side(numbers):
        return (numbers[1:] == numbers[:-1]).mean()

    # The next window is of the same document no more often than any other window is.
    of_document = np.bincount(stored_rows["document"])
    chance = (of_document * (of_document - 1)).sum() / (examples.count * (examples.count - 1))
    spread = (chance * (1 - chance) / examples.count) ** 0.5
    assert abs(side_by_side(drawn["document"]) - chance) < 3 * spread
    assert side_by_side(stored_rows["document"]) > chance + 20 * spread


def test_every_document_once_per_epoch_where_the_batch_does_not_divide_it(prepared):
    batches = Batches(Examples(prepared, context=8), batch_size=10, seed=1)
    read_documents = np.concatenate([batches.at(k)["document"] for k in range(53)])
    epochs = read_documents.reshape(10, 53)
    assert all(sorted(epoch) == list(range(53)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 10


@pytest.mark.parametrize("mode", ["truncate", "pack", "window"])
@given(k=st.integers(0, 10_000), processes=st.sampled_from([2, 3, 4, 12]))
def test_batch_k_is_the_same_for_any_number_of_processes(folder, mode, k, processes):
    examples = Examples(_open(folder), context=12, mode=mode)
    whole = Batches(examples, batch_size=12, seed=7).at(k)
    parts = [
        Batches(examples, batch_size=12, seed=7, process_index=i, process_count=processes).at(k)
        for i in range(processes)
    ]
    assert same(whole, {n: np.concatenate([part[n] for part in parts]) for n in whole})


_opened = {}


def _open(folder):
    if folder not in _opened:
        _opened[folder] = preparation.open_prepared(folder)
    return _opened[folder]


@pytest.mark.parametrize("mode", ["truncate", "pack", "window"])
def test_batches_resumed_at_a_number_equal_the_uninterrupted_ones(prepared, folder, mode):
    whole = Batches(Examples(prepared, context=12, mode=mode), batch_size=8, seed=7)
    uninterrupted = [whole.at(k) for k in range(20)]
    again = preparation.open_prepared(folder)
    resumed = Batches(Examples(again, context=12, mode=mode), batch_size=8, seed=7)
    assert resumed.fingerprint == whole.fingerprint
    assert all(same(resumed.at(k), uninterrupted[k]) for k in range(9, 20))


def test_the_order_of_an_epoch_is_pinned():
    # Another version of grain that shuffles otherwise ends every run that is under way.
    assert data.epoch_order(8, seed=0, epoch=0).tolist() == [1, 2, 4, 5, 3, 7, 0, 6]
    assert data.order_name() == "grain:0de61fc4"
    orders = {tuple(data.epoch_order(30, s, e)) for s in (0, 1, 2, 3, 2**64 - 1) for e in range(5)}
    assert len(orders) == 25


def test_the_orders_of_epochs_and_seeds_are_as_unlike_as_random_ones():
    count, epochs = 200, 50
    orders = np.stack([data.epoch_order(count, s, e) for s in range(2) for e in range(epochs)])
    assert (np.sort(orders) == np.arange(count)).all()
    # Under independence rank correlation has mean 0 and standard deviation 1 / sqrt(count - 1).
    correlation = np.corrcoef(np.vstack([orders, np.arange(count)]))
    pairs = correlation[np.triu_indices(len(correlation), 1)] * (count - 1) ** 0.5
    assert abs(pairs.mean()) < 4 / len(pairs) ** 0.5
    assert 0.9 < pairs.std() < 1.1
    # Neighbours in an order are as far apart as any two numbers: a third of the count.
    gaps = np.abs(np.diff(orders)).mean()
    assert abs(gaps - (count + 1) / 3) < 4 * (count / 18**0.5) / orders.size**0.5


def test_a_late_batch_of_a_million_examples_costs_what_one_of_a_thousand_does():
    def seconds(count):
        numbers = data.shuffled(count, seed=3).batch(256)
        return min(timeit.repeat(lambda: numbers[123_456], timer=time.process_time, number=3))

    # By the count it would be a thousandfold.
    assert seconds(1_000_000) < 10 * seconds(1_000)


def test_batches_need_no_parsed_flags_and_the_package_loads_without_grain(folder):
    code = """
import sys
import lm_jax, lm_jax.text.examples as data
assert "grain" not in sys.modules
from lm_jax.text.preparation import open_prepared
examples = data.Examples(open_prepared(sys.argv[1]), context=8)
print(data.Batches(examples, batch_size=4).at(2)["document"].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    batches = Batches(Examples(_open(folder), context=8), batch_size=4)
    assert done.stdout == f"{batches.at(2)['document'].tolist()}\n" and done.stderr == ""


@pytest.mark.parametrize("mode", ["truncate", "pack", "window"])
def test_one_pass_sees_every_example_once_in_batches_of_one_shape(prepared, mode):
    examples = Examples(prepared, context=20, mode=mode)
    whole = OnePass(examples, batch_size=10)
    batches = [whole.at(k) for k in range(whole.per_epoch)]
    assert {batch["tokens"].shape for batch in batches} == {(10, 21)}
    number = np.concatenate([batch["document"] for batch in batches])
    filled = number == -1
    assert (~filled).sum() == examples.count and filled.sum() == -examples.count % 10
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    assert (tokens[filled] == examples.fill).all()
    assert (tokens[~filled] > 0).any(axis=1).all()
    halves = [OnePass(examples, batch_size=10, process_index=i, process_count=2) for i in range(2)]
    for k, batch in enumerate(batches):
        parts = [half.at(k) for half in halves]
        assert same(batch, {n: np.concatenate([part[n] for part in parts]) for n in batch})
    with pytest.raises(UsageError, match=f"batch {len(batches)} is not one of"):
        whole.at(len(batches))


def test_a_limit_uses_the_first_documents(prepared):
    examples = Examples(prepared, context=12, limit=9)
    batches = Batches(examples, batch_size=9)
    assert sorted(batches.at(0)["document"]) == list(range(9))


def test_the_fingerprint_tells_what_differs(prepared, tokenizer, tmp_path):
    def fingerprint(prepared=prepared, batch_size=8, seed=0, **options):
        return Batches(
            Examples(prepared, **({"context": 12} | options)), batch_size=batch_size, seed=seed
        ).fingerprint

    assert fingerprint() == fingerprint()
    assert fingerprint().endswith(f" order={data.order_name()}")
    preparation.prepare(texts(52), tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    other = preparation.open_prepared(tmp_path / "p")
    for changed, name in [
        ({"prepared": other}, "data"),
        ({"batch_size": 9}, "batch_size"),
        ({"seed": 1}, "seed"),
        ({"context": 13}, "context"),
        ({"mode": "pack"}, "mode"),
        ({"limit": 20}, "limit"),
    ]:
        words = set(fingerprint().split()) ^ set(fingerprint(**changed).split())
        assert {word.partition("=")[0] for word in words} == {name}


def test_the_same_documents_prepared_twice_have_one_fingerprint(prepared, tokenizer, tmp_path):
    preparation.prepare(texts(53), tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    again = preparation.open_prepared(tmp_path / "p")
    assert again.manifest == prepared.manifest
    pair = [Batches(Examples(p, context=12), batch_size=8).fingerprint for p in (prepared, again)]
    assert pair[0] == pair[1]


def test_too_few_documents_are_refused(prepared, tokenizer, tmp_path):
    with pytest.raises(BadInputError, match="53 examples, fewer than one batch of 54"):
        Batches(Examples(prepared, context=8), batch_size=54)
    with pytest.raises(BadInputError, match=r"validation-00000.*holds 0 tokens in 0 documents"):
        Examples(prepared, "validation", context=8)
    with pytest.raises(BadInputError, match="not one example of 100001"):
        Examples(prepared, context=100_000, mode="pack")
    with pytest.raises(BadInputError, match=r"train, validation, test got none of 0 .* 2 empty"):
        preparation.prepare([("a", ""), ("b", " ")], tokenizer, tmp_path / "p", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_be_are_refused(prepared, tokenizer, tmp_path):
    for message, options in [
        ("split = 'dev'", {"split": "dev"}),
        ("mode = 'pad'", {"mode": "pad"}),
        ("context = 0", {"context": 0}),
        ("limit = 0", {"limit": 0}),
    ]:
        with pytest.raises(UsageError, match=message):
            Examples(prepared, **({"context": 8} | options))
    examples = Examples(prepared, context=8)
    for message, options in [
        (r"process 0 of 3 cannot have an even share .* of 10", {"process_count": 3}),
        (r"process 2 of 2 cannot", {"process_index": 2, "process_count": 2}),
        ("batch_size = 0", {"batch_size": 0}),
        ("seed = -1", {"seed": -1}),
    ]:
        with pytest.raises(UsageError, match=message):
            Batches(examples, **({"batch_size": 10} | options))
    with pytest.raises(UsageError, match="mode = 'truncate' joins no documents"):
        examples.read(np.arange(3), np.arange(53))
    with pytest.raises(UsageError, match="batch -1 is before the first"):
        Batches(examples, batch_size=10).at(-1)
    for splits in [(0.5, 0.5), (0.9, 0.2, -0.1), (0.5, 0.2, 0.2)]:
        with pytest.raises(UsageError, match="three shares"):
            preparation.prepare(texts(3), tokenizer, tmp_path / "p", splits=splits, seed=0)


def test_a_model_with_fewer_tokens_than_the_data_is_refused(prepared, tokenizer):
    Examples(prepared, context=8, vocab_size=tokenizer.vocab_size)
    with pytest.raises(BadInputError, match=f"give the model vocab_size={tokenizer.vocab_size}"):
        Examples(prepared, context=8, vocab_size=tokenizer.vocab_size - 1)


def test_an_id_outside_the_vocabulary_is_refused_with_file_and_record(prepared):
    largest = max(map(max, stored(prepared)))
    manifest = {**prepared.manifest, "vocab_size": largest}
    examples = Examples(dataclasses.replace(prepared, manifest=manifest), context=8)
    message = rf"train-00000-of-00001.array_record: record \d+ has the id {largest}"
    with pytest.raises(BadInputError, match=message):
        OnePass(examples, batch_size=53).at(0)


def test_truncating_needs_a_padding_token(tokenizer, tmp_path):
    import tokenizers

    bare = Tokenizer(
        tokenizers.Tokenizer(
            tokenizers.models.WordLevel({w: i for i, w in enumerate([*WORDS, "?"])}, unk_token="?")
        )
    )
    bare.backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    preparation.prepare(texts(20), bare, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    prepared = preparation.open_prepared(tmp_path / "p")
    with pytest.raises(BadInputError, match=r"id 0 is 'on', not '<pad>'.*use mode='window'"):
        Examples(prepared, context=8)
    assert Examples(prepared, context=8, mode="pack").count
    # A document of one id alone has nothing to predict.
    windows = Examples(prepared, context=8, mode="window")
    assert windows.count == sum(-(-(len(ids) - 1) // 8) for ids in stored(prepared))
