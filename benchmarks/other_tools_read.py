"""Ten keys of other tools' configurations, read a second time: by PyYAML, as those tools read them, and by other code.

Each reader follows the tool's own source: its defaults, and what decides the method, the precision and the batch.
"""

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Content = Mapping[str, Any]
HALVES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}
NOT_THIS = re.compile(
    r"^(rl: (grpo|gdpo|ebft)|num_generations|reward_(?!model: true)\w+|process_reward_model|processor_type: Voxtral\w*|"
    r"rlhf_type: (grpo|gkd|ppo)|teacher_model\w*|quantizer|qat|stage: ppo|"
    r"finetuning_type: (freeze|oft)|unfrozen_parameters|freeze_language_model: true|relora|lisa_\w+|fp8|gptq|"
    r"infer_backend|export_\w+|"
    r"use_(galore|apollo|badam|adam_mini|muon|llama_pro|kt|onebitllms|\w+_loss)|do_predict: true|vit_\w+|"
    r"aligner_lr|max_pixels|loss_type: apo\w*|\s+vision_all_linear)\b",
    re.MULTILINE,
)
"""Lines that name another kind of run: online training, images, a part of the weights, no training."""
HARMLESS = re.compile(r"^\s*\w+:\s*(false|null|0|\[\]|~|nll|#.*)?\s*(#.*)?$", re.IGNORECASE)
ENVIRONMENT_OF_IMAGES = re.compile(
    r"\b(MAX_PIXELS|IMAGE_MAX_TOKEN_NUM|VIDEO_MAX_\w+|FPS_MAX_FRAMES|ENABLE_AUDIO_OUTPUT)="
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a tool would do."""

    method: str
    precision: str
    """`auto` where the tool asks the GPU or the model."""
    length: int | None
    """None where the tool has no limit."""
    rows: int
    """Of a micro-batch."""
    steps: int
    """Micro-batches of a step."""
    objective: str = "sft"


def read_again(path: Path) -> tuple[str, Reading] | None:
    """The tool and what it would do; None where the file is no training that a reader knows."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".sh":
        content = _flags(text)
    else:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError:
            return None
    if not isinstance(content, dict):
        return None
    for tool, known, reader in READERS:
        if known(content):
            return tool, reader(content)
    return None


def another_kind(path: Path) -> str | None:
    """The line by which a configuration is no fine-tuning on text; None without one."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".sh":
        if found := ENVIRONMENT_OF_IMAGES.search(text):
            return found[0]
        text = re.sub(r"^\s*--(\w+)[ =]+(\S+).*$", r"\1: \2", text, flags=re.MULTILINE)
    if re.search(r"^num_labels:", text, re.MULTILINE) and not re.search(r"^reward_model: true", text, re.MULTILINE):
        return "num_labels"
    lines = (line for line in text.splitlines() if NOT_THIS.match(line) and not HARMLESS.match(line))
    return next(lines, None)


def _flags(text: str) -> Content:
    """The flags of the first `swift sft`, `swift pt` or `swift rlhf`, as YAML would read them."""
    joined = re.sub(r"\\\s*\n", " ", text)
    line = next((line for line in joined.splitlines() if re.match(r"[^#]*\bswift (sft|pt|rlhf)\b", line)), "")
    if not line:
        return {}
    for name, value in re.findall(r"^(?:export )?(\w+)=(\d+)\s*$", joined, re.MULTILINE):
        line = re.sub(rf"\${{?{name}\b}}?", value, line)
    line = re.sub(r"\$\(expr (\d+)((?: / \d+)+)\)", lambda m: str(_divided(int(m[1]), m[2])), line)
    found: dict[str, Any] = {}
    for part in re.split(r"\s--", line.split(" | ")[0])[1:]:
        name, *words = shlex.split(part)
        found[name] = True if not words else yaml.safe_load(words[0]) if len(words) == 1 else words
    return {"swift": True, **found}


def _divided(number: int, others: str) -> int:
    for other in re.findall(r"\d+", others):
        number //= int(other)
    return number


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _axolotl(content: Content) -> Reading:
    adapter = content.get("adapter") or None
    bits = 4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else None
    method = "full" if adapter is None else {4: "qlora", 8: "int8_lora", None: "lora"}[bits]
    bf16, fp16 = content.get("bf16", "auto"), content.get("fp16") or content.get("float16")
    bf16 = "auto" if bf16 is None else bf16
    if content.get("bfloat16") or (bf16 and bf16 != "auto"):
        precision = "bf16"
    elif fp16:
        precision = "fp16"
    elif bf16 == "auto":
        precision = "auto"
    else:
        precision = "fp16" if bits == 8 else "fp32"
    return Reading(
        method=method,
        precision=precision,
        length=int(_number(content.get("sequence_len"), 512)),
        rows=int(_number(content.get("micro_batch_size"), 1)),
        steps=int(_number(content.get("gradient_accumulation_steps"), 1)),
        objective="reward" if content.get("reward_model") else content.get("rl") or "sft",
    )


def _of_trainer(
    content: Content, method: str, precision: str, length: int | None, rows: int, objective: str = "sft"
) -> Reading:
    return Reading(
        method=method,
        precision=precision,
        length=length,
        rows=int(_number(content.get("per_device_train_batch_size"), rows)),
        steps=int(_number(content.get("gradient_accumulation_steps"), 1)),
        objective=objective,
    )


def _llama_factory(content: Content) -> Reading:
    bits = content.get("quantization_bit")
    lora = content.get("finetuning_type", "lora") == "lora"
    method = {4: "qlora", 8: "int8_lora", None: "lora"}[bits] if lora else "full"
    stored = "bf16" if content.get("pure_bf16") else "auto"
    precision = "bf16" if content.get("bf16") else "fp16" if content.get("fp16") else stored
    stage, loss = content.get("stage", "sft"), content.get("pref_loss", "sigmoid")
    objective = str({"pt": "sft", "rm": "reward", "dpo": "dpo" if loss == "sigmoid" else loss}.get(stage, stage))
    return _of_trainer(content, method, precision, int(_number(content.get("cutoff_len"), 2048)), 8, objective)


def _llama_factory_v1(content: Content) -> Reading:
    quantized = (content.get("quant_config") or {}).get("quantization_bit")
    lora = (content.get("peft_config") or {}).get("name") == "lora"
    rows = int(_number(content.get("micro_batch_size"), 1))
    return Reading(
        method={4: "qlora", 8: "int8_lora", None: "lora"}[quantized] if lora else "full",
        precision="bf16" if content.get("bf16", True) else "fp32",
        length=int(_number(content.get("cutoff_len"), 2048)),
        rows=rows,
        steps=int(_number(content.get("global_batch_size"), rows)) // rows,
        objective="dpo" if "dpo" in str(content.get("train_dataset")) else "sft",
    )


def _trl(content: Content) -> Reading:
    bits = 4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else None
    method = {4: "qlora", 8: "int8_lora", None: "lora"}[bits] if content.get("use_peft") else "full"
    stored = HALVES.get(str(content.get("dtype") or content.get("torch_dtype")), "fp32")
    precision = "fp16" if content.get("fp16") else "bf16" if content.get("bf16", True) else stored
    length = content.get("max_length") or content.get("max_seq_length") or 1024
    objective = "dpo" if "beta" in content else "sft"
    objective = "orpo" if "orpo" in str(content.get("output_dir")) else objective
    return _of_trainer(content, method, precision, int(length), 8, objective)


def _torchtune(content: Content) -> Reading:
    name = content["model"]["_component_"].rpartition(".")[2]
    quantized = name.startswith("qlora_") or content["model"].get("quantize_base")
    lora = name.startswith(("lora_", "qlora_"))
    stored = HALVES[str(content.get("dtype"))] if content.get("dtype") else "auto"
    length = (content.get("tokenizer") or {}).get("max_seq_len")
    return Reading(
        method="qlora" if quantized and lora else "lora" if lora else "full",
        precision="pure_bf16" if stored == "bf16" and lora else stored,
        length=None if length is None else int(length),
        rows=int(_number(content.get("batch_size"), 1)),
        steps=int(_number(content.get("gradient_accumulation_steps"), 1)),
        objective="dpo" if "DPOLoss" in str(content.get("loss")) else "sft",
    )


def _ms_swift(content: Content) -> Reading:
    kind = content.get("tuner_type") or content.get("train_type") or "lora"
    method = "full" if kind == "full" else {4: "qlora", 8: "int8_lora", None: "lora"}[content.get("quant_bits")]
    rows = int(_number(content.get("per_device_train_batch_size"), 1))
    stored = HALVES.get(str(content.get("torch_dtype")), "auto")
    length = content.get("max_length")
    return Reading(
        method=method,
        precision="bf16" if content.get("bf16") else "fp16" if content.get("fp16") else stored,
        length=None if length is None else int(length),
        rows=rows,
        steps=int(_number(content.get("gradient_accumulation_steps"), math.ceil(16 / rows))),
        objective="reward" if content.get("rlhf_type") == "rm" else content.get("rlhf_type", "sft"),
    )


def _unsloth(content: Content) -> Reading:
    training = content["training"]
    lora = training.get("training_type", "lora") == "lora"
    return Reading(
        method=("qlora" if training.get("load_in_4bit", True) else "lora") if lora else "full",
        precision="auto",
        length=int(training.get("max_seq_length", 2048)),
        rows=int(training.get("batch_size", 2)),
        steps=int(training.get("gradient_accumulation_steps", 4)),
    )


READERS: tuple[tuple[str, Callable[[Content], bool], Callable[[Content], Reading]], ...] = (
    ("ms-swift", lambda c: bool({"swift", "tuner_type", "train_type"} & {*c}), _ms_swift),
    ("Unsloth", lambda c: isinstance(c.get("training"), dict) and "model" in c, _unsloth),
    ("torchtune", lambda c: "optimizer" in c and isinstance(c.get("model"), dict), _torchtune),
    ("LLaMA-Factory v1", lambda c: isinstance(c.get("model"), str) and "micro_batch_size" in c, _llama_factory_v1),
    ("Axolotl", lambda c: "base_model" in c, _axolotl),
    ("LLaMA-Factory", lambda c: bool({"finetuning_type", "template", "cutoff_len"} & {*c}), _llama_factory),
    ("TRL", lambda c: "model_name_or_path" in c, _trl),
)
