"""Pin the model: check that its files suit this project, and lock them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_finetune.core.atomic_files import find_source, sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_source import pin_adapter
from lean_finetune.pinning.config_file import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    IS_ADAPTER,
    MOST_INDEX_BYTES,
    NAME_BASE,
    json_object,
    read_config_json,
    refuse_adapter,
    vision_patch,
)
from lean_finetune.pinning.data_source import refuse_unignored
from lean_finetune.pinning.hub import HUB_ID, download, list_files
from lean_finetune.pinning.locate import TINY, TINY_DIRECTORY, TOKENIZER_FILES, example_names
from lean_finetune.pinning.watched_links import NOTHING_LOCAL, watch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception
        raise UserError(f"model.name: {path} is not a tokenizer ({error}); save or download it again") from error


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
    template = directory / "chat_template.jinja"
    try:
        if template.exists():
            template.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"model.name: {template} is not UTF-8 text ({error}); save it as UTF-8") from error
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

    Text of rows never becomes a special token, and Gemma 3 1B has one for images behind its vocabulary.
    """
    config, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    roles: dict[str, Any] = {}
    for file in (directory / "special_tokens_map.json", config):
        roles |= json_object(file) if file.exists() else {}
    source = template.read_text(encoding="utf-8") if template.exists() else str(roles.get("chat_template"))
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
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"model.name: {index} names {name!r}; shards must be .safetensors files in its directory")
    return names


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
        raise UserError(f"model.name: {path} is damaged ({error}); download or save it again") from error
    if tensors == 0:
        raise UserError(f"model.name: {path} has no tensors; download or save it again")


# Pinning of the model: a local directory by the content of its files, a hub id by its commit.

CONFIG_FILES = (CONFIG_FILE, "generation_config.json")


def pin_model(
    name: str,
    revision: str | None,
    locks: Path,
    *,
    adapter: str | None = None,
    adapter_revision: str | None = None,
    tokens: Sequence[str | int] = (),
) -> None:
    """Write locks/model.json and locks/tokenizer.json; link the model and an adapter as locks/watched-model, -adapter.

    The tokenizer's lock has content hashes, the tokens at which generation stops, the size of a vision tower's patches,
    and no names, so that a model with the same tokenizer does not tokenize again. The model's lock has the ids of the
    trained `tokens`, if there are any.

    Raises UserError if the model is missing, unsafe (pickle, custom code), incomplete, damaged, cannot be reached, or
    is in the checkout where git neither tracks nor ignores it.
    """
    local = TINY_DIRECTORY if name == TINY else find_source(name)
    commit = None
    if not local.is_dir():
        kind, watched = "hub", NOTHING_LOCAL
        commit, files, tokenizer, ids = _pin_hub(name, revision, tokens)
    elif revision is not None:
        raise UserError(
            f"model.revision: only a hub model has revisions; got {revision!r} with model.name={name!r}; "
            "leave model.revision blank"
        )
    else:
        # The shipped model is a part of the library, which pin_code watches.
        kind, watched = (TINY, NOTHING_LOCAL) if name == TINY else ("directory", local)
        if name != TINY:
            refuse_unignored("model.name", name, (path for path in local.iterdir() if path.is_file()))
        files, tokenizer, ids = _pin_directory(local, tokens)
    lock: dict[str, Any] = {"kind": kind, "name": name, "revision": commit, "files": files}
    lock |= {"tokenizer_files": sorted(tokenizer["files"])} | ({"trained_tokens": ids} if ids else {})
    watched_adapter = NOTHING_LOCAL
    if adapter is not None:
        lock["adapter"], watched_adapter = pin_adapter(adapter, adapter_revision, lock)
    write_json(locks / "model.json", lock)
    write_json(locks / "tokenizer.json", tokenizer)
    watch(locks / "watched-model", watched)
    watch(locks / "watched-adapter", watched_adapter)


Pinned = tuple[dict[str, str], dict[str, Any], list[int]]
"""Hashes of the model's files, the content of the tokenizer's lock, and the ids that are trained."""


def _tokenizer_lock(files: dict[str, str], directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The content of locks/tokenizer.json; `files` are hashes of the tokenizer's files."""
    patch = vision_patch(config)
    lock = {"files": files, "stop_ids": read_stop_ids(directory, config)}
    return lock if patch is None else {**lock, "vision_patch": patch}


def _pin_directory(directory: Path, tokens: Sequence[str | int]) -> Pinned:
    """Check a local directory."""
    names = {path.name for path in directory.iterdir() if path.is_file()}
    if CONFIG_FILE not in names:
        refuse_adapter(directory, str(directory))
    _check_names(names, str(directory))
    config = check_config(directory)
    ids = check_tokenizer(directory, config, tokens)
    shards = shard_names(directory)
    for shard in shards:
        check_weights(directory / shard)

    def hashes(wanted: Iterable[str]) -> dict[str, str]:
        return {name: sha256_file(directory / name) for name in wanted if name in names}

    return hashes([*CONFIG_FILES, INDEX, *shards]), _tokenizer_lock(hashes(TOKENIZER_FILES), directory, config), ids


def _pin_hub(name: str, revision: str | None, tokens: Sequence[str | int]) -> tuple[str, *Pinned]:
    """A hub model's commit, and what is pinned. Small files are downloaded and checked."""
    if name in example_names():
        raise UserError(
            f"model.name: {name} is a configuration without weights, for predictions; name the model itself"
        )
    if not HUB_ID.fullmatch(name):
        raise UserError(
            f"model.name: must be {TINY}, an existing directory, or a hub id org/name; got {name!r}; check the path"
        )
    commit, everything = list_files("model.name", name, "model", revision)
    blobs = {path: blob_id for path, (_, blob_id) in everything.items()}
    _check_names(set(blobs), f"{name} at {commit[:12]}")
    small = [file for file in (*CONFIG_FILES, INDEX, *TOKENIZER_FILES) if file in blobs]
    directory = download("model.name", name, "model", commit, small)
    config = check_config(directory)
    ids = check_tokenizer(directory, config, tokens)
    wanted = [file for file in (*CONFIG_FILES, INDEX) if file in blobs] + shard_names(directory)
    if missing := [file for file in wanted if file not in blobs]:
        raise UserError(f"model.name: {INDEX} of {name} names {missing[0]}, which it lacks; name another revision")
    tokenizer = {file: blobs[file] for file in TOKENIZER_FILES if file in blobs}
    return commit, {file: blobs[file] for file in wanted}, _tokenizer_lock(tokenizer, directory, config), ids


def _check_names(names: set[str], where: str) -> None:
    """Refuse a model without a required file, or with pickled weights."""
    if CONFIG_FILE not in names and ADAPTER_CONFIG in names:
        raise UserError(f"model.name: {where} {IS_ADAPTER}; {NAME_BASE}")
    if CONFIG_FILE not in names:
        raise UserError(f"model.name: {where} has no config.json; name a directory that transformers saved")
    if "tokenizer.json" not in names:
        raise UserError(
            f"model.name: {where} has no tokenizer.json; save its fast tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if WEIGHTS not in names and INDEX not in names:
        pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise UserError(
            f"model.name: {where} has no {WEIGHTS} or {INDEX}{found}; save the model with "
            "save_pretrained(...), which writes safetensors"
        )
