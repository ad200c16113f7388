"""Numbers of GPUs that do not divide a model's attention heads."""

from dataclasses import replace

import pytest

from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import find_model


def test_context_parallelism_over_three_gpus_is_refused_for_32_heads():
    """The search of `plan --gpus 3` ended in a traceback: it tries context parallelism over all GPUs."""
    flags = ["model.name=llama-3.1-8b", "hardware.gpu=A100-80GB", "hardware.num_gpus=3", "train.sharding=zero3"]
    params = with_flags(load_params(COMMON_PARAMS), [*flags, "data.max_length=1536"])
    run = full_rows_run(params, read_config(find_model("llama-3.1-8b")), resolve_gpu("A100-80GB")[0])
    changed = replace(run.setting, train=run.setting.train.model_copy(update={"context_parallel": 3}))
    assert changed.layout.context == 3
    with pytest.raises(UserError, match="context_parallel: must divide the model's attention heads"):
        replace(run, setting=changed).predict()
