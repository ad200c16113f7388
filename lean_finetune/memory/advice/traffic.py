"""Bytes that GPUs send in an optimizer step, and through the network between nodes, from shapes alone.

Collectives are counted as NCCL's rings send them: to gather or to reduce S bytes over N GPUs, each GPU sends
S × (N − 1) / N bytes, and an all-reduce is both (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). A ring
leaves each node once. Small messages are left out: norms, losses and held-out rows. An all-to-all of S bytes sends as
many as a reduction.
"""

from dataclasses import dataclass, replace

from cuda_memory.gpus import GIGA
from cuda_memory.units import readable_size
from lean_finetune.config.field_types import SPLIT_WEIGHTS, Sharding
from lean_finetune.config.rules import GATHERED_LAYERS
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.step_cost import (
    DURATION_RANGE,
    device_step_seconds,
    pipeline_bytes,
    tensor_parallel_bytes,
)
from lean_finetune.memory.predict.state_formulas import ModelShapes, model_shapes, state_lines, trained_tensors
from lean_finetune.memory.trace.memory_trace import ADAPTERS, GRADIENTS, WEIGHTS
from lean_finetune.model.attention.kernels import key_copies
from lean_finetune.model.model_config import largest_head_size, layer_settings, ties_embedding
from lean_finetune.model.precision import autocast_dtype, base_dtype
from lean_finetune.step.parallel_model import layer_of


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a GPU sends in an optimizer step."""

    gpus: int
    group: int
    """GPUs that share weights or gradients in one ring: all, or a group of hsdp."""
    in_group_bytes: int
    between_groups_bytes: int
    """hsdp: gradients of equal shards."""
    rings: int = 1
    """train.tensor_parallel: GPUs of a node with different parts of the weights; each belongs to another ring."""
    in_products_bytes: int = 0
    """train.tensor_parallel: outputs and gradients that these GPUs sum, within a node."""
    context: int = 1
    """train.context_parallel: GPUs that share each row's tokens."""
    exchanged_bytes: int = 0
    """train.context_parallel: queries, keys, values and outputs of attention."""
    passed_bytes: int = 0
    """train.pipeline_stages: hidden states to the next stage, and as many bytes of gradients back."""
    tied_bytes: int = 0
    """train.pipeline_stages: what the first and the last stage send to sum gradients of a weight that both have."""

    def network_bytes(self, gpus_per_node: int) -> int:
        """What a node sends to others: a ring that spans nodes leaves each node once."""
        if self.passed_bytes:
            return _most_of_a_stage(self.passed_bytes, self.tied_bytes, self.gpus // gpus_per_node)
        rings = min(self.rings, gpus_per_node)
        members = gpus_per_node // rings
        in_group = self.in_group_bytes if self.group > members else 0
        products = self.in_products_bytes if self.rings > gpus_per_node else 0
        own = min(self.context, gpus_per_node)
        exchanged = self.exchanged_bytes * (self.context - own) // max(1, self.context - 1) * gpus_per_node
        return rings * (in_group + self.between_groups_bytes * min(self.group, members)) + products + exchanged

    def as_json(self, nodes: int) -> dict[str, int]:
        """Bytes in a step: of a GPU in its group and between groups, and of one of `nodes` nodes."""
        network = self.network_bytes(self.gpus // nodes) if nodes > 1 else 0
        return {
            "sent_in_group_bytes": self.in_group_bytes,
            "sent_between_groups_bytes": self.between_groups_bytes,
            "sent_in_products_bytes": self.in_products_bytes,
            "sent_around_attention_bytes": self.exchanged_bytes,
            "sent_by_node_bytes": network,
        }


def traffic_of(run: Run) -> Traffic | None:
    """What a GPU of a run sends; None for one GPU."""
    if run.setting.gpus == 1:
        return None
    return _traffic(run, model_shapes(run.config, run.setting.layout.tensor))


def _exchanged_bytes(run: Run) -> int:
    """What a GPU sends around attention by context parallelism: forward, backward, and where layers are recomputed."""
    train, parts, layers = run.setting.train, run.setting.layout.context, run.config.get_text_config().num_hidden_layers
    if parts == 1:
        return 0
    heads: int = max(layer_settings(run.config, "num_attention_heads"))
    key_heads = max(found or heads for found in layer_settings(run.config, "num_key_value_heads"))
    values = 2 * (heads + key_heads * key_copies(heads, key_heads, parts)) * largest_head_size(run.config)
    passes = 2 + train.recomputed_share(layers)
    element_bytes = (autocast_dtype(train) or base_dtype(train)).itemsize
    return round(run.tokens_per_step * layers * values * element_bytes * passes * (parts - 1) / parts)


def _most_of_a_stage(passed: int, tied: int, stages: int) -> int:
    """What a stage, or a node with stages, sends: to both neighbours, or to one and to the other end."""
    return max(passed * min(2, stages - 1), passed + tied)


def _undivided_bytes(run: Run, shapes: ModelShapes) -> int:
    """Adapters that every GPU of a tensor-parallel group has, and of whose gradients each has a part."""
    train = run.setting.train
    if not train.adapted or run.setting.layout.tensor == 1:
        return 0
    pairs = zip(trained_tensors(shapes, train), trained_tensors(model_shapes(run.config), train), strict=True)
    return sum(own.values * own.value_bytes for own, whole in pairs if own.shape == whole.shape)


def _traffic(run: Run, shapes: ModelShapes) -> Traffic:
    setting, mode, train = run.setting, run.setting.mode, run.setting.train
    rings = setting.layout.tensor
    gpus = setting.gpus // rings
    if setting.layout.pipeline > 1:
        text, passed = run.config.get_text_config(), pipeline_bytes(run)
        tied = train.method == "full" and ties_embedding(run.config)
        tied_bytes = text.vocab_size * text.hidden_size * base_dtype(train).itemsize if tied else 0
        most = _most_of_a_stage(passed, tied_bytes, gpus)
        pipeline = {"passed_bytes": passed, "tied_bytes": tied_bytes}
        return Traffic(gpus=gpus, group=gpus, in_group_bytes=most, between_groups_bytes=0, **pipeline)
    summed = 2 * _undivided_bytes(run, shapes) // setting.shards_of_weights * (rings - 1) // rings
    parts = {
        "rings": rings,
        "in_products_bytes": round(tensor_parallel_bytes(run)) + summed,
        "context": setting.layout.context,
        "exchanged_bytes": _exchanged_bytes(run),
    }
    micro_batches = max(1, round(run.micro_batches_per_step))
    # Offload changes where states are stored, not what GPUs send.
    lines = state_lines(shapes, setting.with_train(offload="none", optimizer_in_backward=False), cuda=True)
    gradients = sum(sum(line.tensor_bytes) for line in lines if line.category == GRADIENTS)
    if mode not in SPLIT_WEIGHTS:
        sent = 2 * gradients + (gradients if mode == "zero1" else 0)  # zero1: owners send updated weights too.
        sent = sent * (gpus - 1) // gpus
        return Traffic(gpus=setting.gpus, group=gpus, in_group_bytes=sent, between_groups_bytes=0, **parts)
    weights = sum(sum(line.tensor_bytes) for line in lines if line.category in (WEIGHTS, ADAPTERS) and line.divides)
    root = sum(p.values for p in shapes.parameters if not layer_of(p.name)) * base_dtype(train).itemsize
    # Layers are gathered for forward and again for backward; embedding, last norm and head once.
    gathered = 2 * weights - root if mode in GATHERED_LAYERS else weights
    reductions = micro_batches if train.method == "full" else 1
    group = setting.shards_of_weights
    replicas = gpus // group
    return Traffic(
        **parts,
        gpus=setting.gpus,
        group=group,
        in_group_bytes=(gathered * micro_batches + gradients * reductions) * (group - 1) // group,
        between_groups_bytes=2 * gradients // group * (replicas - 1) // replicas,
    )


def network_lines(run: Run) -> list[tuple[str, str]]:
    """Text: what GPUs send, which network speed hides it behind computing, and modes that send less."""
    setting = run.setting
    if setting.gpus == 1:
        return []
    shapes = model_shapes(run.config, setting.layout.tensor)
    traffic = _traffic(run, shapes)
    sent = {
        "": traffic.in_group_bytes,
        " between groups": traffic.between_groups_bytes,
        " for tensor parallelism": traffic.in_products_bytes,
        " for context parallelism": traffic.exchanged_bytes,
    }
    each = ", and ".join(f"{readable_size(size)}{where}" for where, size in sent.items() if size)
    lines = [("sent in a step", f"{each}, by each GPU")]
    if run.nodes == 1:
        return lines
    per_node = setting.gpus // run.nodes
    parts = device_step_seconds(run)
    seconds = None if parts is None else sum(parts.values())

    def network(one: Traffic) -> str:
        sent = one.network_bytes(per_node)
        gigabits = sent * 8 / GIGA / ((seconds or 1) * DURATION_RANGE[0])
        speed = f", which costs no time from {float(f'{gigabits:.2g}'):,.6g} Gbit/s on" if seconds else ""
        return f"{readable_size(sent)}{speed}"

    lines.append(("by each node", f"{network(traffic)} (run.nodes={run.nodes})"))
    alone = traffic.rings == 1  # hsdp has no tensor parallelism.
    others: list[tuple[Sharding, int | None]] = [("hsdp", per_node)] if alone and 1 < per_node < setting.gpus else []
    for mode, group in (*others, ("ddp", None)):
        changed = setting.with_train(sharding=mode, shard_group_gpus=group)
        other = _traffic(replace(run, setting=changed), shapes)
        if other.network_bytes(per_node) < traffic.network_bytes(per_node):
            groups = f"in groups of {group}: " if group else ""
            lines.append((f"with {mode}", f"{groups}{network(other)}; better on a slower network, if it fits"))
    return lines
