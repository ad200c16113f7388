"""A model of training on up to 1,024 GPUs, from published speeds: nothing here is measured.

Computing takes what `lean-finetune fit` assumes (half of the data sheet's FLOP/s). What is sent is that of
lean_finetune.memory.advice.traffic. The model leaves out latency, contention and slow nodes, which grow with the number
of GPUs. It prints the table of docs/several-machines.md.
"""

from collections.abc import Iterator

from cuda_memory.gpus import GIGA, GPUS
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.step_cost import step_seconds
from lean_finetune.memory.advice.traffic import traffic_of
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_values
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import find_model

CASES = {"8B, full": ("llama-3.1-8b", "full"), "70B, lora": ("llama-3.1-70b", "lora")}
NODE_GPUS = 8
NVLINK = 450 * GIGA
"""Bytes a second that a GPU sends: NVIDIA's data sheet of H100 SXM has 900 GB/s in both directions."""
NETWORKS = {"8 x 400 Gbit/s": 8 * 400 * GIGA / 8, "100 Gbit/s": 100 * GIGA / 8}
"""Bytes a second that a node sends: NVIDIA's DGX H100, and one Ethernet card."""
SIZES = (16, 64, 256, 1024)
MODES = ("ddp", "zero3", "hsdp")
TOKENS = 16384
"""Of a GPU in a step, in micro-batches of 4096."""
HEAD = (
    "| run | sharding | network of a node | sent by a node of 1,024 GPUs | "
    + " | ".join(f"{gpus} GPUs" for gpus in SIZES)
    + " |"
)


def table() -> Iterator[str]:
    """Lines of the table: the share of a step's time that GPUs compute, without and with perfect overlap."""
    yield HEAD
    yield "|---" * (4 + len(SIZES)) + "|"
    device = next(gpu for gpu in GPUS if gpu.name == "H100")
    assert device.speed is not None
    for name, (directory, method) in CASES.items():
        config = read_config(find_model(directory))
        shapes = model_shapes(config)
        for mode in MODES if method == "full" else MODES[1:]:  # 141 GB of weights fit no GPU.
            rows: dict[str, list[str]] = {network: [] for network in NETWORKS}
            for gpus in SIZES:
                group = f"train.shard_group_gpus={NODE_GPUS if mode == 'hsdp' else 'null'}"
                flags = [f"train.method={method}", "train.precision=bf16", f"train.sharding={mode}", group]
                sizes = [f"hardware.num_gpus={gpus}", f"train.tokens_per_step={gpus * TOKENS}"]
                run = full_rows_run(with_flags(load_params(COMMON_PARAMS), [*flags, *sizes]), config, device)
                traffic = traffic_of(run)
                assert traffic is not None
                computing, sent = (
                    sum(step_seconds(run, shapes, device.speed, trained_values(shapes, run.setting.train)).values()),
                    traffic.network_bytes(NODE_GPUS),
                )
                for network, rate in NETWORKS.items():
                    sending = max(traffic.in_group_bytes / NVLINK, sent / rate)
                    least, most = computing / (computing + sending), computing / max(computing, sending)
                    rows[network].append(f"{100 * least:.0f} to {100 * most:.0f} %")
            for network, shares in rows.items():
                yield f"| {name} | {mode} | {network} | {sent / GIGA:.0f} GB | {' | '.join(shares)} |"


if __name__ == "__main__":
    print("\n".join(table()))
