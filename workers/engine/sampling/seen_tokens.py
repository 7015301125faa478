"""Which tokens a sequence has, and how often it gave each itself: what penalties go by. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvtier.workers.requests.api import SamplingParams

CATCH_UP = 16  # more new tokens than this are counted in one go; measured, anything from 8 to 64 is alike
FIRST_ROOM = 1024  # tokens


class SeenTokens:
    """Owned by the step loop; `ids` and `given` stay on the logits' device, so a token costs no look at those before.

    A repetition penalty goes by every token of prompt and output, the presence and frequency penalties by the output's
    alone: the tokens that were given at another worker before a request came here are output too.
    """

    def __init__(
        self, params: SamplingParams, prompt_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.length = 0  # tokens followed so far
        self._prompt_tokens = prompt_tokens
        self._first = 0 if params.repetition_penalty != 1.0 else prompt_tokens
        self._size = 0
        self._places = np.full(vocab_size, -1, np.int32)  # of each token in `ids`
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)
        self._given = torch.zeros(0, dtype=torch.float32, device=device)

    @property
    def ids(self) -> torch.Tensor:
        """Each token once, int64 [tokens]."""
        return self._ids[: self._size]

    @property
    def given(self) -> torch.Tensor:
        """How often each of `ids` is in the output, float32 [tokens]."""
        return self._given[: self._size]

    def follow(self, tokens: npt.NDArray[np.int32]) -> None:
        """These are all tokens of the sequence by now."""
        if len(tokens) - self.length > CATCH_UP:
            self._count(tokens)
        else:
            for position in range(max(self.length, self._first), len(tokens)):
                self._add(int(tokens[position]), position >= self._prompt_tokens)
        self.length = len(tokens)

    def _count(self, tokens: npt.NDArray[np.int32]) -> None:
        vocab_size = len(self._places)
        given = np.bincount(tokens[self._prompt_tokens :], minlength=vocab_size)
        seen = given if self._first else np.bincount(tokens, minlength=vocab_size)
        ids = np.flatnonzero(seen)
        self._size = len(ids)
        self._places.fill(-1)
        self._places[ids] = np.arange(len(ids))
        room = min(vocab_size, len(ids) + FIRST_ROOM)
        self._ids = self._with_room(torch.from_numpy(ids), self._ids, room)
        self._given = self._with_room(torch.from_numpy(given[ids]), self._given, room)

    def _add(self, token: int, is_given: bool) -> None:
        place = int(self._places[token])
        if place < 0:
            place = self._size
            if place == len(self._ids):
                room = min(len(self._places), max(FIRST_ROOM, 2 * place))
                self._ids = self._with_room(self._ids, self._ids, room)
                self._given = self._with_room(self._given, self._given, room)
            self._places[token] = place
            self._ids[place] = token
            self._given[place] = 0
            self._size += 1
        if is_given:
            self._given[place] += 1

    @staticmethod
    def _with_room(values: torch.Tensor, like: torch.Tensor, room: int) -> torch.Tensor:
        """`values`, of the type and on the device of `like`, with room for as many as `room`."""
        roomy = torch.zeros(room, dtype=like.dtype, device=like.device)
        roomy[: len(values)] = values.to(like.device)
        return roomy
