"""params.yaml as it is read: held to the schema and to the rules that span sections, its faults told in one line."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.data_schema import HELDOUT_SOURCE, HUB_PREFIX, Data, Source
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.schema import ALL_LINEAR, Params, Train, round_up
from lean_finetune.config.sharding_rules import check_sharing
from lean_finetune.core.errors import UserError

PARAMS_FILE = Path("params.yaml")
SOURCE_KEYS = ("source", "heldout_source")


def parse_params(values: Any) -> Params:
    """Check a mapping against the schema and the rules that span sections.

    Raises:
        UserError: naming the dotted key, the rule, the value and the remedy.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"params.yaml: must be a mapping of sections, got {type(values).__name__}")
    try:
        params = Params.model_validate(values)
    except ValidationError as error:
        raise UserError(_first_fault(error)) from None
    _check_across_sections(params)
    return params


def _first_fault(error: ValidationError) -> str:
    """One line for the fault to mend first: a misspelt key before the one that is missing because of it."""
    faults = error.errors()
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    keys = _schema_keys(fault["loc"])
    dotted = ".".join(keys)
    if fault["type"] == "extra_forbidden":
        parent = _section_at(keys[:-1])
        near = difflib.get_close_matches(keys[-1], parent.model_fields, n=1)
        known = f"known: {', '.join(parent.model_fields)}"
        remedy = f"did you mean {'.'.join([*keys[:-1], near[0]])}?" if near else known
        return f"{dotted}: unknown parameter; {remedy}"
    if fault["type"] == "missing":
        return f"{dotted}: parameter is missing from params.yaml; add it (every value stands there, see README)"
    if fault["type"] in ("model_type", "model_attributes_type"):
        return f"{dotted}: must be a section with its own keys; got {_shown(fault['input'])}"
    rule = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{dotted}: {rule}; got {_shown(fault['input'])}"


def _shown(value: Any) -> str:
    """A value as it would stand in YAML or JSON, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _schema_keys(location: tuple[int | str, ...]) -> list[str]:
    """The dotted keys of a fault: pydantic adds the branch of a union (`int`, `list`) after the key that holds it."""
    keys: list[str] = []
    section: type[BaseModel] | None = Params
    for place, part in enumerate(location):
        if section is Source and location[place - 1] in SOURCE_KEYS and not isinstance(part, int):
            continue  # the form of data.source
        if section is None and not isinstance(part, int):
            break
        keys.append(str(part))
        if isinstance(part, str):
            section = _section_below(section, part) if section is not None and part in section.model_fields else None
    return keys


def _section_below(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that a key holds, itself or in a list; None for a plain value."""
    if section is Data and key in SOURCE_KEYS:
        return Source
    annotation = section.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _section_at(keys: list[str]) -> type[BaseModel]:
    """The schema class found by walking dotted keys from the top."""
    section: type[BaseModel] = Params
    for key in keys:
        if not key.isdigit():
            section = cast(type[BaseModel], _section_below(section, key))
    return section


def _check_across_sections(params: Params) -> None:
    """Rules that need two values; each names both and the remedy."""
    longest = round_up(params.data.max_length, params.bucket.pad_multiple)
    if params.bucket.max_tokens < longest:
        raise UserError(
            f"bucket.max_tokens: a row of data.max_length={params.data.max_length} (padded {longest}) must fit "
            f"in a micro-batch; got {params.bucket.max_tokens}; raise bucket.max_tokens or lower data.max_length"
        )
    if params.bucket.constant_shape and params.bucket.mode != "packed":
        raise UserError(
            f"bucket.constant_shape: has an effect only with bucket.mode=packed; got true with "
            f"bucket.mode={params.bucket.mode}; set it to false"
        )
    if (params.evaluate.max_tokens or longest) < longest:
        raise UserError(
            f"evaluate.max_tokens: must hold one row of data.max_length={params.data.max_length} (padded {longest}); "
            f"got {params.evaluate.max_tokens}; raise it or lower data.max_length"
        )
    _check_sources(params.data)
    _check_heldout(params)
    _check_methods(params)
    check_sharing(params)
    targets = params.train.lora.targets
    if ALL_LINEAR in targets and len(targets) > 1:
        raise UserError(f"train.lora.targets: {ALL_LINEAR} stands alone; got {targets}; drop it or the other names")


def _check_methods(params: Params) -> None:
    """Switches of train that need another one, or exclude it: none is ignored."""
    train, lora = params.train, params.train.lora
    start = ADAPTER_STARTS[lora.init]
    faults = (
        (
            train.master_weights and (train.method != "full" or train.precision not in ("auto", "bf16")),
            f"train.master_weights: has an effect only with train.method=full and train.precision=bf16; got true with "
            f"{train.method} and {train.precision}; set it to false",
        ),
        *_optimizer_faults(train, params.hardware.num_gpus),
        *_recovery_faults(params),
        *_unread_faults(train),
        (
            train.grad_ckpt_policy != "full" and not train.grad_ckpt,
            f"train.grad_ckpt_policy: has an effect only with train.grad_ckpt=true; got {train.grad_ckpt_policy} with "
            "train.grad_ckpt=false; set train.grad_ckpt=true, or the policy to full",
        ),
        (
            train.grad_ckpt_policy == "selective" and train.method == "int8_lora",
            "train.grad_ckpt_policy: selective cannot see into bitsandbytes' 8-bit products; got selective with "
            "train.method=int8_lora; use full or every_n",
        ),
        (
            train.method not in start.methods,
            f"train.lora.init: {lora.init} {start.reason}; got {lora.init} with train.method={train.method}; use "
            f"{' or '.join(start.methods)}, or default",
        ),
        (
            lora.dora and (train.method not in ("lora", "qlora") or lora.init != "default"),
            f"train.lora.dora: needs train.method=lora or qlora (8-bit weights lose their scales in peft) and "
            f"train.lora.init=default; got {train.method}, {lora.init}; set it to false",
        ),
        (
            train.merge and train.method == "full",
            "train.merge: has an effect only with adapters; got true with train.method=full; set it to false",
        ),
        (
            params.evaluate.merged and not train.merge,
            "evaluate.merged: needs the merged model; got true with train.merge=false; set train.merge to true",
        ),
    )
    for broken, message in faults:
        if broken:
            raise UserError(message)


def _unread_faults(train: Train) -> Iterator[tuple[bool, str]]:
    """Where a method does not read what was asked for beside it: faults of `_check_methods`."""
    method = f"train.method={train.method}"
    for key, value, given in (
        ("train.quant.type", "fp4", train.quant.type != "nf4"),
        ("train.quant.double", "false", not train.quant.double),
    ):
        yield (
            given and train.method != "qlora",
            f"{key}: has an effect only with train.method=qlora; got {value} with {method}; set it to "
            f"{'nf4' if value == 'fp4' else 'true'}, or use train.method=qlora",
        )
    for key, value, given in (
        ("train.lora.dropout", str(train.lora.dropout), train.lora.dropout > 0),
        ("train.lora.rslora", "true", train.lora.rslora),
    ):
        yield (
            given and train.method == "full",
            f"{key}: has an effect only with adapters; got {value} with {method}; set it to "
            f"{'false' if value == 'true' else 0.0}, or use train.method=lora",
        )


def _recovery_faults(params: Params) -> Iterator[tuple[bool, str]]:
    """Where a step cannot be cut smaller and done again: faults of `_check_methods`."""
    split = params.run.oom_recovery == "split"
    yield (
        split and params.hardware.num_gpus > 1,
        f"run.oom_recovery: split does a step again, while other GPUs wait for its sums; got split with "
        f"hardware.num_gpus={params.hardware.num_gpus}; set it to none",
    )
    yield (
        split and params.train.optimizer_in_backward,
        "run.oom_recovery: split begins a step again, whose weights train.optimizer_in_backward=true has already "
        "changed; got split; set it to none, or that to false",
    )


def _optimizer_faults(train: Train, num_gpus: int) -> Iterator[tuple[bool, str]]:
    """Where the update is made, and when: faults of `_check_methods`."""
    yield (
        train.optimizer_in_backward and num_gpus > 1,
        f"train.optimizer_in_backward: updates one GPU's own gradients, which several share; got true with "
        f"hardware.num_gpus={num_gpus}; set train.optimizer_in_backward to false, or hardware.num_gpus to 1",
    )
    optimizer = OPTIMIZERS[train.optimizer]
    one_by_one = {
        "train.master_weights=true": train.master_weights,
        "train.offload=optimizer": train.offload == "optimizer",
        "train.optimizer_in_backward=true": train.optimizer_in_backward,
    }
    for switch, given in one_by_one.items():
        yield (
            given and optimizer.foreach,
            f"train.optimizer: {train.optimizer} updates all tensors at once, {switch} one by one; got "
            f"{train.optimizer}; use {optimizer.use_instead}",
        )
    yield (
        train.offload != "none" and optimizer.paged,
        f"train.optimizer: a paged one moves its state to the host by itself, train.offload={train.offload} keeps it "
        f"there; got {train.optimizer} with both; use {optimizer.use_instead}, or train.offload=none",
    )
    if train.optimizer_in_backward:
        yield (
            train.method != "full",
            f"train.optimizer_in_backward: frees gradients, which of adapters are small and looked at whole in the "
            f"first step; got true with train.method={train.method}; set it to false, or use train.method=full",
        )
        yield (
            train.max_grad_norm is not None,
            f"train.optimizer_in_backward: updates before the norm of all gradients is known; got true with "
            f"train.max_grad_norm={train.max_grad_norm}; leave train.max_grad_norm blank, or set it to false",
        )
        yield (
            train.precision == "fp16",
            "train.optimizer_in_backward: updates before fp16's overflow is known; got true with train.precision=fp16; "
            "use bf16 or fp32, or set it to false",
        )


def _check_sources(data: Data) -> None:
    """What only a hub has is refused where no hub could take it; pin_data refuses a split of what has none."""
    named = data.named_sources()
    named_columns = {
        column for columns in (data.columns, *(one.columns for _, one in named)) for column in (columns or {}).values()
    }
    for column in data.ignore_columns or []:
        if column in named_columns:
            raise UserError(
                f"data.ignore_columns: {column!r} is named in data.columns, which reads it; remove it there or here"
            )
    given = [
        (f"{place.rpartition('.')[0]}.{key}", getattr(one, key), [one])
        for place, one in named
        for key in ("revision", "config")
    ]
    everywhere = [one for _, one in named]
    given += [("data.revision", data.revision, everywhere), ("data.config", data.config, everywhere)]
    for dotted, value, sources in given:
        if value is not None and not any(one.source.startswith(HUB_PREFIX) for one in sources):
            raise UserError(
                f"{dotted}: only a hub source ({HUB_PREFIX}org/name) has one; got {value!r} with "
                f"{', '.join(repr(one.source) for one in sources[:3])}; leave it blank"
            )


def _check_heldout(params: Params) -> None:
    """What reads held-out rows is refused where there are none, and a share of rows where others are held out."""
    data, fraction = params.data, params.data.heldout_fraction
    for place, one in data.named_sources():
        if place.startswith(HELDOUT_SOURCE) and one.weight != 1.0:
            raise UserError(
                f"{place.rpartition('.')[0]}.weight: held-out rows are not trained; got {one.weight}; remove it"
            )
    if data.heldout_source is not None and fraction > 0:
        raise UserError(
            f"data.heldout_fraction: must be 0 beside {HELDOUT_SOURCE}, whose rows are held out in its place; got "
            f"{fraction}; set data.heldout_fraction=0"
        )
    if fraction > 0:
        return
    unread: dict[str, tuple[object, object]] = {"data.heldout_seed": (data.heldout_seed, 0)}
    if data.heldout_source is None:
        unread |= {
            "train.heldout_every_steps": (params.train.heldout_every_steps, None),
            "evaluate.loss_rows": (params.evaluate.loss_rows, None),
            "evaluate.generate_rows": (params.evaluate.generate_rows, 0),
            "evaluate.merged": (params.evaluate.merged, False),
        }
    given = {key: pair for key, pair in unread.items() if pair[0] != pair[1]}
    if given:
        values = ", ".join(f"{key}={json.dumps(value)}" for key, (value, _) in given.items())
        remedy = " ".join(f"-S {key}={json.dumps(blank)}" for key, (_, blank) in given.items())
        where = "" if data.heldout_source else f" and no {HELDOUT_SOURCE}"
        raise UserError(f"data.heldout_fraction: with 0{where} nothing reads {values}; set as well {remedy}")


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and check the whole of params.yaml.

    Raises:
        UserError: the file is missing, is not YAML, or breaks the schema.
    """
    # ruamel reads YAML 1.2 as DVC does: 1e-05 is a float, `no` is a string.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run from the repository's root") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"{path}:{mark.line + 1 if mark else 1}: not YAML; {getattr(error, 'problem', error)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable YAML file ({type(error).__name__}: {error}); mend it") from None
    return parse_params(values)
