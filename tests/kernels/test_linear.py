"""The compiled linear layer against float64, and row by row against itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_kit import COMPILED, Kind, kernels

from kvtier.kernels.ops import NativeKernels, NativeLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(
    kind: Kind, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, threads: int = 2
) -> NativeLinear:
    compiled = kernels(kind, threads)
    assert isinstance(compiled, NativeKernels)
    return NativeLinear(compiled, plain(inputs, outputs, bias, dtype))


def plain(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "inputs, outputs, bias", [(2, 1, True), (66, 33, False), (96, 64, True), (576, 200, True)]
)
@pytest.mark.parametrize("rows", [1, 12, 13, 200])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_linear_layer_errs_at_most_twice_what_torch_errs(
    kind: Kind, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    layer = plain(inputs, outputs, bias, dtype)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)

    with torch.inference_mode():
        y = make(kind, inputs, outputs, bias, dtype)(x)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        fair = (layer(x) - exact).abs().max()

    assert y.dtype == dtype and y.shape == (rows, outputs)
    assert (y - exact).abs().max() <= 2 * fair + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", COMPILED)
def test_a_rows_product_is_the_same_bits_alone_and_among_others(kind: Kind, dtype: torch.dtype) -> None:
    x = torch.randn(130, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    layer, single = (make(kind, 96, 100, True, dtype, threads) for threads in (2, 1))

    whole = layer(x)

    for rows in (slice(0, 1), slice(129, 130), slice(5, 12), slice(20, 120)):
        assert torch.equal(layer(x[rows]), whole[rows])
        assert torch.equal(single(x[rows]), whole[rows])
    assert torch.equal(layer(x.view(2, 65, 96)), whole.view(2, 65, 100))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_linear_layer_refuses_rows_of_another_size_or_dtype(kind: Kind) -> None:
    layer = make(kind, 96, 32, False, torch.float32)

    for x in (torch.ones(1, 95), torch.ones(1, 96, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="rows of 96 torch.float32, got"):
            layer(x)
    assert layer(torch.ones(0, 96)).shape == (0, 32)
