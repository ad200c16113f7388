"""Write the model card: base model, data, parameters and metrics."""

import json
from collections.abc import Mapping
from typing import Any

from lean_finetune.pinning.descriptions import describe_data, describe_model


def model_card(
    *,
    model_lock: Mapping[str, Any],
    data_lock: Mapping[str, Any],
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> str:
    """Return Markdown with the metadata block that model hubs read."""
    adapter = params["train"]["method"] != "full"
    shown = {key: value for key, value in metrics.items() if value is not None}
    return "\n".join(
        [
            "---",
            f"base_model: {model_lock['name']}",
            f"library_name: {'peft' if adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            "tags:",
            "- lean-finetune",
            f"- {params['train']['method']}",
            "---",
            "",
            f"# {'Adapter' if adapter else 'Model'} fine-tuned from {describe_model(model_lock)}",
            "",
            f"Weights: `data/tuned/` ({'a peft adapter' if adapter else 'a full model'}, safetensors).",
            "",
            "## Base model",
            _json_block(model_lock),
            "## Data",
            f"{describe_data(data_lock)}; trained on the supervised tokens only.",
            "",
            _json_block(data_lock),
            "## Parameters",
            _json_block(params),
            "## Metrics",
            _json_block(shown),
        ]
    )


def _json_block(value: Mapping[str, Any]) -> str:
    """Return a fenced JSON block followed by a blank line."""
    return f"```json\n{json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)}\n```\n"
