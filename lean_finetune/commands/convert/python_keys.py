"""The keys of a run that a Python script or a notebook configures with Unsloth or TRL, read from its calls."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.python_script import Call, calls_of, resolved
from lean_finetune.commands.convert.shell_script import Unresolved
from lean_finetune.core.errors import UserError

FAST = re.compile(r"Fast\w*Model")
"""Unsloth's classes."""
MODELS = re.compile(r"\w*(ForCausalLM|ForConditionalGeneration|ForImageTextToText|ForMultimodalLM)")
TRAINER = re.compile(r"(Unsloth)?(?P<kind>SFT|DPO|KTO|ORPO|CPO|Reward|GRPO|RLOO|PPO|OnlineDPO|GKD)?Trainer")
CONFIG = re.compile(r"(Unsloth)?(\w+Config|TrainingArguments)")
NO_ARGUMENTS = ("model", "args", "peft_config", "train_dataset", "eval_dataset", "ref_model")
"""Arguments of a trainer that are other objects."""
STORED_IN_4_BITS = "bnb-4bit"
"""How names of hub models end whose weights are stored so."""
LORA: Mapping[str, str] = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Arguments of peft's LoraConfig by the keys of TRL's files."""
QUANTISATION: Mapping[str, str] = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}


def keys_of_python(path: Path, text: str) -> dict[str, Any]:
    """The keys of the only training run of a script. None stands for no limit.

    Raises:
        UserError: there is no such run, or there are several, or its arguments cannot be read.
    """
    calls = calls_of(path, text)
    trainers = [call for call in calls if TRAINER.fullmatch(call.name)]
    if len(trainers) != 1:
        raise UserError(
            f"{path}: must make one trainer of TRL or Unsloth, such as SFTTrainer(…); got {len(trainers)}; name another"
        )
    [trainer] = trainers
    config = _config(trainer, calls, path)
    before = calls[: calls.index(trainer)]
    bases = [call for call in before if call.name == "from_pretrained" and FAST.fullmatch(call.owner)]
    given = {**dict(resolved(config, path)), **_own(trainer, path)}
    found = _unsloth(given, trainer, bases[-1], before, path) if bases else _trl(given, trainer, before, path)
    return {key: _plain(value) for key, value in _flat(found)}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """What a call returns is known only while the script runs."""
    if not isinstance(value, Call):
        return value
    return Unresolved(f"{value.name}(…)", value.line, f"{value.name}(…) is known only while the script runs")


def _config(trainer: Call, calls: Sequence[Call], path: Path) -> Call:
    """The configuration of a trainer: its `args`, or the only one that was made before."""
    given = trainer.arguments.get("args", trainer.arguments.get("1"))
    if isinstance(given, Call):
        return given
    made = [one for one in calls if CONFIG.fullmatch(one.name) and _is_of_trainer(one)]
    if given is None and not made:
        return Call(name="", owner="", line=trainer.line, arguments={})
    if len(made) != 1:
        raise UserError(
            f"{path}:{trainer.line}: {trainer.name}: must get its configuration by name, such as "
            f"args=SFTConfig(…); got {given or f'{len(made)} of them'}; write it there"
        )
    return made[0]


def _is_of_trainer(call: Call) -> bool:
    return call.name.endswith("TrainingArguments") or bool(
        re.fullmatch(r"(Unsloth)?(SFT|DPO|KTO|ORPO|CPO|Reward)Config", call.name)
    )


def _own(trainer: Call, path: Path) -> dict[str, Any]:
    """Arguments of a trainer that older versions took, such as packing; not the objects that it gets."""
    return {
        name: value
        for name, value in resolved(trainer, path)
        if not name.isdigit() and name not in NO_ARGUMENTS and not isinstance(value, Unresolved | Call)
    }


def _kind(trainer: Call) -> str:
    match = TRAINER.fullmatch(trainer.name)
    return (match and match["kind"]) or "SFT"


def _first(call: Call, name: str) -> Any:
    """An argument by name, or the first one."""
    return call.arguments.get(name, call.arguments.get("0"))


def _unsloth(given: Mapping[str, Any], trainer: Call, base: Call, before: Sequence[Call], path: Path) -> dict[str, Any]:
    """The keys of other_tools/unsloth_python.yaml."""
    adapters = [call for call in before if call.name == "get_peft_model" and FAST.fullmatch(call.owner)]
    model = {name: value for name, value in resolved(base, path) if name not in ("0", "model_name")}
    keys = {"model": _first(base, "model_name"), "class": base.owner, "trainer": _kind(trainer)}
    keys["adapter"] = "lora" if adapters else "full"
    if (length := given.get("max_seq_length") or given.get("max_length")) is not None:
        model["max_seq_length"] = length
    for name, value in resolved(adapters[-1], path) if adapters else ():
        if name not in ("0", "model"):
            keys[f"peft.{name}"] = value
    rest = {name: value for name, value in given.items() if name not in ("max_seq_length", "max_length")}
    return {**keys, **model, **rest}


def _trl(given: Mapping[str, Any], trainer: Call, before: Sequence[Call], path: Path) -> dict[str, Any]:
    """The keys of other_tools/trl.yaml."""
    keys: dict[str, Any] = {}
    model = _first(trainer, "model")
    if isinstance(model, str) and not isinstance(model, Unresolved):
        keys["model_name_or_path"] = model
        options = given.get("model_init_kwargs")
        loading: Mapping[str, Any] = options if isinstance(options, dict) else {}
    else:
        loaded = [call for call in before if call.name == "from_pretrained" and MODELS.fullmatch(call.owner)]
        if not loaded:
            raise UserError(
                f"{path}:{trainer.line}: {trainer.name}: must get a model that is named here, as a hub id or from "
                "AutoModelForCausalLM.from_pretrained(…); write it there"
            )
        keys["model_name_or_path"] = _first(loaded[-1], "pretrained_model_name_or_path")
        loading = {"dtype": "auto", **dict(resolved(loaded[-1], path))}
    for name in ("torch_dtype", "dtype", "attn_implementation", "revision", "load_in_4bit", "load_in_8bit"):
        if name in loading:
            keys["model_revision" if name == "revision" else name] = loading[name]
    if "torch_dtype" in keys:
        keys.pop("dtype", None)
    keys |= dict(_renamed(loading.get("quantization_config"), "BitsAndBytesConfig", QUANTISATION, path))
    adapters = _adapter(trainer, before)
    keys |= {"use_peft": adapters is not None, **dict(_renamed(adapters, "LoraConfig", LORA, path))}
    if str(keys["model_name_or_path"]).endswith(STORED_IN_4_BITS):
        keys.setdefault("load_in_4bit", True)
    others = {name: value for name, value in given.items() if name != "model_init_kwargs"}
    return {"trainer": _kind(trainer), **others, **keys}


def _adapter(trainer: Call, before: Sequence[Call]) -> Any:
    """The LoraConfig of a trainer, or of `get_peft_model` before."""
    given = trainer.arguments.get("peft_config")
    if given is not None:
        return given
    made = [call for call in before if call.name == "get_peft_model"]
    return made[-1].arguments.get("peft_config", made[-1].arguments.get("1")) if made else None


def _renamed(given: Any, kind: str, names: Mapping[str, str], path: Path) -> Iterator[tuple[str, Any]]:
    """The arguments of an object by other names; nothing without it.

    Raises:
        UserError: it is another object, or one that only running can give.
    """
    if given is None:
        return
    if not isinstance(given, Call) or given.name != kind:
        line = f":{given.line}" if isinstance(given, Call | Unresolved) else ""
        got = given.why if isinstance(given, Unresolved) else f"got {getattr(given, 'name', given)}"
        raise UserError(f"{path}{line}: must be {kind}(…) with its values; {got}; write it there")
    for name, value in resolved(given, path):
        if name in names:
            yield names[name], value
