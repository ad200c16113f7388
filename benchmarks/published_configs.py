"""The rows of benchmarks/facts/published_configs.csv: other tools' configurations, with their measured memory.

Each is predicted as `fit --from` does it: read, converted and traced.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.estimate_facts import read_facts
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.convert.suited import suit_to_model
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.model.model_config import read_config

FILE = "published_configs.csv"
WITHOUT_VERSION = ("litgpt", "axolotl", "ms-swift")
"""Tools whose rows do not say which version ran: their settings are not known."""
MODEL_KEYS: Mapping[str, tuple[str, ...]] = {
    "torchtune": ("checkpointer", "checkpoint_dir"),
    "axolotl": ("base_model",),
    "litgpt": ("checkpoint_dir",),
}
"""Where a tool's configuration names its model."""
POSITIONS = 131072
"""Of a model whose row does not give them: no row is so long."""


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """A configuration of a tool, and what its run on one GPU was measured to need."""

    id: str
    source: str
    gpu: str
    tool: str
    counts: Literal["alloc", "reserved"]
    """Bytes of tensors, or those that the allocator reserves."""
    measured_bytes: int
    model_config: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def settings_known(self) -> bool:
        """Whether the row says all that decides its memory."""
        return self.tool not in WITHOUT_VERSION

    def predict(self) -> AsTool:
        """Predict the run as its tool does it.

        Raises:
            UserError: the configuration, the model or the tool's step is not known.
        """
        with tempfile.TemporaryDirectory() as name:
            model = Path(name) / "model"
            model.mkdir()
            described = {"max_position_embeddings": POSITIONS, "dtype": "bfloat16", **self.model_config}
            (model / "config.json").write_text(json.dumps(described))
            converted = read_config_of_tool(self._written(Path(name), model), 1, with_data=False)
            suit_to_model(converted, read_config(model))
            params = with_flags(load_params(COMMON_PARAMS), [*converted.flags(), f"hardware.gpu={self.gpu}"])
            found = predict_as_tool(fit_run(params), converted.tool, converted.keys)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def _written(self, directory: Path, model: Path) -> Path:
        """The configuration as a file, whose model is the one in `model`."""
        if "script" in self.settings:
            words = str(self.settings["script"]).split()
            words[words.index("--model") + 1] = str(model)
            path, text = directory / "run.sh", " ".join(words) + "\n"
        else:
            *sections, last = MODEL_KEYS[self.tool]
            content = inner = json.loads(json.dumps(self.settings))
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = str(model)
            path, text = directory / "run.yaml", json.dumps(content)
        path.write_text(text)
        return path


def published_configs() -> list[PublishedConfig]:
    """All rows, in the order of the file."""
    return [
        PublishedConfig(
            **{
                **values,
                "measured_bytes": int(values["measured_bytes"]),
                "model_config": json.loads(values["model_config"]),
                "settings": json.loads(values["settings"]),
            }
        )
        for values in read_facts(FILE)
    ]
