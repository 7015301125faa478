"""Log probabilities of prompts' tokens, as their rows are computed. Which of them have been told already."""

from __future__ import annotations

import torch

from kvtier.workers.engine.sampling.sampler import token_logprobs
from kvtier.workers.requests.api import Output
from kvtier.workers.requests.sequence import Request
from kvtier.workers.scheduling.scheduler import Row


class PromptLogprobs:
    """Owned by the step loop. A request that is preempted computes its prompt again, and is told each position once."""

    def __init__(self) -> None:
        self._told: dict[
            str, int
        ] = {}  # prompt tokens that are told, the first one among them, which has none

    def rows(self, row: Row) -> int:
        """How many of a row's tokens, its first ones, give log probabilities of the prompt token behind each."""
        request = row.seq.request
        if not request.spec.sampling.prompt_logprobs or request.spec.is_resumed or request.usage is not None:
            return 0
        return max(0, min(row.start + row.length, request.prompt_tokens - 1) - row.start)

    def output(self, row: Row, logits: torch.Tensor) -> Output | None:
        """What these rows, float32 [rows(row), vocab], say of the tokens behind them, and was not told before."""
        request = row.seq.request
        told = self._told.get(request.spec.request_id, 1)
        first, end = row.start + 1, row.start + 1 + len(logits)
        if end <= told:
            return None
        begin = max(first, told)
        chosen = torch.from_numpy(row.seq.tokens[begin:end].astype("int64")).to(logits.device)
        most = request.spec.sampling.prompt_logprobs
        with torch.inference_mode():
            logprobs = token_logprobs(logits[begin - first :], chosen, most)
        if any(one.logprob != one.logprob for one in logprobs):
            raise ValueError("the model's output was not a number")
        self._told[request.spec.request_id] = end
        return Output(
            request.spec.request_id,
            row.seq.index,
            (),
            prompt_position=begin,
            prompt_logprobs=tuple(logprobs),
        )

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._told.pop(request.spec.request_id, None)
