"""The keys of a run that a Python script or a notebook configures with Unsloth or TRL, read from its calls."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.python_script import Call, calls_of, resolved
from lean_finetune.commands.convert.shell_script import Unresolved
from lean_finetune.core.errors import UserError, shortened

FAST = re.compile(r"Fast\w*Model")
"""Unsloth's classes."""
MODELS = re.compile(r"\w*(ForCausalLM|ForConditionalGeneration|ForImageTextToText|ForMultimodalLM)")
TRAINER = re.compile(r"(?:Unsloth)?(SFT|DPO|KTO|ORPO|CPO|Reward|GRPO|RLOO|PPO|OnlineDPO|GKD)Trainer")
CONFIG = re.compile(
    r"(?:Unsloth)?(?:(?:SFT|DPO|KTO|ORPO|CPO|Reward|GRPO|RLOO|PPO|OnlineDPO|GKD)Config|TrainingArguments)"
)
MOST_VALUES = 5000
TRAINER_POSITIONS = ("model", "args")
FAST_POSITIONS = ("model_name", "max_seq_length", "dtype", "load_in_4bit", "load_in_8bit")
FAST_ADAPTER_POSITIONS = ("model", "r", "target_modules", "lora_alpha", "lora_dropout", "bias")
OBJECTS = (
    *("model", "args", "peft_config", "quantization_config", "train_dataset", "eval_dataset", "tokenizer"),
    *("processing_class", "data_collator", "callbacks", "compute_metrics", "formatting_func", "optimizers"),
    *("preprocess_logits_for_metrics", "model_init", "model_init_kwargs"),
)
"""Arguments of a trainer that are other objects, or that are read apart."""
MODEL_CHANGES = (
    *("add_adapter", "load_adapter", "merge_and_unload", "merge_adapter", "unload", "set_adapter", "delete_adapter"),
    *("gradient_checkpointing_disable", "float", "half", "bfloat16", "requires_grad_", "resize_token_embeddings"),
)
"""Methods of a model that change what is trained, or its memory."""
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
LORA_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
UNREAD_LORA = ("task_type", "inference_mode", "fan_in_fan_out", "base_model_name_or_path", "revision")
QUANTISATION: Mapping[str, str] = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
QUANTISATION_DEFAULTS: Mapping[str, Any] = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
UNREAD_QUANTISATION = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_threshold")
NOTHING: tuple[Any, ...] = (None, False, "none", [], True)
"""Values of an argument that may be left out: also `init_lora_weights=True`."""
OF_TRAINING_ARGUMENTS: Mapping[str, Any] = {
    "learning_rate": 5e-5,
    "gradient_checkpointing": False,
    "bf16": False,
    "optim": "adamw_torch_fused",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.0,
}
"""transformers' own defaults, which SFTConfig and Unsloth replace."""
STORED_IN_4_BITS = "bnb-4bit"
"""How names of hub models end whose weights are stored so."""


def keys_of_python(path: Path, text: str) -> dict[str, Any]:
    """The keys of the only training run of a script. None stands for no limit.

    Raises:
        UserError: there is no such run, or there are several, or what configures it cannot be read.
    """
    calls = calls_of(path, text)
    trainers = [call for call in calls if TRAINER.fullmatch(call.name)]
    if len(trainers) != 1:
        raise UserError(
            f"{path}: must make one trainer of TRL or Unsloth, such as SFTTrainer(…); got {len(trainers)}; name another"
        )
    found = _Run(path=path, calls=calls, trainer=trainers[0]).keys()
    flat = list(islice(flat_values(found), MOST_VALUES + 1))
    if len(flat) > MOST_VALUES:
        raise UserError(f"{path}: must have at most {MOST_VALUES} values; got more; name another file")
    return {key: _plain(value) for key, value in flat}


def flat_values(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flat_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """What a call returns is known only while the script runs."""
    if not isinstance(value, Call):
        return value
    return Unresolved(f"{value.name}(…)", value.line, f"{value.name}(…) is known only while the script runs")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A trainer of a script, and what it gets."""

    path: Path
    calls: Sequence[Call]
    trainer: Call

    def keys(self) -> dict[str, Any]:
        """The keys of TRL's files, or those of other_tools/unsloth_python.yaml."""
        own = resolved(self.trainer, self.path, TRAINER_POSITIONS)
        config = self._config(own)
        given = dict(OF_TRAINING_ARGUMENTS) if config.name.endswith("TrainingArguments") else {}
        given |= resolved(config, self.path, ("output_dir",))
        given |= {name: value for name, value in own.items() if name not in OBJECTS}
        options = given.pop("model_init_kwargs", own.get("model_init_kwargs"))
        base, adapters = self._model(own.get("model"))
        self._refuse_changes(own.get("model"))
        adapters = [*adapters, own["peft_config"]] if own.get("peft_config") is not None else adapters
        if len(adapters) > 1:
            raise self._fault(self.trainer, "must get adapters once", f"got {len(adapters)} of them")
        [adapter] = adapters or [None]
        kind = TRAINER.fullmatch(self.trainer.name)
        keys = {"trainer": kind and kind[1]}
        if isinstance(base, Call) and FAST.fullmatch(base.owner):
            return {**keys, **self._unsloth(given, base, adapter)}
        return {**keys, **self._trl(given, base, adapter, own.get("quantization_config"), options)}

    def _fault(self, at: Any, rule: str, got: str) -> UserError:
        line = f":{at.line}" if isinstance(at, Call | Unresolved) else ""
        return UserError(f"{self.path}{line}: {self.trainer.name}: {rule}; {got}; write it there")

    def _config(self, own: Mapping[str, Any]) -> Call:
        given = own.get("args")
        if given is None:
            return Call(name="", owner="", of=None, line=self.trainer.line, arguments={})
        if isinstance(given, Call) and CONFIG.fullmatch(given.name):
            return given
        got = given.why if isinstance(given, Unresolved) else f"got {getattr(given, 'name', given)}(…)"
        raise self._fault(given, "must get a configuration whose values are here, such as SFTConfig(…)", got)

    def _model(self, model: Any) -> tuple[Any, list[Any]]:
        """What loads the model, or its name; and the adapters that it gets on the way."""
        adapters: list[Any] = []
        while isinstance(model, Call):
            arguments = model.arguments
            inner = arguments.get("model", arguments.get("0"))
            if model.name == "from_pretrained" and (FAST.fullmatch(model.owner) or MODELS.fullmatch(model.owner)):
                return model, adapters
            if model.name == "get_peft_model" and FAST.fullmatch(model.owner):
                adapters.append(model)
            elif model.name == "get_peft_model":
                adapters.append(arguments.get("peft_config", arguments.get("1")))
            elif model.name == "prepare_model_for_kbit_training":
                if arguments.get("use_gradient_checkpointing", True) is not True:
                    raise self._fault(model, "must keep its gradient checkpointing", "got another value")
            elif model.name == "to":
                inner = model.of
            else:
                break
            model = inner
        if isinstance(model, str) and not isinstance(model, Unresolved):
            return model, adapters
        got = model.why if isinstance(model, Unresolved) else f"got {getattr(model, 'name', model)}(…)"
        rule = "must get a model that is named here, as a hub id or from AutoModelForCausalLM.from_pretrained(…)"
        raise self._fault(model, rule, got)

    def _refuse_changes(self, model: Any) -> None:
        """Refuse what changes the model between its loading and the trainer."""
        chain = []
        while isinstance(model, Call):
            chain.append(model)
            model = model.arguments.get("model", model.arguments.get("0"))
        for call in self.calls[: self.calls.index(self.trainer)]:
            of_model = call.name in MODEL_CHANGES and any(call.of is one for one in chain)
            if of_model or call.name == "requires_grad":
                raise self._fault(
                    call, "its model must stay as it was made", f"got {call.name}, which is not read here"
                )

    def _unsloth(self, given: Mapping[str, Any], base: Call, adapter: Any) -> dict[str, Any]:
        model = resolved(base, self.path, FAST_POSITIONS)
        keys = {"model": model.pop("model_name", None), "class": base.owner}
        keys["adapter"] = "full" if adapter is None else "lora"
        if (length := given.get("max_seq_length") or given.get("max_length")) is not None:
            model["max_seq_length"] = length
        peft: Mapping[str, Any] = {}
        if isinstance(adapter, Call) and adapter.name == "get_peft_model":
            peft = resolved(adapter, self.path, FAST_ADAPTER_POSITIONS)
        elif adapter is not None:
            peft = self._read(adapter, "LoraConfig", LORA, LORA_DEFAULTS, UNREAD_LORA)
        keys |= {f"peft.{name}": value for name, value in peft.items() if name != "model"}
        if any(call.name == "train_on_responses_only" for call in self.calls):
            keys["train_on_responses_only"] = True
        lengths = ("max_seq_length", "max_length")
        return {**keys, **model, **{name: value for name, value in given.items() if name not in lengths}}

    def _trl(self, given: Mapping[str, Any], base: Any, adapter: Any, quantised: Any, options: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if isinstance(base, Call):
            loading = {"dtype": "auto", **resolved(base, self.path, ("pretrained_model_name_or_path",))}
            keys["model_name_or_path"] = loading.pop("pretrained_model_name_or_path", None)
        else:
            keys["model_name_or_path"] = base
            if options is not None and not isinstance(options, Mapping):
                raise self._fault(options, "must have its values here", f"got {shortened(str(options))}")
            loading = dict(options or {})
        for name in ("torch_dtype", "dtype", "attn_implementation", "revision", "load_in_4bit", "load_in_8bit"):
            if name in loading:
                keys["model_revision" if name == "revision" else name] = loading[name]
        if "torch_dtype" in keys:
            keys.pop("dtype", None)
        quantised = quantised if quantised is not None else loading.get("quantization_config")
        if quantised is not None:
            names = self._read(
                quantised, "BitsAndBytesConfig", QUANTISATION, QUANTISATION_DEFAULTS, UNREAD_QUANTISATION
            )
            keys |= {QUANTISATION[name]: value for name, value in names.items()}
        elif str(keys["model_name_or_path"]).endswith(STORED_IN_4_BITS):
            keys["load_in_4bit"] = True
        keys["use_peft"] = adapter is not None
        if adapter is not None:
            names = self._read(adapter, "LoraConfig", LORA, LORA_DEFAULTS, UNREAD_LORA)
            keys |= {LORA[name]: value for name, value in names.items()}
        return {**given, **keys}

    def _read(
        self, given: Any, kind: str, names: Mapping[str, str], defaults: Mapping[str, Any], unread: Sequence[str]
    ) -> dict[str, Any]:
        """The arguments of an object that are read here, with its class's defaults.

        Raises:
            UserError: it is another object, one that only running can give, or has an argument that is not read.
        """
        if not isinstance(given, Call) or given.name != kind:
            got = given.why if isinstance(given, Unresolved) else f"got {getattr(given, 'name', given)}"
            raise self._fault(given, f"must get {kind}(…) with its values", got)
        found = dict(defaults)
        for name, value in resolved(given, self.path).items():
            if name in names:
                found[name] = value
            elif name not in unread and not any(value is one or value == one for one in NOTHING):
                raise self._fault(
                    given, f"{kind} must be without {name}, which is not read here", f"got {shortened(str(value))}"
                )
        return found
