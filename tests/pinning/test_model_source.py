"""Pinning of the model: only complete and safe models are accepted; an error is one line."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import model_directory, tokenizer_directory, verify_files
from lean_finetune.pinning.model_files import read_stop_ids, shard_names
from stages.pin import main
from tests.processes import run_bounded
from tests.workspace import error, invoke, lay_out

LINK = Path("locks/watched-model")


@pytest.fixture
def pin(workspace):
    """A function that sets model values and pins the model."""

    def run(name, revision=None):
        lay_out(workspace, model__name=str(name), model__revision=revision)
        return invoke(main, "model")

    return run


@pytest.fixture
def own(workspace, tiny_dir) -> Path:
    """A copy of the shipped model that a test may damage."""
    return shutil.copytree(tiny_dir, workspace / "own")


def test_tiny_is_pinned_by_content_and_read_from_the_package(pin, tiny_dir):
    assert pin("tiny").exit_code == 0
    lock = read_json(Path("locks/model.json"))
    assert (lock["kind"], lock["name"], lock["revision"]) == ("tiny", "tiny", None)
    assert set(lock["files"]) == {"config.json", "generation_config.json", "model.safetensors"}
    assert model_directory(lock) == tokenizer_directory(lock) == tiny_dir
    verify_files(tiny_dir, lock["files"])
    verify_files(tiny_dir, read_json(Path("locks/tokenizer.json"))["files"])
    assert os.readlink(LINK) == "README.md"


def test_a_model_with_the_same_tokenizer_has_the_same_tokenizer_lock(pin, own):
    """Otherwise another size of the same family would tokenize everything again."""
    pin("tiny")
    before = Path("locks/tokenizer.json").read_bytes()
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    assert pin("own").exit_code == 0
    assert Path("locks/tokenizer.json").read_bytes() == before
    lock = read_json(Path("locks/model.json"))
    assert (lock["kind"], model_directory(lock)) == ("directory", Path("own"))


@pytest.mark.parametrize(
    ("vision", "patch"),
    [({"patch_size": 14}, [14, 14]), ({"patch_size": [14, 7]}, [14, 7]), ({}, None), ({"patch_size": "14"}, None)],
    ids=str,
)
def test_the_patches_of_a_vision_tower_are_pinned_with_the_tokenizer(pin, own, vision, patch):
    """Two models with one processor and other patches would share tokens, whose index has the patches of each row."""
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    assert pin("own").exit_code == 0
    assert read_json(Path("locks/tokenizer.json")).get("vision_patch") == patch


@pytest.mark.parametrize(
    "generation, config, stops",
    [
        ({"eos_token_id": [7, 3, 7]}, {"eos_token_id": 5}, [7, 3]),
        ({"eos_token_id": 7}, {}, [7]),
        ({}, {"eos_token_id": 5}, [5]),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": [5, 6]}}, [5, 6]),
        (None, {"eos_token_id": None}, []),
        ({"eos_token_id": ["7", True]}, {}, []),
    ],
)
def test_the_tokens_at_which_generation_stops_are_pinned(tmp_path, generation, config, stops):
    """An answer must end with one of them: data.end_of_turn."""
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_stop_ids(tmp_path, config) == stops


def test_a_changed_file_is_refused_before_use(pin, own):
    pin("own")
    (own / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer_config.json changed since it was pinned; run `dvc repro` again"):
        verify_files(own, read_json(Path("locks/tokenizer.json"))["files"])
    (own / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json cannot be read"):
        verify_files(own, read_json(Path("locks/tokenizer.json"))["files"])


def test_a_file_that_changes_while_it_is_read_is_refused(pin, own):
    """Other weights than the pinned ones, in a run that says otherwise."""
    pin("own")
    read = verify_files(own, read_json(Path("locks/model.json"))["files"])
    read.refuse_change()
    path = own / "config.json"
    path.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="config.json changed while it was read; run `dvc repro` again"):
        read.refuse_change()


def test_a_sharded_model_is_pinned_with_its_index_and_no_other_file(pin, own):
    (own / "model.safetensors").rename(own / "model-00001-of-00002.safetensors")
    save_file({"extra": np.zeros(4, np.float32)}, own / "model-00002-of-00002.safetensors")
    save_file({"unused": np.zeros(4, np.float32)}, own / "other.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "extra": "model-00002-of-00002.safetensors"}
    index = own / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert pin("own").exit_code == 0
    named = {*shards.values(), index.name}
    assert {name for name in read_json(Path("locks/model.json"))["files"] if "safetensors" in name} == named
    (own / shards["extra"]).unlink()
    assert "model-00002-of-00002.safetensors, which model.safetensors.index.json names, is missing" in error(pin("own"))
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "shards must be .safetensors files in its directory" in error(pin("own"))
    index.write_text("{}")
    assert "has no weight_map" in error(pin("own"))


def remove(name):
    return lambda own: (own / name).unlink()


def resize_weights(change):
    weights = "model.safetensors"
    return lambda own: (own / weights).write_bytes(change((own / weights).read_bytes()))


def test_the_index_of_a_huge_model_is_read(tmp_path):
    """That of a model of 700 B parameters was refused, because other JSON files of models are small."""
    names = {
        f"model.layers.{n // 400}.mlp.experts.{n % 400}.gate_proj.weight_scale_inv": n % 90 for n in range(150_000)
    }
    weight_map = {name: f"model-{shard:05}-of-00090.safetensors" for name, shard in names.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(shard_names(tmp_path)) == 90


def edit(name, **values):
    return lambda own: (own / name).write_text(json.dumps(json.loads((own / name).read_text()) | values))


def overwrite(name, content):
    return lambda own: (own / name).write_bytes(content)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
DAMAGES = {
    "no config": (remove("config.json"), "has no config.json"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "no weights": (remove("model.safetensors"), "has no model.safetensors or model.safetensors.index.json;"),
    "pickle": (
        lambda own: (own / "model.safetensors").rename(own / "pytorch_model.bin"),
        "(only pytorch_model.bin, a pickle, which can run code)",
    ),
    "truncated weights": (resize_weights(lambda content: content[:-1]), "own/model.safetensors is damaged"),
    "longer weights": (resize_weights(lambda content: content + b"\0"), "own/model.safetensors is damaged"),
    "pointer file": (overwrite("model.safetensors", POINTER), "own/model.safetensors is damaged"),
    "no tensors": (lambda own: save_file({}, own / "model.safetensors"), "own/model.safetensors has no tensors"),
    "custom model code": (
        edit("config.json", auto_map={"AutoModel": "x.Y"}, architectures=["Y"]),
        "config.json requires its own code",
    ),
    "custom tokenizer code": (
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]}),
        "tokenizer_config.json requires its own code",
    ),
    "no model type": (edit("config.json", model_type=None), "config.json names no model_type"),
    "vocabulary": (edit("config.json", vocab_size=100), "but config.json has vocab_size 100"),
    "broken config": (overwrite("config.json", b"{"), "config.json is not JSON"),
    "config list": (overwrite("config.json", b"[]"), "config.json must be a JSON object; got list"),
    "broken special tokens": (overwrite("special_tokens_map.json", b"{"), "special_tokens_map.json is not JSON"),
    "special token list": (overwrite("special_tokens_map.json", b"[]"), "special_tokens_map.json must be a JSON ob"),
    "template in Latin-1": (overwrite("chat_template.jinja", b"{# \xe4 #}"), "chat_template.jinja is not UTF-8 text"),
    "broken tokenizer": (overwrite("tokenizer.json", b"{}"), "tokenizer.json is not a tokenizer"),
}


@pytest.mark.parametrize("damage, rule", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_refused_and_the_last_lock_stays(pin, own, damage, rule):
    pin("tiny")
    before = {path.name: path.read_bytes() for path in Path("locks").glob("*.json")}
    damage(own)
    line = error(pin("own"))
    assert line.startswith("model.name: ") and rule in line
    assert {path.name: path.read_bytes() for path in Path("locks").iterdir() if not path.is_symlink()} == before
    assert os.readlink(LINK) == "README.md"


def add_image_token(own: Path, template: str) -> None:
    """A special token behind the vocabulary, as Gemma 3 1B has one for images."""
    tokenizer = Tokenizer.from_file(str(own / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image_soft_token>", special=True)])
    tokenizer.save(str(own / "tokenizer.json"))
    edit("tokenizer_config.json", image_token="<image_soft_token>")(own)
    edit("config.json", vocab_size=tokenizer.token_to_id("<image_soft_token>"))(own)
    (own / "chat_template.jinja").write_text((own / "chat_template.jinja").read_text() + template)


@pytest.mark.parametrize("template", ["", "{{ '<image_soft_token>' }}", "{{ image_token }}"])
def test_a_special_token_behind_the_vocabulary_is_refused_only_if_the_template_writes_it(pin, own, template):
    """No text of a row becomes a special token."""
    add_image_token(own, template)
    result = pin("own")
    if template:
        assert "makes ids up to" in error(result)
    else:
        assert result.exit_code == 0


def test_code_beside_a_class_of_transformers_is_ignored(pin, own):
    """DeepSeek-V3 and Phi-3 on the hub refused, as they still name the code from before transformers had them."""
    edit("config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})(own)
    assert pin("own").exit_code == 0


def test_a_revision_of_a_local_model_is_refused(pin, own):
    """It would be silently ignored."""
    assert error(pin("tiny", revision="main")).startswith("model.revision: only a hub model has revisions")
    assert error(pin("own", revision="v1")).startswith("model.revision: only a hub model has revisions")


def test_a_path_that_does_not_exist_is_refused_without_the_network(pin):
    assert error(pin("./no/such/model")).startswith("model.name: must be tiny, an existing directory, or a hub id")


def test_a_pinned_directory_that_is_gone_is_refused(pin, own):
    pin("own")
    shutil.rmtree(own)
    with pytest.raises(UserError, match="the pinned directory 'own' is gone"):
        model_directory(read_json(Path("locks/model.json")))


def test_git_must_ignore_the_directory_of_a_model_in_the_checkout(pin, own):
    """`dvc exp apply` would delete its weights: libgit2's stash removes ignored files of an untracked directory."""
    run_bounded(["git", "init", "-q", "."], check=True)
    exclude = Path(".git/info/exclude")
    for ignored in ("", "*.safetensors\n"):
        exclude.write_text(ignored)
        result = pin("own")
        assert result.exit_code == 1
        assert "model.name: " in error(result) and "/own/ to .git/info/exclude" in error(result)
    exclude.write_text("/own/\n")
    assert pin("own").exit_code == 0
