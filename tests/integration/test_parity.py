"""The demo model through a decode worker says, token for token, what transformers says: single, batched, hit and miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import until
from worker_kit import Client

from kvtier.tier.pages.identity import tenant_salt
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.runner.runner import Runner, load_runner
from kvtier.workers.scheduling.settings import EngineSettings

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
LENGTHS = (5, 9, 60, 100)  # tokens: prompts of one length are a batch without padding for transformers
PROMPTS = (
    "The capital of France is a city",
    "Write a haiku about the sea, the moon and the wind.",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village at the foot of a mountain,",
    "Translate to German: Where is the railway station?",
    "SELECT name, COUNT(*) FROM orders GROUP BY name HAVING",
    "The three laws of thermodynamics are",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "<html>\n<head>\n<title>",
    "Ingredients for a simple tomato soup:\n-",
    "In 1969, the first human",
    "Roses are red,\nviolets are blue,\n",
    "import numpy as np\n\ndef softmax(x):\n",
    "To be, or not to be, that is the question:",
    "The quick brown fox jumps over the lazy dog. ",
    "List five uses of a paperclip.\n1.",
    "Der schnelle braune Fuchs springt",
    "A cache keeps what was expensive to compute. ",
)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    """Twenty prompts, five of each length; long ones go round in their text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    return [
        tokenizer(text * 30)["input_ids"][: LENGTHS[number % len(LENGTHS)]]
        for number, text in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(demo_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate gives in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    answers: dict[int, list[int]] = {}
    with torch.inference_mode():
        for length in LENGTHS:
            rows = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[number] for number in rows])
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            answers |= dict(zip(rows, whole[:, length:].tolist(), strict=True))
    return [answers[number] for number in range(len(prompts))]


@pytest.fixture(scope="module", params=["lean", "transformers"])
def client(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Client]:
    """A worker in float32, once with our fused forward and once with transformers' modules."""
    runner: Runner = load_runner(
        str(demo_model),
        dtype="float32",
        page_tokens=16,
        l1_bytes=512 << 20,
        numerics="auto",
        forward=request.param,
        threads=2,
        max_context=2048,
        max_batch_tokens=512,
        epoch=0,
    )
    client = Client()
    worker = DecodeWorker(
        runner,
        EngineSettings(max_batch_tokens=512, max_sequences=32),
        worker_id="w0",
        node_id="n0",
        socket_path=None,
        tenants={"default": tenant_salt("default")},
        sink=client.sink,
    )
    client.worker = worker
    worker.start()
    yield client
    until(worker.idle, "the worker is idle")
    worker.check()
    worker.stop()


def test_greedy_tokens_equal_transformers_alone_and_in_a_batch_on_a_miss_and_on_a_hit(
    client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    if client.worker.info().root_fields["forward"].startswith("transformers"):
        prompts, expected = (
            prompts[:8],
            expected[:8],
        )  # fixed tiles through its modules are slow: two of each length
    # transformers bans the end of sequence until min_new_tokens are there; so does min_tokens here.
    options = {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}

    def together() -> list[list[int]]:
        names = [client.send(prompt, **options) for prompt in prompts]
        return [client.result(name, patience_s=240.0).tokens for name in names]

    batched_miss = together()
    assert batched_miss == expected

    batched_hit = together()
    assert batched_hit == expected

    client.worker.clear(None)
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:4]:  # one of each length
        alone = client.generate(prompt, **options)
        assert alone.tokens == tokens
        assert alone.usage.computed_tokens == len(prompt)
        again = client.generate(prompt, **options)
        assert again.tokens == tokens
        assert again.cached["L1"] >= (len(prompt) - 1) // 16 * 16
