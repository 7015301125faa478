"""Tokenizers, chat templates, and token ids back to text as they come."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from gateway_kit import EOS, IM_START, TEMPLATE, make_byte_tokenizer, make_piece_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.workers.models.text import Text, TextError, tokenizer_digest

_SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """One token per byte: every character beyond ASCII is cut."""
    text = Text.load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert text is not None
    return text


@pytest.fixture(scope="module")
def piece_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """SentencePiece's ways as Llama 2 has them."""
    text = Text.load(make_piece_tokenizer(tmp_path_factory.mktemp("pieces")))
    assert text is not None
    return text


def streamed(text: Text, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    """What comes out token by token, the end last."""
    detokenizer = text.detokenizer(prompt)
    return [*(detokenizer.push((token_id,)) for token_id in ids), detokenizer.finish()]


@_SAME_FOLDER
@given(text=st.text(max_size=40))
def test_text_streamed_by_bytes_is_the_text_and_never_broken(byte_text: Text, text: str) -> None:
    pieces = streamed(byte_text, byte_text.encode(text))

    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\ufffd" in text


@_SAME_FOLDER
@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_any_ids_streamed_equal_their_decoding_at_once(byte_text: Text, ids: list[int]) -> None:
    assert "".join(streamed(byte_text, ids)) == byte_text.decode(ids)


@_SAME_FOLDER
@given(ids=st.lists(st.integers(0, 299), max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_text_does_not_depend_on_how_ids_are_grouped(
    byte_text: Text, ids: list[int], cuts: list[int]
) -> None:
    detokenizer = byte_text.detokenizer()
    out, rest = "", ids

    for cut in cuts:
        out += detokenizer.push(rest[:cut])
        rest = rest[cut:]
    out += detokenizer.push(rest) + detokenizer.finish()

    assert out == "".join(streamed(byte_text, ids))


@_SAME_FOLDER
@given(
    text=st.text(alphabet="ab c\N{SNOWMAN}\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}", max_size=30)
)
def test_text_streamed_by_pieces_is_the_text_and_never_broken(piece_text: Text, text: str) -> None:
    ids = piece_text.encode(text)

    pieces = streamed(piece_text, ids)

    assert "".join(pieces) == piece_text.decode(ids)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@_SAME_FOLDER
@given(
    text=st.text(alphabet="ab c\N{SNOWMAN}\N{LATIN SMALL LETTER E WITH ACUTE}", max_size=80),
    cut=st.integers(0, 80),
)
@example(text="a b", cut=2)
@example(text="ab", cut=0)
def test_the_text_of_a_prompt_and_its_continuation_are_the_text_of_all_tokens(
    byte_text: Text, piece_text: Text, text: str, cut: int
) -> None:
    """SentencePiece's decoder leaves out the space before a first word: the completion of "a" by " b" was "b"."""
    for model_text in (byte_text, piece_text):
        ids = model_text.encode(text)
        prompt, completion = tuple(ids[:cut]), ids[cut:]
        if "\N{REPLACEMENT CHARACTER}" in model_text.decode(prompt):
            continue  # it ends within a character

        whole = model_text.decode(prompt) + "".join(streamed(model_text, completion, prompt))

        assert whole == model_text.decode(ids)


def test_an_answer_in_a_chat_begins_with_its_first_word(piece_text: Text) -> None:
    assert "".join(streamed(piece_text, piece_text.encode("a b"))) == "a b"


@pytest.mark.parametrize("left_over", ["truncation", "padding"])
def test_a_prompt_is_neither_cut_nor_padded_as_the_tokenizers_training_was(
    byte_text: Text, tmp_path: Path, left_over: str
) -> None:
    """tokenizer.json often keeps both; transformers switches them off for each call."""
    settings = {
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    }
    file = make_byte_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), left_over: settings[left_over]}))
    text, messages = Text.load(tmp_path), [{"role": "user", "content": "more than eight bytes"}]
    assert text is not None

    assert text.encode("more than eight bytes") == byte_text.encode("more than eight bytes")
    assert text.encode_chat(messages) == byte_text.encode_chat(messages)


@_SAME_FOLDER
@given(text=st.text(max_size=60) | st.text(alphabet="ab <|>im_endstart\n", max_size=60))
def test_ids_are_those_of_the_tokenizers_plain_encoding_and_fit_their_own_number(
    byte_text: Text, piece_text: Text, text: str
) -> None:
    for model_text in (byte_text, piece_text):
        ids = model_text.encode(text)

        assert ids == model_text._tokenizer.backend_tokenizer.encode(text).ids
        assert model_text.encode(text, max_tokens=len(ids)) == ids


def test_other_threads_run_while_a_long_text_is_encoded(byte_text: Text) -> None:
    go, ran = threading.Event(), threading.Event()

    def other() -> None:
        go.wait(120)
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nothing takes the lock from the encoding thread: it must give it away
    try:
        go.set()
        byte_text.encode("ab " * 200_000)
        is_shared = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join(120)

    assert is_shared


def test_text_that_no_tokens_of_the_limit_can_be_is_refused_unread(
    byte_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len("<|im_start|>")
    with monkeypatch.context() as patch:
        patch.setattr(byte_text, "_encode", lambda *_, **__: pytest.fail("it was read"))
        message = f"prompt of {10 * longest + 1} bytes .* max_context 10 .* {longest} bytes are {10 * longest} bytes"
        with pytest.raises(TextError, match=message):
            byte_text.encode("x" * (10 * longest + 1), max_tokens=10)
        with pytest.raises(TextError, match=message):  # counted in bytes
            byte_text.encode("\N{SNOWMAN}" * (10 * longest // 3) + "x", max_tokens=10)
        with pytest.raises(TextError, match=message):
            byte_text.encode_chat([{"role": "user", "content": "x" * (10 * longest + 1)}], max_tokens=10)
        with pytest.raises(TextError, match="max_context 10"):  # what the template adds counts too
            byte_text.encode_chat([{"role": "user", "content": ""}] * 10, max_tokens=10)

    assert byte_text.encode("<|im_start|>" * 10, max_tokens=10) == [IM_START] * 10


def test_a_character_cut_short_comes_as_a_replacement_at_the_end(byte_text: Text, piece_text: Text) -> None:
    snowman = "\N{SNOWMAN}".encode()

    assert streamed(byte_text, list(snowman[:2])) == ["", "", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(streamed(piece_text, list(snowman[:2]))) == piece_text.decode(list(snowman[:2]))


def test_bytes_that_are_never_a_character_do_not_hold_text_back_for_ever(piece_text: Text) -> None:
    detokenizer = piece_text.detokenizer()

    shown = "".join(detokenizer.push((0xFF,)) for _ in range(100))

    assert shown


def test_a_stream_of_any_length_is_read_a_few_tokens_at_a_time(
    piece_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endless streams would else slow down and fill memory, those of silent tokens too."""
    space, a, end = 258, 259, 256
    ids = [space, a] * 50 + [end] * 100 + [space, a] * 50 + [0xFF] * 100 + [end] * 40
    whole, lengths, decode = piece_text.decode(ids), [0], piece_text.decode

    def watched(part: list[int]) -> str:
        lengths.append(len(part))
        return decode(part)

    monkeypatch.setattr(piece_text, "decode", watched)
    shown = "".join(streamed(piece_text, ids))

    assert shown == whole
    assert max(lengths) < 100


def test_special_tokens_give_no_text(byte_text: Text) -> None:
    ids = [IM_START, *b"hi", EOS]

    assert "".join(streamed(byte_text, ids)) == "hi"


def test_chat_messages_become_the_templates_tokens(byte_text: Text) -> None:
    ids = byte_text.encode_chat([{"role": "user", "content": "hi"}])

    assert ids == [IM_START, *b"user\nhi", EOS, *b"\n", IM_START, *b"assistant\n"]


def test_what_a_template_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    text = Text.load(make_byte_tokenizer(tmp_path, template=template))
    assert text is not None

    with pytest.raises(TextError, match="roles must alternate"):
        text.encode_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    text = Text.load(make_byte_tokenizer(tmp_path, template=""))
    assert text is not None

    assert not text.has_chat_template
    with pytest.raises(TextError, match="no chat template"):
        text.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TEMPLATE, (EOS,)),
        (TEMPLATE.replace("<|im_end|>", "<|eot|>"), (EOS, IM_START + 1)),
        (TEMPLATE.replace("<|im_end|>", " <|eot|><|eot|>"), (EOS, IM_START + 1)),
        (TEMPLATE.replace("<|im_end|>", "<|word|>"), (EOS,)),  # no special token
        (TEMPLATE.replace("<|im_end|>", "\nUser: "), (EOS,)),
        ("{{ raise_exception('no answers') }}", (EOS,)),
        ("", (EOS,)),
    ],
)
def test_an_answer_ends_with_the_tokenizers_end_and_what_the_chat_template_puts_behind_answers(
    tmp_path: Path, template: str, ends: tuple[int, ...]
) -> None:
    folder = make_byte_tokenizer(tmp_path, template=template, more=["<|eot|>", "<|word|>"])
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][2]["special"] = True
    file.write_text(json.dumps(tokenizer))
    text = Text.load(folder)

    assert text is not None
    assert text.end_ids == ends


def test_a_folder_without_tokenizer_gives_none_and_an_empty_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert Text.load(tmp_path) is None
    assert tokenizer_digest(tmp_path) == ""


def test_a_damaged_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(TextError, match=str(tmp_path)):
        Text.load(tmp_path)


def test_the_digest_follows_tokenizer_and_template_and_nothing_else(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(tmp_path / "a")
    same = make_byte_tokenizer(tmp_path / "b")
    (same / "config.json").write_text("{}")
    other_template = make_byte_tokenizer(tmp_path / "c", template="{{ messages }}")
    other_tokens = make_byte_tokenizer(tmp_path / "d")
    tokenizer = json.loads((other_tokens / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:1]
    (other_tokens / "tokenizer.json").write_text(json.dumps(tokenizer))

    digests = [tokenizer_digest(f) for f in (folder, same, other_template, other_tokens)]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_demo_models_text_comes_back_as_it_was(demo_model: Path) -> None:
    text = Text.load(demo_model)
    assert text is not None
    sample = "Tiers: L1 \N{RIGHTWARDS ARROW} L3, 12,345 pages \N{GRINNING FACE} \N{CJK UNIFIED IDEOGRAPH-4E2D}\n\ttab"

    pieces = streamed(text, text.encode(sample))

    assert "".join(pieces) == sample
    head = text.encode("<|im_start|>assistant\n")
    assert text.encode_chat([{"role": "user", "content": "hi"}])[-len(head) :] == head


def test_the_tokens_that_end_a_call_of_a_tool_are_known_by_their_names(
    byte_text: Text, tmp_path: Path
) -> None:
    """Some models' tokens for it are special, others' aren't."""
    text = Text.load(make_byte_tokenizer(tmp_path, more=["</tool_call>", "<tool_call>", "<|call|>"]))

    assert text is not None
    assert text.tool_stop_ids == (IM_START + 1, IM_START + 3)
    assert byte_text.tool_stop_ids == ()
