"""One process of a run: joins the others, and writes where it and the launcher listen to a file of its rank."""

import json
import os
from pathlib import Path

import psutil
import torch

from lean_finetune.distributed.processes import World, process_group


def addresses(pid: int | None = None) -> list[str]:
    """Where a process listens, by default this one."""
    return [one.laddr.ip for one in psutil.Process(pid).net_connections() if one.status == psutil.CONN_LISTEN]


if __name__ == "__main__":
    world = World.here()
    with process_group(world, torch.device("cpu"), 60.0):
        Path(f"{world.rank}.json").write_text(json.dumps([addresses(), addresses(os.getppid())]))
