"""A rank's columns of the feed-forward layers in transformers' module trees, and of single linear layers."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.workers.models.shards.collective import Reduce
from kvtier.workers.models.shards.share import Share

_GATED = {"gate_proj", "up_proj", "down_proj"}


def split_feed_forward(model: Any, share: Share, reduce: Reduce) -> int:
    """Keep a rank's columns of every gated MLP and of every stack of experts, whose outputs are then summed over ranks.

    Those of another make stay whole on all ranks, which compute the same there. How many modules were split.
    """
    split = 0
    for module in model.modules():
        if _is_gated(module):
            columns = share.columns(module.down_proj.in_features)
            for name in _GATED:
                linear = split_linear(getattr(module, name), int(name == "down_proj"), columns, share)
                setattr(module, name, linear)
        elif _is_experts(module):
            _split_experts(module, share.columns(module.down_proj.shape[2]))
        else:
            continue
        module.register_forward_hook(lambda _module, _args, output: reduce(output))
        split += 1
    return split


def split_linear(linear: Any, dim: int, part: range, share: Share) -> Any:
    """A part of a linear layer's outputs (dim 0) or inputs (dim 1). Raises ValueError for a layer of another kind.

    Of a sum over inputs only rank 0 adds the bias.
    """
    if share.ranks == 1:
        return linear
    if type(linear) is not torch.nn.Linear:
        raise ValueError(
            f"tensor_parallel {share.ranks} can't split a {type(linear).__name__}: it must be a plain linear layer"
        )
    weight = linear.weight.detach().narrow(dim, part.start, len(part)).clone()
    bias: torch.Tensor | None = linear.bias
    if bias is not None and dim == 0:
        bias = bias.detach()[part.start : part.stop].clone()
    elif share.rank:
        bias = None
    own = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    own.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        own.bias = torch.nn.Parameter(bias, requires_grad=False)
    return own


def _is_gated(module: Any) -> bool:
    children = dict(module.named_children())
    return children.keys() >= _GATED and all(type(children[name]) is torch.nn.Linear for name in _GATED)


def _is_experts(module: Any) -> bool:
    """Experts of [E, 2 I, H] and [E, H, I], without biases."""
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {"gate_up_proj", "down_proj"} or getattr(module, "is_transposed", False):
        return False
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    return gate_up.dim() == 3 and list(gate_up.shape) == [down.shape[0], 2 * down.shape[2], down.shape[1]]


def _split_experts(module: Any, columns: range) -> None:
    own = slice(columns.start, columns.stop)
    gates, ups = module.gate_up_proj.detach().chunk(2, dim=1)
    down = module.down_proj.detach()[:, :, own].contiguous()
    module.gate_up_proj = torch.nn.Parameter(torch.cat([gates[:, own], ups[:, own]], 1), requires_grad=False)
    module.down_proj = torch.nn.Parameter(down, requires_grad=False)
    if hasattr(module, "intermediate_dim"):
        module.intermediate_dim = len(columns)
