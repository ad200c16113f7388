"""How far predictions may be too low, by kind of run, and the verdict that follows from a predicted size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cuda_memory.gpus import Device
from cuda_memory.units import readable_size
from lean_finetune.memory.trace.setting import Setting

Kind = Literal[
    "one_gpu_tensors", "one_gpu_reserved", "sharded", "replicated", "divided", "tool_one_gpu", "tool_several_gpus"
]
"""Kinds of runs whose predictions have the same evidence."""
State = Literal["fits", "tight", "does not fit"]
"""Tight: the device holds the predicted bytes, but not with the headroom and the margin."""
Tier = Literal["tensors", "reserved", "process"]


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How much more than predicted a run may need."""

    percent: float
    """Of the prediction, added to it before it is compared with the device."""
    of: str
    """The runs, for messages: the margin of …"""
    measured: bool
    """Whether a GPU measured runs of this kind with this project's step."""
    evidence: str
    """Where the figure comes from."""

    @property
    def text(self) -> str:
        """The margin in words."""
        return f"the margin of {self.of}, {self.percent:g} %" + ("" if self.measured else ", not yet measured on a GPU")

    @property
    def row(self) -> str:
        """Its line in the table of docs/many-gpus.md."""
        return f"| {self.of} | {self.percent:g} | {'yes' if self.measured else 'no'} | {self.evidence} |"

    def peak_text(self, predicted_bytes: int) -> str:
        """A predicted peak with the most that the run may need."""
        most = readable_size(self.with_margin(predicted_bytes))
        return f"{readable_size(predicted_bytes)}, up to {most} with {self.text}"

    def with_margin(self, predicted_bytes: int) -> int:
        """The most bytes that a run with this prediction may need."""
        return int(predicted_bytes * (1 + self.percent / 100))

    def most_bytes(self, room_bytes: int) -> int:
        """The largest prediction that fits into `room_bytes` with the margin."""
        return int(room_bytes / (1 + self.percent / 100))


MARGINS: Mapping[Kind, Margin] = {
    "one_gpu_tensors": Margin(
        percent=1.2,
        of="runs on one GPU",
        measured=True,
        evidence="fms-acceleration on A100: full 0.0 %, adapters -0.4 to -1.2 %; 61 runs on a T4: -1.1 % at worst",
    ),
    "one_gpu_reserved": Margin(
        percent=6,
        of="reserved memory on one GPU",
        measured=True,
        evidence="PEFT on an L40S: -5.7 % at worst over 15 figures",
    ),
    "sharded": Margin(
        percent=60,
        of="sharded runs",
        measured=False,
        evidence="QLoRA of Llama-2-70B on 2 x A100-80GB ran out of memory under FSDP1; predicted for here: 34 % "
        "below usable memory; other runs under FSDP1 took up to 37 % more tensors than predicted for here",
    ),
    "replicated": Margin(
        percent=20,
        of="runs with all weights on several GPUs",
        measured=False,
        evidence="LoRA of Llama-2-7B on 2 x RTX-3090, all weights on each: reserved 20 % more",
    ),
    "divided": Margin(
        percent=60,
        of="runs with tensor, context or pipeline parallelism",
        measured=False,
        evidence="no published run; the margin of sharded runs",
    ),
    "tool_one_gpu": Margin(
        percent=10,
        of="other tools' steps",
        measured=True,
        evidence="107 published runs on one GPU with known settings: all but one at most 9.4 % too low; torchtune with "
        "`compile` and all logits: 11.4 %; 31 whose version is not given: up to 22.5 %",
    ),
    "tool_several_gpus": Margin(
        percent=17,
        of="other tools' steps on several GPUs",
        measured=True,
        evidence="traced under FSDP1, tensors are at most 1.5 % too low; that 70B run failed with 14 % of the memory "
        "left, in blocks between tensors",
    ),
}
"""The one table of margins. Runs on one GPU add none: the headroom is larger than theirs."""


def margin_of(setting: Setting, device: Device) -> Margin | None:
    """The margin of a run of this project; None on one GPU, and on CPUs, where processes were measured."""
    if setting.gpus == 1 or device.kind != "cuda":
        return None
    layout = setting.layout
    if max(layout.tensor, layout.context, layout.pipeline) > 1:
        return MARGINS["divided"]
    return MARGINS["sharded" if setting.shards_of_weights > 1 else "replicated"]


def judge_bytes(
    predicted_bytes: int, device: Device, tier: Tier, margin: Margin | None, headroom_percent: float
) -> State:
    """The verdict on a predicted size.

    Of tensors, the headroom must stay free; of reserved memory, the CUDA context; of a process, nothing.
    """
    whole = device.memory_bytes if tier == "process" else device.usable_bytes(0)
    room = device.usable_bytes(headroom_percent) if tier == "tensors" else whole
    if predicted_bytes <= (room if margin is None else margin.most_bytes(room)):
        return "fits"
    return "tight" if predicted_bytes <= whole else "does not fit"
