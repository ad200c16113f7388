"""Turn errors of a traced step into one-line refusals: untraceable operations, and faults in the model's code."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.version import parse
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import PretrainedConfig, __version__

from lean_finetune.core.errors import UserError

DEPEND_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where code reads a value, or where the shape of a result depends on values: the tokens of one expert."""
UNTRACEABLE = (UnsupportedFakeTensorException, UnsupportedOperatorException, NotImplementedError)
"""Raised for operations without a shape function."""
UNREAD_LAYERDROP = "5.23.0"
"""Release of transformers whose OPT draws no random number for a `layerdrop` of 0; 5.17.0 compares it."""
PACKAGE = Path(__file__).parents[2]


@contextmanager
def refuse_untraceable(config: PretrainedConfig) -> Iterator[None]:
    """Refuse a model whose step cannot be traced, or whose own code fails.

    Raises:
        UserError: names the error and its place in the model's code.
    """
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    torch_log.setLevel(logging.CRITICAL)  # It writes the traceback of every error, also of those refused below.
    try:
        yield
    except UserError:
        raise
    except DEPEND_ON_VALUES as error:
        raise UserError(
            f"model.name: the step of {config.model_type} reads values of tensors ({_place_in_model(error)}: {error}), "
            f"which do not exist before training, so its memory is not known; {_remedy(config)}"
        ) from None
    except UNTRACEABLE as error:
        raise UserError(
            f"model.name: the step of {config.model_type} cannot be traced ({type(error).__name__}: {error}), so its "
            "memory is not known; choose another model"
        ) from None
    except Exception as error:
        if (place := _place_in_model(error)) is None:
            raise
        raise UserError(
            f"model.name: {config.model_type} cannot be trained with these settings: its code fails ({place}: "
            f"{type(error).__name__}: {error}); choose another model or another train.method"
        ) from None
    finally:
        torch_log.setLevel(level)


def _remedy(config: PretrainedConfig) -> str:
    """Another model, or the release of transformers that computes this one without reading values."""
    if getattr(config, "layerdrop", None) == 0 and parse(__version__) < parse(UNREAD_LAYERDROP):
        return f"install transformers {UNREAD_LAYERDROP} ({__version__} here), or choose another model"
    return "choose another model"


def _place_in_model(error: Exception) -> str | None:
    """File and line in transformers' model code that raised an error; None if our code did."""
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name == "__torch_dispatch__":  # The trace itself: the frame that called the operation is above.
            break
        if "/transformers/models/" in frame.filename:
            place = f"{Path(frame.filename).name}:{frame.lineno}"
        elif Path(frame.filename).is_relative_to(PACKAGE):
            place = None
    return place
