"""Recompute only as many layers as the device needs (train.grad_ckpt_policy=first_n).

A peak is nearly a line in the number of recomputed layers: each layer that is not recomputed stores its activations. So
the peaks of none and of all layers give the fewest that may fit, which a trace of all layers then confirms.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from lean_finetune.memory.advice.search_space import Candidate, switch_names
from lean_finetune.memory.advice.switch import SAME, flag
from lean_finetune.memory.advice.switches import different, setting_with
from lean_finetune.memory.advice.tracer import REFUSED, Tracer

TRIES = 2
"""Numbers of layers that are tried: the one that follows from the line, and one somewhat larger."""
WORTH = 0.98
"""Share of a candidate's time that fewer recomputed layers must at most need."""


def fewer_recomputed(tracer: Tracer, one: Candidate) -> Iterator[Candidate]:
    """Faster candidates that recompute whole layers, and fewer than `one`, or instead of its tiles; the fastest first.

    Whether they fit is for the caller to confirm.
    """
    train, layers = one.run.setting.train, one.run.config.get_text_config().num_hidden_layers
    stored_elsewhere = (train.offload_activations, train.compress_activations) != ("none", "none")
    recomputes = (train.grad_ckpt and train.grad_ckpt_policy in ("full", "selective")) or train.sequence_tiles
    if not recomputes or stored_elsewhere or one.run.setting.is_pipeline:
        return
    none, every = (tracer.known_peak(with_recomputed(tracer, one, count)) for count in (0, layers))
    if REFUSED in (none, every) or none.bytes <= every.bytes:
        return
    fewest = max(1, math.ceil((none.bytes - tracer.most_bytes(one)) / ((none.bytes - every.bytes) / layers)))
    for count in (fewest + number * max(1, layers // 16) for number in range(TRIES)):
        fewer = with_recomputed(tracer, one, count)
        if count < layers and fewer.slowdown < WORTH * one.slowdown:
            yield fewer


def with_recomputed(tracer: Tracer, one: Candidate, count: int) -> Candidate:
    """The candidate with its first `count` layers recomputed, which may be none or all, and without tiles."""
    first_n = 0 < count < one.run.config.get_text_config().num_hidden_layers
    start = tracer.run.setting
    wanted = {
        "train.grad_ckpt": count > 0,
        "train.grad_ckpt_policy": "first_n" if first_n else "full",
        "train.grad_ckpt_layers": count if first_n else None,
    }
    values = different(start, wanted)
    layers, tiles = (switch_names().index(name) for name in ("activations", "tiles"))
    options = list(one.options)
    options[layers] = replace(
        options[layers], values=values, flags=tuple(flag(key, value) for key, value in values.items())
    )
    options[tiles] = replace(options[tiles], values={}, flags=(), effect=SAME, ease=0, level=0)
    without_tiles = {"train.sequence_tiles": start.train.sequence_tiles}
    run = replace(one.run, setting=setting_with(one.run.setting, {**wanted, **without_tiles}))
    work = one.slowdown / tracer.costs.slowdown(one.run)  # Of its micro-batches.
    return replace(one, options=tuple(options), run=run, slowdown=work * tracer.costs.slowdown(run))
