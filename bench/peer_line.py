"""A peer engine behind a line protocol, so that bench/decode.py and bench/ttft.py can alternate it with the service.

Runs under the interpreter that has the engine (vLLM's CPU build in a venv of its own, or transformers in ours) and
answers one JSON object on stdout for each JSON object on stdin:
  {"op": "decode", "batch": 8, "context": 64, "new": 128}   -> {"tokens_per_s": ...}
  {"op": "ttft", "prompt_tokens": 1755, "seed": 3}          -> {"seconds": ...}   (a seed seen before: a prefix hit)
Prompts are random token ids, the same for the same seed. Greedy, end of sequence ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any, Protocol


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """Token ids of a prompt; bench/service.py makes the same."""
    rng = random.Random(seed)
    return [rng.randrange(10, 40000) for _ in range(tokens)]


class Engine(Protocol):
    """What both peers offer."""

    def run(self, prompts: list[list[int]], new: int) -> None:
        """Generate `new` tokens for each prompt; returns when all are there."""


class VLLM:
    """vLLM's CPU build, in one process, eager, prefix caching on."""

    def __init__(self, model: str, dtype: str, threads: int, max_len: int) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model,
            dtype=dtype,
            max_model_len=max_len,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_num_batched_tokens=4096,
            max_num_seqs=16,
        )

    def run(self, prompts: list[list[int]], new: int) -> None:
        params = self._params(
            max_tokens=new, min_tokens=new, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


class Transformers:
    """transformers' own generate, as a user would call it."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(self, prompts: list[list[int]], new: int) -> None:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )


def answer(engine: Engine, request: dict[str, Any], fresh: random.Random) -> dict[str, float]:
    """Carry out one request; decode speed is the difference of a long and a one-token run on fresh prompts."""
    if request["op"] == "ttft":
        prompt = prompt_ids(request["seed"], request["prompt_tokens"])
        start = time.perf_counter()
        engine.run([prompt], 1)
        return {"seconds": time.perf_counter() - start}
    batch, context, new = request["batch"], request["context"], request["new"]
    seconds = []
    for tokens in (1, new + 1):
        prompts = [prompt_ids(fresh.randrange(2**40), context) for _ in range(batch)]
        start = time.perf_counter()
        engine.run(prompts, tokens)
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": batch * new / max(1e-9, seconds[1] - seconds[0])}


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), required=True)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-len", type=int, default=4096)
    a = parser.parse_args()
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints goes to stderr
    engine: Engine
    if a.engine == "vllm":
        engine = VLLM(a.model, a.dtype, a.threads, a.max_len)
    else:
        engine = Transformers(a.model, a.dtype, a.threads)
    fresh = random.Random(time.time_ns())
    print(json.dumps({"ready": a.engine}), file=protocol, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line), fresh)), file=protocol, flush=True)


if __name__ == "__main__":
    main()
