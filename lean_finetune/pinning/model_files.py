"""The files of a model, which strangers may have made: each is checked before anything uses it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.file_names import is_name_inside
from lean_finetune.core.regular_files import refuse_irregular
from lean_finetune.pinning.config_file import (
    CONFIG_FILE,
    MOST_INDEX_BYTES,
    json_object,
    read_config_json,
    reason_of,
)
from lean_finetune.pinning.template_files import find_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG_FILES = (CONFIG_FILE, "generation_config.json")
TEXT_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Keys of tokenizer_config.json that name tokens which rows of text may get."""


def check_config(directory: Path) -> dict[str, Any]:
    """Read and check config.json; code that a model brings for a class of transformers is ignored.

    Raises UserError if it is not a JSON object, names no model type, or requires its own code.
    """
    path, config = directory / CONFIG_FILE, read_config_json(directory)
    for file in (path, directory / "tokenizer_config.json"):
        if file.exists() and "auto_map" in json_object(file) and not (file == path and _in_transformers(config)):
            raise UserError(
                f"model.name: {file} requires its own code (auto_map), which is never run; use a model whose "
                "architecture is part of transformers, or remove auto_map if it is"
            )
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"model.name: {path} names no model_type; save the model again with save_pretrained(...)")
    return config


def _in_transformers(config: dict[str, Any]) -> bool:
    """Whether transformers has a model's class, as it has DeepSeek-V3's and Phi-3's, which name their own code too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type"))) in (config.get("architectures") or ())


def load_tokenizer(directory: Path) -> "Tokenizer":
    """The tokenizer in a model's directory. Raises UserError if its file is damaged."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        refuse_irregular(path)
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception
        reason = reason_of(path, error)
        raise UserError(f"model.name: {path} is not a tokenizer ({reason}); save or download it again") from error


def trained_ids(directory: Path, tokens: Iterable[str | int]) -> list[int]:
    """The sorted ids of train.lora.trainable_tokens by the tokenizer in a model's directory.

    Raises UserError if the tokenizer lacks one.
    """
    tokenizer, ids = load_tokenizer(directory), set()
    for token in tokens:
        number = tokenizer.token_to_id(token) if isinstance(token, str) else token
        if number is None or tokenizer.id_to_token(number) is None:
            raise UserError(
                f"train.lora.trainable_tokens: must be tokens of {directory / 'tokenizer.json'} or their ids; got "
                f"{token!r}; add it to the tokenizer (add_tokens, then save_pretrained), or leave it out"
            )
        ids.add(number)
    return sorted(ids)


def check_tokenizer(directory: Path, config: dict[str, Any], tokens: Iterable[str | int] = ()) -> list[int]:
    """Load the tokenizer's files, so that damaged ones are not pinned, and compare its ids with the vocabulary's size.

    Returns the ids of the trained `tokens`, which may be beyond that size.

    Raises UserError if a file cannot be read, or the model has no embedding for an id that is not trained.
    """
    path, tokenizer = directory / "tokenizer.json", load_tokenizer(directory)
    if (special := directory / "special_tokens_map.json").exists():
        json_object(special)
    find_template(directory)
    ids = trained_ids(directory, tokens) if tokens else []
    largest_id = max(_used_ids(tokenizer, directory).difference(ids), default=-1)
    text_config = config.get("text_config")
    vocab_size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if isinstance(vocab_size, int) and largest_id >= vocab_size:
        raise UserError(
            f"model.name: {path} makes ids up to {largest_id} but config.json has vocab_size {vocab_size}; name new "
            "tokens in train.lora.trainable_tokens, resize the model's embeddings, or use its own tokenizer"
        )
    return ids


def read_stop_ids(directory: Path, config: dict[str, Any]) -> list[int]:
    """The ids at which generation stops: of generation_config.json, else of config.json; may be empty.

    Raises UserError if generation_config.json is no JSON object.
    """
    path = directory / "generation_config.json"
    generation = json_object(path) if path.exists() else {}
    text_config = config.get("text_config")
    sections = (generation, config, text_config if isinstance(text_config, dict) else {})
    given: Any = next((one["eos_token_id"] for one in sections if one.get("eos_token_id") is not None), [])
    return [*dict.fromkeys(number for number in (given if isinstance(given, list) else [given]) if type(number) is int)]


def _used_ids(tokenizer: "Tokenizer", directory: Path) -> set[int]:
    """The ids that rows can get: those of special tokens only if a role of text or the chat template names them.

    Text of rows never becomes a special token, and Gemma 3 1B has one behind its vocabulary.
    """
    roles: dict[str, Any] = {}
    for file in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        roles |= json_object(file) if file.exists() else {}
    template = find_template(directory)
    source = "" if template is None else template.source + template.tool_source
    tokens = [roles[role] for role in roles if role in TEXT_ROLES or (role.endswith("_token") and role in source)]
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    named = {text for text in texts if isinstance(text, str)}
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    unused = {number for number, token in special.items() if token not in named and token not in source}
    return set(tokenizer.get_vocab(with_added_tokens=True).values()) - unused


def shard_names(directory: Path) -> list[str]:
    """The names of a model's weight files in order, from the index where there is one.

    Raises UserError if the index is damaged, or names other files than safetensors files in its directory.
    """
    index = directory / INDEX
    if not index.exists():
        return [WEIGHTS]
    weight_map = json_object(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"model.name: {index} has no weight_map; save or download the model again")
    for name in weight_map.values():
        if not is_name_inside(name) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"model.name: {index} names {shortened(repr(name))}; shards must be .safetensors files in its directory"
            )
    return sorted({*weight_map.values()})


def check_weights(path: Path) -> None:
    """Check the header of a safetensors file: its tensors must cover the file without gaps.

    Raises UserError if the file is missing, damaged or has no tensors.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"model.name: {path}, which {INDEX} names, is missing; download the model again")
    try:
        with safe_open(str(path), framework="np") as file:
            tensors = len(file.keys())
    except (SafetensorError, OSError) as error:
        reason = reason_of(path, error)
        raise UserError(f"model.name: {path} is damaged ({reason}); download or save it again") from error
    if tensors == 0:
        raise UserError(f"model.name: {path} has no tensors; download or save it again")
