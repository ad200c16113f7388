"""The GPU that `hardware.gpu` names. Needs no torch, so that a wrong name is refused at once."""

from functools import partial

from cuda_memory import gpus

PARAMETER = "hardware.gpu"
NAMED = f"named by {PARAMETER}"
"""Why a device was chosen: the user named a known GPU."""
named_gpu = partial(gpus.named_gpu, option=PARAMETER, forms="auto, a size", more="; all: lean-finetune fit --list-gpus")
