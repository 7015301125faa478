"""What a sequence has given and its client has not taken yet, in few bytes, and cut into chunks of few bytes. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtier.proto import inference_pb2
from kvtier.workers.requests.api import TokenLogprobs

MAX_CHUNK_BYTES = 31 * 2**10  # of its tokens, and of its text: grpc.max_message_bytes is at least 64 KiB
_TEXT_BYTES = 4  # of a character, at most
_TOKEN_BYTES = 6  # on the wire, at most
_LOGPROB_BYTES = 16  # on the wire, at most, of the token's own ...
_TOP_BYTES = 20  # ... and of each of the most likely ones


class Unread:
    """Owned by its sequence. A position of a token has log-probabilities where all have."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing waits."""
        self._texts: list[str] = []  # the next one last
        self._new: list[str] = []  # behind those, in order
        self._chars = 0
        self._ids = array("I")
        self._logprobs = array("f")  # as chunks have them
        self._tops = array("B")  # of each logprob: how many entries are in the next two
        self._top_ids = array("I")
        self._top_logprobs = array("f")
        self._at = self._top_at = 0  # what has been taken of these

    def __len__(self) -> int:
        """Tokens that wait."""
        return len(self._ids) - self._at

    def __bool__(self) -> bool:
        return self._chars > 0 or len(self) > 0

    @property
    def nbytes(self) -> int:
        """What it takes in memory, at most."""
        numbers = (self._ids, self._logprobs, self._tops, self._top_ids, self._top_logprobs)
        return _TEXT_BYTES * self._chars + sum(len(one) * one.itemsize for one in numbers)

    def add_text(self, text: str) -> None:
        """More text."""
        if text:
            self._new.append(text)
            self._chars += len(text)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """More tokens."""
        self._ids.extend(token_ids)
        for position in logprobs:
            self._logprobs.append(position.logprob)
            self._tops.append(len(position.top))
            for token_id, logprob in position.top:
                self._top_ids.append(token_id)
                self._top_logprobs.append(logprob)

    def fill(self, chunk: inference_pb2.GenerateChunk) -> int:
        """Move what fits into a chunk: its text and its tokens, whichever there are. How many tokens."""
        chunk.text = self._take_text()
        first, size = self._at, 0
        while self._at < len(self._ids):
            tops = self._tops[self._at] if self._logprobs else 0
            size += _TOKEN_BYTES + (_LOGPROB_BYTES + _TOP_BYTES * tops if self._logprobs else 0)
            if size > MAX_CHUNK_BYTES and self._at > first:
                break
            if self._logprobs:
                entry = chunk.logprobs.add(logprob=self._logprobs[self._at])
                for at in range(self._top_at, self._top_at + tops):
                    entry.top.add(id=self._top_ids[at], logprob=self._top_logprobs[at])
                self._top_at += tops
            self._at += 1
        chunk.token_ids.extend(self._ids[first : self._at])
        taken = self._at - first
        if not self:
            self.clear()
        elif 2 * self._at >= len(self._ids):
            self._drop_taken()
        return taken

    def fill_prompt(self, chunk: inference_pb2.GenerateChunk) -> None:
        """The same for a prompt's tokens, of which a chunk has the log probabilities alone."""
        part = inference_pb2.GenerateChunk()
        self.fill(part)
        chunk.prompt_logprobs.extend(part.logprobs)

    def _drop_taken(self) -> None:
        del self._ids[: self._at], self._logprobs[: self._at], self._tops[: self._at]
        del self._top_ids[: self._top_at], self._top_logprobs[: self._top_at]
        self._at = self._top_at = 0

    def _take_text(self) -> str:
        if not self._texts:
            self._texts, self._new = self._new[::-1], []
        room = MAX_CHUNK_BYTES // _TEXT_BYTES
        taken: list[str] = []
        while self._texts and room:
            text = self._texts.pop()
            taken.append(text[:room])
            if len(text) > room:
                self._texts.append(text[room:])
            room -= len(taken[-1])
        self._chars -= sum(map(len, taken))
        return "".join(taken)
