"""What sums of a KV cache get wrong most often, said of one plan, a short line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvtier.lab.plan.model_numbers import ModelNumbers
from kvtier.lab.plan.plan import CHUNK_TOKENS, GB, Inputs, Plan, kv_heads_gpu, sums

_MORE_OUTPUT_TOKENS = 512
_MAX_TP = 1024


def notes(plan: Plan) -> list[str]:
    """Lines for people, the most pressing first."""
    return [*_room(plan), *_length(plan), *_heads(plan), *_split(plan), *_windows(plan), *_others(plan)]


def _room(plan: Plan) -> Iterator[str]:
    inputs, need = plan.inputs, plan.activation_bytes_gpu
    if plan.chosen.max_batch == 0:
        fits = smallest_tp(plan.model, inputs)
        way = f"it fits from --tp {fits} on" if fits else f"it fits no --tp up to {_MAX_TP}"
        lacks = (
            f"the weights take {inputs.weights_bytes / inputs.tp / GB:.1f} GB of each GPU"
            if inputs.room_bytes_gpu <= 0
            else f"one request takes {plan.chosen.paged_bytes_gpu / GB:.2f} GB of each GPU"
        )
        yield f"no request fits: {lacks}, {max(0, inputs.room_bytes_gpu) / GB:.1f} GB are left for pages; {way}"
    reserve = round(inputs.hbm_bytes * inputs.overhead)
    enough = "of which" if need <= reserve else "which is LESS than that:"
    yield (
        f"activations: the overhead keeps {reserve / GB:.2f} GB free, {enough} a prefill chunk of {CHUNK_TOKENS:,} tokens and "
        f"the logits of the batch need about {need / GB:.2f} GB; the CUDA context and graphs take some of it too"
    )


def smallest_tp(model: ModelNumbers, inputs: Inputs) -> int | None:
    """The smallest power of two of GPUs on which at least one request fits."""
    tp = 1
    while tp <= _MAX_TP:
        if sums(model, replace(inputs, tp=tp), inputs.format).max_batch:
            return tp
        tp *= 2
    return None


def _length(plan: Plan) -> Iterator[str]:
    inputs, model = plan.inputs, plan.model
    if inputs.output_tokens:
        part = inputs.output_tokens / inputs.tokens
        yield (
            f"output counts too: a request ends with {inputs.tokens:,} tokens cached, {100 * part:.0f} % of them its output"
        )
    elif plan.chosen.max_batch:
        more = sums(model, replace(inputs, output_tokens=_MORE_OUTPUT_TOKENS), inputs.format)
        yield (
            f"output counts too: with --output-len {_MORE_OUTPUT_TOKENS} max_batch is {more.max_batch:,}, "
            f"not {plan.chosen.max_batch:,}"
        )
    if inputs.tokens > model.max_tokens:
        yield f"{model.name} knows {model.max_tokens:,} positions, a request here has {inputs.tokens:,}"


def _heads(plan: Plan) -> Iterator[str]:
    model = plan.model
    if model.is_latent:
        full = 2 * model.heads * model.value_dim
        part = full / (model.head_dim + model.rope_dim)
        yield (
            f"MLA: one latent of {model.head_dim} + {model.rope_dim} numbers serves all {model.heads} heads; keys and values "
            f"of all heads would take {part:.0f} times that"
        )
    elif model.kv_heads < model.heads:
        wrong = plan.chosen.content_bytes * model.heads / model.kv_heads
        yield (
            f"KV heads count, not heads: with all {model.heads} heads the sum would say {float(wrong) / GB:.2f} GB a request, "
            f"{model.heads / model.kv_heads:g} times too much"
        )


def _split(plan: Plan) -> Iterator[str]:
    model, tp = plan.model, plan.inputs.tp
    if tp == 1:
        return
    if model.is_latent:
        yield (
            f"tp {tp}: MLA does not divide: each GPU holds all latents, {tp} copies; only the weights are shared out"
        )
    elif tp > model.kv_heads:
        yield (
            f"tp {tp}: {model.kv_heads} KV heads don't divide further: each GPU holds one, {tp / model.kv_heads:g} copies of each"
        )
    elif model.kv_heads % tp:
        yield (
            f"tp {tp} does not divide {model.kv_heads} KV heads: the fullest GPU holds {kv_heads_gpu(model, tp)}; "
            "most engines refuse such a split"
        )
    else:
        yield (
            f"tp {tp}: each GPU holds {kv_heads_gpu(model, tp)} of {model.kv_heads} KV heads of every request"
        )


def _windows(plan: Plan) -> Iterator[str]:
    model, tokens = plan.model, plan.inputs.tokens
    for kind in model.kinds:
        if not kind.window:
            continue
        held = f"{kind.layers} of {model.layers} layers attend {kind.window:,} tokens only"
        if tokens > kind.window:
            full = plan.chosen.bytes_per_token * tokens
            spared = 100 * float(1 - plan.chosen.content_bytes / full)
            yield f"{held}: a request takes {spared:.0f} % less than without that window"
        else:
            yield f"{held}, which spares nothing up to that length"


def _others(plan: Plan) -> Iterator[str]:
    refused = sorted(plan.refused)
    if refused:
        why = next(iter(plan.refused.values()))
        yield f"no {', '.join(refused)}: {why.split(', got ')[0]}"
    if plan.chosen.max_batch:
        reserved = max(plan.model.max_tokens, plan.inputs.tokens)
        yield (
            f"reserving {reserved:,} tokens for each request, without pages, would fit {plan.max_batch_contiguous:,} "
            f"and waste {100 * plan.contiguous_waste:.0f} %"
        )
    yield from plan.model.notes
