"""The limit of training: forward and backward of the very batches of a plan, and nothing else.

Run as `python forward_backward.py THREADS` in a directory that holds the stages' outputs. No loader, no clipping, no
optimizer, no measuring: the batches lie ready in memory. The last line printed holds the seconds of each step.
"""

import json
import sys
import time
from pathlib import Path

import torch

from stages.bucket.plan import read_plan
from stages.declared import read_params
from stages.files import read_json
from stages.model.load import load_model
from stages.model.spec import ModelSpec
from stages.pin.locate import model_directory
from stages.step.loader import load
from stages.step.loss import summed_loss
from stages.step.tokens import TokenRows


def main() -> None:
    """Time every step."""
    torch.set_num_threads(int(sys.argv[1]))
    params = read_params()
    plan = read_plan(Path("data/batches/plan.arrow"))
    rows = TokenRows(Path("data/tokens"), "train")
    pad_id = read_json(Path("data/tokens/meta.json"))["pad_id"]
    spec = ModelSpec.from_params(params, "fp32")
    device = torch.device("cpu")
    model = load_model(model_directory(read_json(Path("locks/model.json"))), spec, device)
    batches = iter(list(load(rows, plan, pad_id=pad_id, pin_memory=False, threads=0)))
    seconds = []
    for micro_batches in plan.steps:
        step = [next(batches) for _ in micro_batches]
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        for batch in step:
            summed_loss(model, batch, params.train.loss_chunk).backward()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
