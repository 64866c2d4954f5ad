"""A message in a chat template has the ids of the whole text, and no control token by its own."""

import dataclasses
import datetime

from hypothesis import given
from hypothesis import strategies as st
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lm_jax.errors import UserError
from lm_jax.evaluate.framing import frame, stop_ids
from lm_jax.text.chat_template import render
from lm_jax.text.plain_text import encode_around
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.compat import transformers
from tests.lm_jax.text.synthetic_tokenizers import llama2_backend, train_backend

MESSAGE = "{{ messages[0]['content'] }}"
INST = f"{{{{ bos_token }}}}[INST] {MESSAGE[:-3]} | trim }}}} [/INST]"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI3 = f"{{{{ bos_token }}}}<|user|>\n{MESSAGE}<|end|>\n<|assistant|>\n"


def llama2():
    """No token of its tags, as of Llama 2."""
    return Tokenizer(llama2_backend(), 1, 2, INST)


def mistral():
    return Tokenizer(llama2_backend(("[INST]", "[/INST]")), 1, 2, INST)


def phi3():
    """Whose control tokens take the spaces and lines after them, and one is not special."""
    backend = llama2_backend()
    names = ("<|user|>", "<|end|>", "<|assistant|>")
    tokens = [AddedToken(name, rstrip=True, normalized=False) for name in names]
    backend.add_special_tokens(tokens[:2])
    backend.add_tokens(tokens[2:])
    return Tokenizer(backend, 1, 2, PHI3)


def smollm():
    """Byte-level."""
    backend = train_backend("smollm")
    backend.add_special_tokens(["<|im_start|>"])
    return Tokenizer(backend, 300, 1, CHATML)


def gemma():
    """A space before the first word of a text alone, and none after a control token."""
    backend = llama2_backend(("<|im_start|>", "<|im_end|>"))
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Tokenizer(backend, 1, 2, "{{ bos_token }}" + CHATML)


def unigram():
    """Whose vocabulary has the control tokens among its pieces, the likeliest of all."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁the", -4.0)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = [AddedToken(each, normalized=False) for each in ("<s>", "</s>")]
    backend.add_special_tokens(special)
    return Tokenizer(backend, 1, 2, "{{ bos_token }}User: " + MESSAGE + "{{ eos_token }}A:")


TOKENIZERS = {make.__name__: make() for make in (llama2, mistral, phi3, smollm, gemma, unigram)}
CONTROLS = ("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<|user|>", "<|end|>", "<|assistant|>")
CONTROLS += ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

words = st.sampled_from(["the", " ", "text", "\n", "  one", "<", "/s>", "|", "é", "🙂", "\ue000"])
plain = st.lists(st.one_of(words, st.text(max_size=6)), max_size=8).map("".join)


def whole(tokenizer, message):
    """The rendered text, by transformers' own environment."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    (text,), _ = render_jinja_template(
        [[{"role": "user", "content": message}]],
        chat_template=tokenizer.chat_template,
        add_generation_prompt=True,
        **{name: tokenizer.token(i) for name, i in special.items()},
    )
    return text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(message=plain.filter(lambda text: not any(each in text for each in CONTROLS)))
def test_the_ids_are_those_of_the_whole_text(name, message):
    tokenizer = TOKENIZERS[name]
    text = whole(tokenizer, message)
    assert frame(tokenizer, message) == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_the_whole_text_is_that_of_transformers():
    assert transformers()
    assert whole(TOKENIZERS["phi3"], "a") == "<s><|user|>\na<|end|>\n<|assistant|>"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(message=plain, control=st.sampled_from(CONTROLS), more=plain)
def test_no_control_token_comes_from_the_message(name, message, control, more):
    tokenizer = TOKENIZERS[name]
    ids, bare = frame(tokenizer, f"x{message}{control}{more}x"), frame(tokenizer, "x")
    added = tokenizer.backend.get_added_tokens_decoder()
    # An unknown character has the id of <unk>, as it should.
    counted = [i for i in added if added[i].content != "<unk>"]
    assert [ids.count(i) for i in counted] == [bare.count(i) for i in counted]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_token_in_a_message_is_still_read_as_text(name, control):
    tokenizer = TOKENIZERS[name]
    message = f"the {control} text {control}"
    assert message in tokenizer.decode(frame(tokenizer, message))


@given(message=plain.map(lambda text: f"x{text}x"), more=plain)
def test_what_spells_a_control_token_is_encoded_as_by_a_tokenizer_without_it(message, more):
    tokenizer = TOKENIZERS["mistral"]
    # The same ids, but its end is spelt as nobody can.
    without = llama2_backend(("[INST]", "[/INST]"), end="\U0010ffff")
    ids = frame(tokenizer, f"{message}</s>{more}")
    if not any(each in f"{message}{more}" for each in CONTROLS):
        text = f"<s>[INST] {message}</s>{more}".rstrip() + " [/INST]"
        if more.strip() == more:
            assert ids == without.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["llama2", "mistral", "phi3"])
def test_no_lone_space_is_put_before_the_message(name):
    tokenizer = TOKENIZERS[name]
    tokens = [tokenizer.token(i) for i in frame(tokenizer, "the text")]
    at = tokens.index("▁text")
    assert tokens[at - 1] == "▁the"
    expected = {
        "llama2": ["]", "▁the", "▁text", "▁", "["],
        # The package itself puts a space after every control token.
        "mistral": ["▁", "▁the", "▁text", "▁", "[/INST]"],
        "phi3": ["<|user|>", "▁the", "▁text", "<|end|>", "<|assistant|>"],
    }
    assert tokens[at - 2 : at + 3] == expected[name]


def test_a_control_token_that_message_and_template_spell_together_is_none():
    tokenizer = dataclasses.replace(TOKENIZERS["mistral"], chat_template=f"<{MESSAGE}s>")
    ids = frame(tokenizer, "/")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "▁", "<", "/", "s", ">"]


def test_a_message_that_is_shown_twice_is_plain_text_both_times():
    template = f"</s>{MESSAGE}</s>{MESSAGE}</s>"
    tokenizer = dataclasses.replace(TOKENIZERS["mistral"], chat_template=template)
    for message in ("the", "the </s>", "</s>", ""):
        assert frame(tokenizer, message).count(2) == 3
    plain_text = frame(tokenizer, "the")
    assert plain_text == tokenizer.encode("</s>the</s>the</s>")


@pytest.mark.parametrize("template", ["{{ bos_token }}" + MESSAGE, MESSAGE, None])
@pytest.mark.parametrize("message", ["the text", "<s>the text", ""])
def test_one_token_begins_the_text_whoever_puts_it(template, message):
    tokenizer = dataclasses.replace(TOKENIZERS["llama2"], chat_template=template)
    ids = frame(tokenizer, message, opening="x")
    assert ids[0] == 1 and ids.count(1) == 1


def test_a_tokenizer_that_begins_no_text_gets_none_from_us():
    backend = train_backend("smollm")
    tokenizer = Tokenizer(backend, 0, 1, "User: " + MESSAGE)
    assert frame(tokenizer, "x") == tokenizer.encode("User: x")


def test_a_base_model_reads_message_and_opening_as_one_text():
    tokenizer = dataclasses.replace(TOKENIZERS["llama2"], chat_template=None)
    ids = frame(tokenizer, "the text", opening="\nA:")
    assert ids == tokenizer.encode("the text\nA:")
    assert 2 not in frame(tokenizer, "the </s> text", opening="\nA:")


def test_any_occurrence_of_the_message_is_plain_text():
    tokenizer = TOKENIZERS["mistral"]
    ids = encode_around(tokenizer, ["</s>a", "</s>", "b"], "</s>")
    assert [tokenizer.token(i) for i in ids if i == 2] == ["</s>"] * 2


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (None, (1,)),
        (CHATML, (1,)),
        # The end of a turn is not the end of a text, and no other file says it.
        (CHATML.replace("<|im_end|>", "<|im_start|>"), (1, 300)),
        (CHATML.replace("<|im_end|>", " \n<|im_start|>"), (1, 300)),
        (CHATML.replace("<|im_end|>", "End."), (1,)),
        (MESSAGE + "<|im_start|>", (1,)),
    ],
)
def test_an_answer_ends_with_what_the_template_puts_after_it(template, stops):
    tokenizer = dataclasses.replace(TOKENIZERS["smollm"], chat_template=template)
    assert stop_ids(tokenizer) == stops


# Templates

TOM = 'Tom & <Ann> "'


def rendered(template, message=TOM):
    around, shown = render(template, message, {"bos_token": "<s>"})
    return shown.join(around)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% break %}!{% endfor %}", TOM),
        ("{% for m in messages %}{{ m.content }}{% continue %}!{% endfor %}", TOM),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            TOM,
        ),
        (MESSAGE + "{{ {'a': '<é>&\"'} | tojson }}", TOM + '{"a": "<é>&\\""}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}" + MESSAGE, None),
        (MESSAGE + "{% if enable_thinking %}t{% endif %}{% if tools %}t{% endif %}", TOM),
        (MESSAGE + "{% if tools is not none %}{{ tools | length }}{% endif %}", TOM),
        (
            MESSAGE + "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}",
            None,
        ),
        ("{{ bos_token }}" + MESSAGE + "{{ strftime_now('%Y') }}", None),
    ],
)
def test_what_a_template_may_use(template, expected):
    from transformers.utils.chat_template_utils import render_jinja_template

    (theirs,), _ = render_jinja_template(
        [[{"role": "user", "content": TOM}]],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert rendered(template) == theirs
    assert expected in (None, theirs)


def test_a_template_is_told_today_and_the_same_time_throughout():
    assert rendered(MESSAGE + "{{ strftime_now('%d %b %Y') }}", "") == (
        datetime.datetime.now().strftime("%d %b %Y")
    )
    # Between two renderings a clock goes on.
    rendered(MESSAGE + "{{ strftime_now('%f') }}")


@pytest.mark.parametrize("message", ["a", " a\n", "", "\n"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_message_is_shown_as_the_template_trims_it(message, count):
    shown = "{{ messages[0]['content'] | trim }}"
    assert render(shown.join("<" * (count + 1)), message, {}) == (
        ["<"] * (count + 1),
        message.strip(),
    )


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% if %}", r"cannot be rendered \(Expected an expression"),
        ("{{ raise_exception('Roles must\n alternate.') }}", r"\(Roles must alternate\)"),
        (MESSAGE + "{{ nothing() }}", r"\('nothing' is undefined\)"),
        (MESSAGE + "{{ 1 / 0 }}", r"\(division by zero\)"),
        (MESSAGE + "{{ messages.append(1) }}", "cannot be rendered"),
        (MESSAGE + "{{ ''.__class__.__mro__ }}", r"\(access to attribute '__class__'.*unsafe"),
        (MESSAGE + "{% include 'x' %}", "cannot be rendered"),
        ("hello", "leaves out the message"),
        ("{{ messages[0]['content'] | upper }}", "leaves out the message"),
        ("{{ messages[0]['content'] | urlencode }}", "leaves out the message"),
        ("{{ messages[0]['content'] | escape }}", "changes the message"),
        (MESSAGE + "{{ messages[0]['content'] | length }}", "its other words with it"),
        ("{% if 'Ann' in messages[0].content %}no{% endif %}" + MESSAGE, "its other words"),
        ("{{ messages[0]['content'] | tojson }}", "changes the message"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_a_sentence(template, match):
    with pytest.raises(UserError, match=match) as caught:
        rendered(template)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3
