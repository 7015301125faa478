"""How a worker finds what it remembers of a request, by its own name or by its client's id."""

from __future__ import annotations

from pathlib import Path

from worker_kit import serving, tiny_runner

from kvtier.workers.requests.api import EngineRequest, SamplingParams


def test_a_request_is_found_by_its_name_and_by_its_clients_id(tiny_llama: Path) -> None:
    names = ["mine#a.1", "mine#b.1", "other#a.2", "plain", "mine#b.1#c.3"]
    with serving(tiny_runner(tiny_llama, 64)) as client:
        for number, name in enumerate(names):
            params = SamplingParams(max_tokens=1)
            client.worker.submit(EngineRequest(name, "default", (1,) * (number + 1), params))
            client.result(name)
        explain = client.worker.explain

        told = {name: explain(name) for name in [*names, "mine", "other", "min", "mine#", "mine#a", ""]}

    lengths = {name: one and one.prompt_tokens for name, one in told.items()}
    assert [lengths[name] for name in names] == [1, 2, 3, 4, 5]
    assert (lengths["mine"], lengths["other"]) == (2, 3)
    assert [lengths[name] for name in ("min", "mine#", "mine#a", "")] == [None] * 4
