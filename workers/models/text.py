"""A model's text side: its tokenizer, its chat template, and token ids back to text as they come."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")  # either makes a folder one with a tokenizer
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
# Tokens that end a call of a tool, by the names that model families gave them.
_TOOL_STOPS = frozenset(
    {
        "<|eom_id|>",  # Llama 3
        "</tool_call>",  # Qwen, Hermes, GLM
        "<|observation|>",  # GLM
        "<|call|>",  # gpt-oss
        "<|tool_call_end|>",  # Kimi, LFM2
        "<|tool_calls_section_end|>",
        "<|/tool_call|>",  # Phi
        "<\uff5ctool\u2581call\u2581end\uff5c>",  # DeepSeek
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<|END_ACTION|>",  # Command R
        "<end_function_call>",  # FunctionGemma
        "[/TOOL_CALLS]",
    }
)
_ANSWER = "kvtier's answer"  # stands in a rendered chat for what a model says
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_TOKENS = 32  # a character has at most 4 bytes, so text still broken after so many tokens stays broken


class TextError(ValueError):
    """Text that can't be made or read with this model's tokenizer or chat template; the message says why."""


class Detokenizer(Protocol):
    """Turns one sequence's token ids into text as they come; special tokens give none.

    A character is given out once all its bytes are there, and never changes after. All text together equals the
    tokenizer's decoding of all ids at once (where bytes that are no UTF-8 stand among byte-fallback tokens,
    up to the number of replacement characters).
    """

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What is left at the end of the sequence: replacement characters for a character cut short, or nothing."""


def tokenizer_digest(folder: str | Path) -> str:
    """blake2b-256 in hex over the tokenizer's and the chat template's files; "" for a folder with no tokenizer."""
    root = Path(folder)
    if not _has_tokenizer(root):
        return ""
    h = blake2b(digest_size=32)
    for name in _TOKENIZER_FILES:
        file = root / name
        if file.is_file():
            h.update(name.encode() + b"\0" + blake2b(file.read_bytes(), digest_size=32).digest())
    return h.hexdigest()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARY_FILES)


class Text:
    """A model's tokenizer and chat template. Holds no state of any request; its methods may run on any thread."""

    def __init__(self, tokenizer: Any, digest: str) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # tokenizer.json often keeps those of a training run; here a text's ids are all of them and no others.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.digest = digest
        template = tokenizer.chat_template
        self.chat_template_digest = _template_digest(template) if template else ""
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.tool_stop_ids = tuple(
            sorted(token_id for token_id, token in added.items() if token.content in _TOOL_STOPS)
        )  # of tokens that end a call of a tool; () where the model has none
        self.end_ids = (
            self._ends()
        )  # of tokens that end an answer: the tokenizer's own, and the chat template's
        self._pieces: dict[int, bytes] = {}  # at most one entry per token of the vocabulary
        self._is_byte_level = type(self._backend.decoder).__name__ == "ByteLevel"
        self.max_token_bytes = self._longest_token()  # of text, that one token can stand for

    @classmethod
    def load(cls, folder: str | Path) -> Text | None:
        """Read a model folder's tokenizer; None when it has none. TextError when it can't be read."""
        root = Path(folder)
        if not _has_tokenizer(root):
            return None
        try:
            tokenizer = _load_tokenizer(root)
        except Exception as error:  # transformers raises whatever its many readers meet
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise TextError(f"can't read the tokenizer in {root}: {reason[0]}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise TextError(f"the tokenizer in {root} has no fast form; add a tokenizer.json")
        return cls(tokenizer, tokenizer_digest(root))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(self.chat_template_digest)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of plain text, with what the tokenizer puts around it (such as a beginning-of-sequence id).

        Raises TextError, before the tokenizer reads any of it, for text of more bytes than `max_tokens` of the
        longest token have (None: no limit). Other threads run meanwhile.
        """
        self._check_length(len(text.encode()), max_tokens)
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int | None = None) -> list[int]:
        """Token ids of a rendered conversation. Raises TextError as `encode` and `render_chat` do.

        A message without content costs a token too, at least: what the template writes around it.
        """
        least = self.max_token_bytes
        self._check_length(
            sum(max(least, len(message["content"].encode())) for message in messages), max_tokens
        )
        rendered = self.render_chat(messages)
        self._check_length(len(rendered.encode()), max_tokens)
        return self._encode(rendered, add_special_tokens=False)

    def _check_length(self, nbytes: int, max_tokens: int | None) -> None:
        if max_tokens is not None and nbytes > max_tokens * self.max_token_bytes:
            raise TextError(
                f"prompt of {nbytes} bytes is too long: max_context {max_tokens} tokens times the longest token's "
                f"{self.max_token_bytes} bytes are {max_tokens * self.max_token_bytes} bytes"
            )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The tokenizer's plain `encode` holds the interpreter's lock until it is done; its batches don't.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _ends(self) -> tuple[int, ...]:
        own = self._tokenizer.eos_token_id
        ends = {own} if isinstance(own, int) else set()
        turn = self._turn_end()
        return tuple(sorted(ends if turn is None else ends | {turn}))

    def _turn_end(self) -> int | None:
        """The special token that a chat template puts behind an answer, which a model was taught to end with."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            rendered = self._render(turns, add_generation_prompt=False) if self.chat_template_digest else ""
        except TextError:
            return None  # this template takes no such chat
        _, answered, behind = rendered.rpartition(_ANSWER)
        added = self._backend.get_added_tokens_decoder()
        named = [
            i for i in self._special if added[i].content and behind.lstrip().startswith(added[i].content)
        ]
        return max(named, key=lambda i: len(added[i].content), default=None) if answered else None

    def _longest_token(self) -> int:
        learned = self._backend.get_vocab(with_added_tokens=False)
        added = (token.content for token in self._backend.get_added_tokens_decoder().values())
        # The byte-level alphabet has one character for each byte.
        sizes = map(len, learned) if self._is_byte_level else (len(token.encode()) for token in learned)
        return max(max(sizes, default=1), max((len(token.encode()) for token in added), default=1))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation ({"role", "content"} each) as the model was taught it, up to where the answer begins.

        Raises TextError when there is no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise TextError("the model has no chat template")
        return self._render(messages, add_generation_prompt=True)

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # templates are programs of the model's makers and raise what they like
            raise TextError(f"the model's chat template refuses these messages: {error}") from error
        return rendered

    def decode(self, ids: Sequence[int]) -> str:
        """All at once: the text of these tokens, special ones left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A fresh one, for one sequence. `prompt`: tokens whose text it continues, as an answer in a chat doesn't.

        The text of `prompt` and what comes out together are the text of all tokens: SentencePiece's decoders leave out
        the space of a first word, and a continuation's first word is none.
        """
        if self._is_byte_level:
            return _ByteDetokenizer(self._piece)
        before = prompt[-_HELD_TOKENS:]
        # Where the prompt ends within a character, the next byte belongs to it and no word begins.
        whole = before and not self.decode(before).endswith(_REPLACEMENT)
        return _WindowDetokenizer(self.decode, before if whole else ())

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = None if token_id in self._special else self._backend.id_to_token(token_id)
            piece = b"" if token is None else _byte_level_bytes(token)
            self._pieces[token_id] = piece
        return piece


def _load_tokenizer(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # the automatic class would load torch

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _template_digest(template: str | dict[str, str]) -> str:
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=b"kvtier.chat").hexdigest()


class _ByteDetokenizer:
    """For byte-level vocabularies, where each token is a run of bytes."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        piece = self._piece
        return self._decoder.decode(b"".join([piece(token_id) for token_id in ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For all others: decodes a window of the latest tokens with and without the new ones and gives the difference.

    The window keeps the tokens of the last difference, for decoders that join words by what stands before them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before)  # the window: tokens of the last difference and those held back
        self._read = len(self._ids)  # tokens of the window that have been given out

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        new = self._new_text()
        if (not new or new.endswith(_REPLACEMENT)) and len(self._ids) - self._read <= _HELD_TOKENS:
            return ""
        if not new:  # what is held back is silent; the next word's space depends on the text before it
            del self._ids[self._read :]
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return new

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        given = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(given) :]


def _byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token that isn't written in that alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable Latin-1 stands for itself, the rest is moved past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(rest)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()
