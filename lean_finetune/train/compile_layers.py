"""Compile the decoder layers of a training run (train.compile)."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.core.errors import UserError

MOST_GRAPHS = 64
"""Graphs of one layer's code: of one and of several rows, recomputed or not, for each kind of layer. PyTorch: 8."""


def compile_layers(model: nn.Module, cache: Path) -> None:
    """Compile each decoder layer at its first call, with its adapters and its recomputation, for all shapes.

    Args:
        model: as `load_model` returns it.
        cache: directory for compiled kernels. PyTorch's own choice is a directory in /tmp that others may have made.
    """
    import torch._dynamo  # Takes a second, so only here.

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())  # Importing torch may have set it already.
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # The compiler looks at .grad of each layer's input.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # PyTorch's cache of graphs is pickled, so it is not used.
    options: dict[str, Any] = {"fx_graph_cache": False}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, fullgraph=True, options=options)


@contextmanager
def compile_errors() -> Iterator[None]:
    """A context that turns an error of the compiler into a UserError."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        first = next(iter(str(cause).strip().splitlines()), "")
        raise UserError(
            f"train.compile: layers of this model cannot be compiled here ({type(cause).__name__}: {first}); set it to "
            "false"
        ) from error
