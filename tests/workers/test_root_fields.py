"""The root of a model's pages: another one for each field that their bytes depend on, whichever fields there are."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
from runner_kit import runner_of

from kvtier.tier.pages.identity import page_keys, root_key


def test_a_models_root_and_its_pages_keys_differ_by_each_of_its_fields(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Fields that other versions add included: none may be left out of the digest, nor two be mixed up."""
    with runner_of(tiny_llama, tmp_path) as runner:
        truth = runner.root_fields()
    others = [{**truth, name: value + "x"} for name, value in truth.items()]
    others += [{**truth, name: value[:-1]} for name, value in truth.items() if value]
    others += [{name: value for name, value in truth.items() if name != left} for left in truth]
    others += [
        {**truth, one: truth[other], other: truth[one]}
        for one, other in combinations(truth, 2)
        if truth[one] != truth[other]
    ]
    tokens, salt = np.arange(16, dtype=np.int32), bytes(64)

    roots = {root_key(each) for each in [truth, *others]}
    keys = {page_keys(root, salt, tokens, 16)[0] for root in roots}

    assert len(truth) > 5
    assert len(roots) == len(keys) == len({tuple(sorted(each.items())) for each in [truth, *others]})
