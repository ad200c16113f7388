"""Tasks of lm-evaluation-harness (the package `lm_eval`), computed within the limits of the evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from cuda_memory.user_paths import user_path
from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.errors import UserError
from lean_finetune.core.versions import install_extra
from lean_finetune.data.chat.compiled_template import CompiledTemplate
from lean_finetune.step.evaluation_limits import EvaluationLimits

YAML_SUFFIX = ".yaml"


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Tasks to score, and what all models share."""

    manager: Any
    """The harness's index of tasks."""
    tasks: Sequence[Any]
    """Names, or the contents of YAML files."""
    rows: int | None
    """First rows of each task to score; None = all."""
    tokenizer: Tokenizer
    template: CompiledTemplate | None
    """Chat template of the prompts, with examples as turns of their own; None for prompts of plain text."""
    max_length: int
    """Tokens of the longest row that a model sees; longer ones lose their beginning, as in the harness."""
    limits: EvaluationLimits
    weights: BaseWeights
    pad_id: int
    eos_id: int
    device: torch.device


def load_tasks(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return the harness's index and the tasks: names of its own, or paths of YAML files.

    Raises UserError if the harness is not installed, or has no such task.
    """
    if find_spec("lm_eval") is None:
        raise UserError(
            f"evaluate.tasks: needs a package that is not installed; run {install_extra('eval')} or set "
            "evaluate.tasks=[]"
        )
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    own_names = [name for name in names if not name.endswith(YAML_SUFFIX)]
    manager, tasks = TaskManager(include_defaults=bool(own_names)), []  # Reading its index takes seconds.
    for name in names:
        if name.endswith(YAML_SUFFIX):
            if not user_path(name, "evaluate.tasks").is_file():
                raise UserError(f"evaluate.tasks: no such file; got {name}; correct the path")
            tasks.append(load_yaml(str(Path(name).absolute()), resolve_func=True))
        elif manager.match_tasks([name]):
            tasks.append(name)
        else:
            raise UserError(
                f"evaluate.tasks: lm_eval {version('lm_eval')} has no such task; got {name}; "
                "`lm-eval ls tasks` lists them"
            )
    return manager, tasks


def task_figures(scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return figures by task from `score_tasks` by model; empty without tasks."""
    figures: dict[str, Any] = {}
    for model, tasks in scores.items():
        for task, found in tasks.items():
            shared = {name: value for name, value in found.items() if name != "metrics"}
            figures.setdefault(task, shared)[model] = dict(found["metrics"])
    return {"tasks": figures, "lm_eval_version": version("lm_eval")} if figures else {}
