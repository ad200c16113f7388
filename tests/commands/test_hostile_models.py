"""Damaged and foreign models in chat, generate and export: one line each, and nothing written."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_finetune.commands.chat import chat
from lean_finetune.commands.export import export
from lean_finetune.commands.generate import generate
from lean_finetune.commands.tuned.conversation import Prompter
from lean_finetune.commands.tuned.tuned_model import find_tuned
from lean_finetune.pinning.locate import TINY_DIRECTORY
from tests.workspace import error, invoke

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE, TOKENIZER = "model.safetensors", "tokenizer.json"
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
DEEP = "[" * 3000 + "]" * 3000
NOT_UTF8 = b'{"a": "\xff"}'
ENDLESS = r"([a-z_]+\.?)+!"
"""Python's `re` takes longer than the world has existed to see that no layer matches."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Change = Callable[[Path], object]


def content(name: str, data: str | bytes) -> Change:
    """Replace a file."""
    return lambda directory: (directory / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def keys(name: str, **values: Any) -> Change:
    """Change keys of a JSON file."""

    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))

    return change


def cut(name: str, size: int) -> Change:
    """Cut a file short."""
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - size)


def without(name: str, *others: Change) -> Change:
    """Remove a file, then make other changes."""

    def change(directory: Path) -> None:
        (directory / name).unlink()
        for each in others:
            each(directory)

    return change


def tensors(made: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Replace an adapter's tensors."""
    return lambda directory: save_file(made(load_file(directory / WEIGHTS)), directory / WEIGHTS)


OTHER = "base_model.model.model.layers.0.mlp.experts.0.up_proj"


def pair_of(rank: int, size: int) -> dict[str, torch.Tensor]:
    """The matrices of an adapter, by side."""
    return {"A": torch.zeros(rank, size), "B": torch.zeros(size, rank)}


def far_token(directory: Path) -> None:
    """Add the row of a token far beyond the vocabulary, which would be as large as all rows before it."""
    keys(CONFIG, trainable_token_indices={"embed_tokens": [10**7]})(directory)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors(lambda all: {**all, name: torch.zeros(1, 64)})(directory)


def pickled(name: str) -> Change:
    return lambda directory: torch.save({}, directory / name)


def index(text: str) -> Change:
    return content("model.safetensors.index.json", text)


ADAPTERS: dict[str, tuple[Change, str]] = {
    "weights cut short": (cut(WEIGHTS, 100), f"{WEIGHTS} is damaged"),
    "weights empty": (content(WEIGHTS, b""), f"{WEIGHTS} is damaged"),
    "weights are noise": (content(WEIGHTS, b"\x01" * 500), f"{WEIGHTS} is damaged"),
    "a header of 4 EiB": (content(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"), f"{WEIGHTS} is damaged"),
    "no weights": (without(WEIGHTS), f"{WEIGHTS} is missing; save the weights as safetensors"),
    "a pickle": (without(WEIGHTS, pickled("adapter_model.bin")), "is missing (only adapter_model.bin, a pickle"),
    "weights are a directory": (without(WEIGHTS, lambda d: (d / WEIGHTS).mkdir()), f"{WEIGHTS} is missing"),
    "integers": (tensors(lambda all: {k: v.long() for k, v in all.items()}), "adapters have floating-point numbers"),
    "half of a pair": (tensors(lambda all: dict(list(all.items())[:5])), "up_proj.lora_B.weight; download"),
    "another rank": (keys(CONFIG, r=5), "says rank 5; download"),
    "DoRA without lengths": (keys(CONFIG, use_dora=True), "lora_magnitude_vector; download"),
    "IA3": (keys(CONFIG, peft_type="IA3", feedforward_modules=[]), "(peft_type: Input should be 'LORA'; got 'IA3')"),
    "prefixes": (keys(CONFIG, peft_type="PREFIX_TUNING", num_virtual_tokens=4), "got 'PREFIX_TUNING')"),
    "prompt tuning": (keys(CONFIG, peft_type="PROMPT_TUNING", num_virtual_tokens=4), "got 'PROMPT_TUNING')"),
    "an unknown kind": (keys(CONFIG, peft_type=None), "(peft_type: Input should be 'LORA'; got None)"),
    "a classifier": (keys(CONFIG, task_type="SEQ_CLS"), "is a reward model, which writes no text"),
    "needs Megatron": (keys(CONFIG, megatron_config={"a": 1}), "(megatron_config: "),
    "config empty": (content(CONFIG, "{}"), "(base_model_name_or_path: Field required; got {})"),
    "config a list": (content(CONFIG, "[]"), f"{CONFIG} must be a JSON object; got list"),
    "config not JSON": (content(CONFIG, "{"), f"{CONFIG} is not JSON"),
    "config not UTF-8": (content(CONFIG, NOT_UTF8), f"{CONFIG} is not JSON"),
    "config nested": (content(CONFIG, DEEP), f"{CONFIG} is not JSON (nested too deeply)"),
    "config of 17 MB": (content(CONFIG, '{"a": "' + "x" * (1 << 24) + '"}'), f"{CONFIG} has more than 16777216 bytes"),
    "rank as text": (keys(CONFIG, r="8"), "(r: Input should be a valid integer; got '8')"),
    "rank 0": (keys(CONFIG, r=0), "(r: Input should be greater than or equal to 1; got 0)"),
    "scale as text": (keys(CONFIG, lora_alpha="x"), "(lora_alpha"),
    "targets a number": (keys(CONFIG, target_modules=5), "(target_modules"),
    "targets objects": (keys(CONFIG, target_modules=[{"a": 1}]), "(target_modules"),
    "no targets": (keys(CONFIG, target_modules=None), "(target_modules: must name the adapted layers)"),
    "ranks a list": (keys(CONFIG, rank_pattern=[1]), "(rank_pattern: Input should be a valid dictionary"),
    "ranks as text": (keys(CONFIG, rank_pattern={"q_proj": "x"}), "(rank_pattern.q_proj: "),
    "no base": (keys(CONFIG, base_model_name_or_path=None), "(base_model_name_or_path: "),
    "base a number": (keys(CONFIG, base_model_name_or_path=5), "(base_model_name_or_path: "),
    "base gone": (keys(CONFIG, base_model_name_or_path="/gone"), "got '/gone', which does not exist"),
    "base elsewhere": (keys(CONFIG, base_model_name_or_path="../../x"), "got '../../x', which does not exist"),
    "base an option": (keys(CONFIG, base_model_name_or_path="--x/y"), "got '--x/y', which does not exist"),
    "a command": (keys(CONFIG, revision="x; touch PWN"), "got 'x; touch PWN')"),
    "a revision of lines": (keys(CONFIG, revision="x\n- y"), "(revision: "),
    "endless targets": (keys(CONFIG, target_modules=ENDLESS), "names no layer of the model"),
    "endless exclusion": (keys(CONFIG, exclude_modules=f"{ENDLESS}|.*"), "names no layer of the model"),
    "a token far away": (far_token, "has a row for token 10000000, and the model has "),
    "pissa": (keys(CONFIG, init_lora_weights="pissa_niter_100000000"), "pissa_niter_100000000, which changed"),
    "more layers than weights": (keys(CONFIG, target_modules=[*TARGETS, "lm_head"]), "has no tensors of lm_head of ra"),
    "fewer layers than weights": (keys(CONFIG, target_modules=["q_proj"]), "which adapter_config.json does not name"),
    "base weights not UTF-8": (content("base_weights.json", NOT_UTF8), "base_weights.json is not JSON"),
    "base weights a list": (content("base_weights.json", "[]"), "base_weights.json must be a JSON object"),
}
"""Changes of an adapter's directory, and a part of the refusal."""

MODELS: dict[str, tuple[Change, str]] = {
    "tokenizer empty": (content(TOKENIZER, "{}"), f"{TOKENIZER} is not a tokenizer"),
    "tokenizer a list": (content(TOKENIZER, "[]"), f"{TOKENIZER} is not a tokenizer"),
    "tokenizer nested": (content(TOKENIZER, DEEP), f"{TOKENIZER} is not a tokenizer"),
    "tokenizer not UTF-8": (content(TOKENIZER, NOT_UTF8), f"{TOKENIZER} is not a tokenizer"),
    "tokenizer without tokens": (
        content(TOKENIZER, '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
        "has no tokens",
    ),
    "no tokenizer": (without(TOKENIZER), "has no tokenizer.json"),
    "settings not JSON": (content(SETTINGS, "{"), f"{SETTINGS} is not JSON"),
    "settings a list": (content(SETTINGS, "[]"), f"{SETTINGS} must be a JSON object; got list"),
    "settings not UTF-8": (content(SETTINGS, NOT_UTF8), f"{SETTINGS} is not JSON"),
    "settings nested": (content(SETTINGS, DEEP), f"{SETTINGS} is not JSON"),
    "unknown end of text": (keys(SETTINGS, eos_token="<nope>"), "eos_token '<nope>' of"),
    "special tokens a list": (content("special_tokens_map.json", "[1]"), "must be a JSON object"),
    "template broken": (content(TEMPLATE, "{% for %}"), f"{TEMPLATE} is broken (line 1: "),
    "template raises": (content(TEMPLATE, "{{ raise_exception('no') }}"), "(TemplateError: no)"),
    "template of nothing": (content(TEMPLATE, "{{ foo.bar.baz }}"), "(UndefinedError: 'foo' is undefined)"),
    "template not UTF-8": (content(TEMPLATE, b"\xff"), f"{TEMPLATE} is not UTF-8 text"),
    "template a directory": (without(TEMPLATE, lambda d: (d / TEMPLATE).mkdir()), f"{TEMPLATE} is not UTF-8 text"),
    "template recurses": (content(TEMPLATE, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "recurses without end"),
    "template of a gigabyte": (content(TEMPLATE, "{{ 'x' * 10**9 }}"), "too much memory"),
    "template nested": (content(TEMPLATE, "{% if 1 %}" * 500 + "{% endif %}" * 500), f"{TEMPLATE} nests more than"),
    "template writes marks": (content(TEMPLATE, "\ufdd29\ufdd3{{ messages[0].content }}"), "U+FDD0 to U+FDD3"),
    "template writes surrogates": (content(TEMPLATE, "{{ '\\ud800' }}"), "lone surrogates"),
    "weights cut short": (cut(BASE, 10), f"{BASE} is damaged"),
    "weights empty": (content(BASE, b""), f"{BASE} is damaged"),
    "no weights": (without(BASE), f"{BASE} is missing; save"),
    "a pickle": (without(BASE, pickled("pytorch_model.bin")), "is missing (only pytorch_model.bin, a pickle"),
    "index leads out": (index('{"weight_map": {"a": "../x.safetensors"}}'), "names '../x.safetensors'; shards must be"),
    "index of a number": (index('{"weight_map": {"a": 5}}'), "names 5; shards must be"),
    "index without files": (index('{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors is missing"),
    "index empty": (index("{}"), "has no weight_map"),
    "index nested": (index(DEEP), "is not JSON"),
    "config not UTF-8": (content("config.json", NOT_UTF8), "config.json"),
    "config not JSON": (content("config.json", "{"), "config.json"),
    "config nested": (content("config.json", DEEP), "config.json"),
    "config of another type": (keys("config.json", dtype=["x"]), "config.json"),
    "generation not JSON": (content("generation_config.json", "{"), "generation_config.json is not JSON"),
    "generation a list": (content("generation_config.json", "[]"), "generation_config.json must be a JSON object"),
    "generation nested": (content("generation_config.json", DEEP), "generation_config.json is not JSON"),
    "end of text as text": (
        keys("generation_config.json", eos_token_id="x"),
        "eos_token_id must be token ids; got 'x'",
    ),
}
"""Changes of a full model's directory, and a part of the refusal."""

PROMPTS = {
    '{"prompt": ""}': "the prompt has no tokens",
    '{"messages": []}': "the chat template refuses the row",
    '{"messages": [5]}': "must have 'messages', a list of messages",
    '{"messages": [{"role": "user", "content": null}]}': "the chat template refuses the row",
    '{"messages": [{"role": "user", "content": "a"}], "tools": 5}': "the chat template refuses the row",
    '{"prompt": "a", "x": ' + DEEP + "}": "nested too deep",
    '{"messages": [{"role": "user", "content": ' + "[" * 900 + "]" * 900 + "}]}": "nested too deep",
    '{"prompt": "a", "x": ' + "1" * 5000 + "}": "has an integer of more than",
    '{"prompt": "a", "prompt": "b"}': "comes twice",
    "[1]": "a row must be a JSON object",
    "null": "a row must be a JSON object",
}
"""Lines of a file of prompts, and a part of the refusal."""


def damaged(original: Path, change: Change, directory: Path) -> Path:
    """A copy of a model with a change."""
    shutil.copytree(original, directory)
    change(directory)
    return directory


def refusals(directory: Path, tmp_path: Path, *options: str) -> set[str]:
    """The refusals of the three commands, which write nothing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "One"}]}\n')
    model = ("--model", str(directory), *options)
    short = ("--max-new-tokens", "2")
    results = [
        invoke(chat, *model, *short),
        invoke(generate, str(prompts), str(tmp_path / "answers.jsonl"), *model, *short),
        invoke(export, str(tmp_path / "out"), *model),
    ]
    before = {directory.name, "prompts.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == before, "half-written output"
    return {error(result) for result in results}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_damaged_or_foreign_adapter_is_refused_in_one_line(name: str, adapter: Path, tmp_path: Path):
    """A traceback of PEFT, or an adapter that is silently not applied."""
    change, expected = ADAPTERS[name]
    directory = damaged(adapter, change, tmp_path / "model")
    found = refusals(directory, tmp_path, *(() if name.startswith("base weights") else ("--bits", "16")))
    assert len(found) == 1 and expected in (text := found.pop()) and text.startswith("--model: "), text


def test_an_adapter_with_weights_of_layers_that_the_model_lacks_is_refused(adapter: Path, tmp_path: Path):
    """Adapters of single experts, as older transformers had them: PEFT left them out, and the rest answered."""
    pair = {f"{OTHER}.lora_{side}.weight": one for side, one in pair_of(4, 128).items()}
    directory = damaged(adapter, tensors(lambda all: {**all, **pair}), tmp_path / "model")
    found = refusals(directory, tmp_path, "--bits", "16")
    assert len(found) == 2 and any("up_proj.lora_A.weight, for which the model has no place" in one for one in found)
    assert any("has no weight for model.layers.0.mlp.experts.0.up_proj, which has an adapter" in one for one in found)


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_or_foreign_model_is_refused_in_one_line(name: str, tmp_path: Path):
    """A traceback of transformers, tokenizers or Jinja, or a damaged model that is exported."""
    change, expected = MODELS[name]
    found = refusals(damaged(TINY_DIRECTORY, change, tmp_path / "model"), tmp_path)
    assert found and all(expected in text and text.startswith("--model: ") for text in found), found


@pytest.mark.parametrize("line", PROMPTS, ids=lambda line: line[:40])
def test_a_hostile_prompt_is_named_by_its_line(line: str, tmp_path: Path):
    """A traceback of the model's first layer, or of Python's parser."""
    (tmp_path / "p.jsonl").write_text(line + "\n")
    refusal = error(invoke(generate, str(tmp_path / "p.jsonl"), str(tmp_path / "a"), "--model", str(TINY_DIRECTORY)))
    assert refusal.startswith(f"{tmp_path}/p.jsonl:1: ") and PROMPTS[line] in refusal, refusal


def test_lone_surrogates_of_prompts_are_answered_and_written_back(tmp_path: Path):
    """An answer to every line but the one with half an emoji, after an hour; and the file is not written at all."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\ud800b", "\\udfff": "é"}\n{"prompt": "é"}\n')
    arguments = (str(tmp_path / "p.jsonl"), str(tmp_path / "a.jsonl"), "--model", str(TINY_DIRECTORY))
    assert invoke(generate, *arguments, "--max-new-tokens", "2").exit_code == 0
    first, second = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(first)["prompt"] == "a\ud800b" and json.loads(first)["\udfff"] == "é"
    assert json.loads(second)["prompt"] == "é" and "é" in second


def test_bytes_that_are_not_text_in_standard_input_are_answered():
    """A traceback in the middle of a conversation."""
    from click.testing import CliRunner

    arguments = ["--model", str(TINY_DIRECTORY), "--max-new-tokens", "2"]
    assert CliRunner().invoke(chat, arguments, input=b"caf\xe9?\n", catch_exceptions=False).exit_code == 0


def test_weights_of_another_shape_are_named(tmp_path: Path):
    """A table of transformers, or a reason that points at it."""
    for change in (keys("config.json", num_hidden_layers=9), keys("config.json", intermediate_size=200)):
        directory = damaged(TINY_DIRECTORY, change, tmp_path / "model")
        result = invoke(chat, "--model", str(directory), "--max-new-tokens", "2")
        assert "model.layers." in error(result) and "do not belong to config.json" in error(result)
        shutil.rmtree(directory)


def test_a_token_without_an_embedding_is_refused(tmp_path: Path):
    """An index error of the embedding, on a GPU one that ends the process."""
    added = json.loads((TINY_DIRECTORY / TOKENIZER).read_text())
    added["added_tokens"].append({**added["added_tokens"][-1], "id": 5000, "content": "<new>", "special": False})
    directory = damaged(TINY_DIRECTORY, content(TOKENIZER, json.dumps(added)), tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a <new> b"}\n')
    refusal = error(invoke(generate, str(tmp_path / "p.jsonl"), str(tmp_path / "a"), "--model", str(directory)))
    assert "the model has no embedding for the token '<new>'" in refusal


def test_an_adapter_whose_layers_have_no_weights_is_refused(adapter: Path, tmp_path: Path):
    """PEFT warns, and those layers answer as the base does."""
    change = tensors(lambda all: {key: value for key, value in all.items() if "layers.0" not in key})
    directory = damaged(adapter, change, tmp_path / "model")
    result = invoke(chat, "--model", str(directory), "--bits", "16", "--max-new-tokens", "2")
    assert "has no tensors of model.layers.0." in error(result)


def test_printed_commands_are_quoted(adapter: Path, tmp_path: Path):
    """A line to copy that runs another command."""
    from lean_finetune.commands.export import use_lines

    tuned = find_tuned(adapter, "16")
    where = f"{tmp_path}/it's; touch PWN"
    for what in ("merged", "adapter"):
        for program, line in use_lines(tuned, where, what):
            if program in ("vLLM", "llama.cpp", "Ollama"):
                assert "'" in line and "; touch PWN" not in _unquoted(line), line


def _unquoted(line: str) -> str:
    """What a shell would not take as one word."""
    import re

    return re.sub(r"'[^']*'|\"[^\"]*\"", "", line)


def test_names_of_a_model_write_no_lines_into_the_modelfile(tmp_path: Path):
    """An architecture or a token with a line end, which adds an instruction of the stranger's."""
    directory = damaged(TINY_DIRECTORY, keys("config.json", architectures=["X\nADAPTER /x"]), tmp_path / "model")
    content(TEMPLATE, "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{{ '{{ .X }}' }}")(directory)
    assert invoke(export, str(tmp_path / "out"), "--model", str(directory)).exit_code == 0
    text = (tmp_path / "out/Modelfile").read_text()
    assert "\nADAPTER" not in text and "{{ .X }}" not in text and "TEMPLATE" not in text


@pytest.mark.parametrize("name", ["merges.txt", TEMPLATE])
def test_a_link_to_another_file_of_this_machine_is_not_exported(name: str, tmp_path: Path):
    """`merges.txt -> ~/.ssh/id_rsa` in a stranger's directory, uploaded by --push."""
    (tmp_path / "id_rsa").write_text("secret {{ messages }}")
    directory = damaged(TINY_DIRECTORY, lambda d: (d / name).unlink(missing_ok=True), tmp_path / "model")
    (directory / name).symlink_to(tmp_path / "id_rsa")
    refusal = error(invoke(export, str(tmp_path / "out"), "--model", str(directory)))
    assert f"{name} is a link to {tmp_path}/id_rsa" in refusal and not (tmp_path / "out").exists()


def test_links_of_the_caches_of_the_hub_and_of_dvc_are_exported(tmp_path: Path):
    """A refusal of each model that the hub's client has downloaded."""
    directory = damaged(TINY_DIRECTORY, lambda d: None, tmp_path / "model")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        blob = file.rename(tmp_path / "blobs" / f"{number:040x}")
        file.symlink_to(blob)
    assert invoke(export, str(tmp_path / "out"), "--model", str(directory)).exit_code == 0
    assert not (tmp_path / "out" / BASE).is_symlink()
    assert Prompter(tmp_path / "out").stops() == Prompter(TINY_DIRECTORY).stops()
