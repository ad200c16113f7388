"""The command `lean-finetune export`: a tuned model for other programs, and on the hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cuda_memory.terminal import echo
from cuda_memory.user_paths import PATH, no_option, shell_line
from lean_finetune.commands.chat import BITS, MODEL
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.file_names import copy_below
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.config_file import refuse_no_model

if TYPE_CHECKING:
    from lean_finetune.commands.tuned.tuned_model import TunedModel

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""


@click.command(cls=StageCommand)
@click.argument("out", type=PATH)
@MODEL
@BITS
@click.option(
    "--what", type=click.Choice(["merged", "adapter"]), default="merged", show_default=True, help="Weights to export."
)
@click.option("--push", metavar="ORG/NAME", help="Also upload to this repository of the hub, which is made if needed.")
@click.option("--public", is_flag=True, help="Make a new repository public.")
def export(out: Path, model: Path, bits: str | None, what: str, push: str | None, public: bool) -> None:
    """Write a tuned model to OUT for other programs.

    It loads in transformers and PEFT, vLLM, llama.cpp and Ollama; the lines that do are printed.

    `merged` has the adapter in its base's weights, one weight in memory at a time. `adapter` needs the base, whose hub
    commit it names. OUT gets tokenizer, chat template and a model card; a merged model a Modelfile for Ollama too.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageFault(f"{out}: must be a new or an empty directory; name another")
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(f"{out}: must be a name in UTF-8, which the model card contains; name another") from None
    refuse_no_model(model)
    from lean_finetune.commands.tuned.tuned_model import find_tuned

    tuned = find_tuned(model, bits)
    if what == "adapter" and tuned.adapter is None:
        raise UsageFault(f"--what: {model} is a full model without an adapter; use --what merged")
    if push and what == "adapter" and os.path.isdir(tuned.base_name):
        raise UsageFault(
            f"--push: the adapter's base is the local directory {tuned.base_name}, which nobody else has; use --what "
            "merged, or train from a hub id"
        )
    write_export(tuned, out, what, push or out.name)
    echo(f"{out}: {what}, {sum(file.stat().st_size for file in out.iterdir()) / 2**20:.1f} MiB")
    for title, line in use_lines(tuned, no_option(out), what):
        echo(f"{title + ':':<14}{line}")
    if push:
        echo(f"{'hub:':<14}{upload(out, push, private=not public)}")


def write_export(tuned: "TunedModel", out: Path, what: str, title: str) -> None:
    """Write the directory, which appears complete or not at all. The model card calls the model `title`.

    Raises:
        UserError: the disk refused, the model cannot be merged, or a weight has NaN or infinite values.
    """
    from lean_finetune.commands.tuned.conversation import Prompter, modelfile
    from lean_finetune.commands.tuned.prompt_images import parts_are_converted
    from lean_finetune.commands.tuned.tuned_files import named_by_option, refuse_foreign_link
    from lean_finetune.core.atomic_files import atomic_directory
    from lean_finetune.model.files.finite_values import copy_finite, of_adapter, of_model
    from lean_finetune.model.merge_adapters import SUFFIX, refuse_merge, write_merged
    from lean_finetune.model.precision import BASE_WEIGHTS
    from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS
    from lean_finetune.pinning.locate import TOKENIZER_FILES

    modelfile_text = None
    if what == "merged":
        others = parts_are_converted(tuned)
        modelfile_text = modelfile(Prompter(tuned.directory), tuned.positions, tuned.architecture, other_parts=others)
        if tuned.adapter is not None:
            with named_by_option():
                refuse_merge(tuned.base, tuned.weights, experts=bool(tuned.adapter.get("target_parameters")))
    names = [*TOKENIZER_FILES]
    if what == "adapter":
        names += [ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_WEIGHTS]
    elif tuned.adapter is None:
        names += tuned.weight_files()
    names = [name for name in names if (tuned.directory / name).is_file()]
    for name in names:
        refuse_foreign_link(tuned.directory / name)
    with named_by_option(), atomic_directory(out) as directory:
        if what == "merged" and tuned.adapter is not None:
            write_merged(tuned.base, tuned.weight_files(), tuned.directory, tuned.weights, directory)
        for name in names:
            if name.endswith(SUFFIX):
                file = tuned.directory / name
                copy_finite(file, directory / name, of_adapter(file) if name == ADAPTER_WEIGHTS else of_model(file))
            else:
                copy_below(tuned.directory, name, directory)
        (directory / "README.md").write_text(card(tuned, title, what), encoding="utf-8")
        if modelfile_text is not None:
            (directory / "Modelfile").write_text(modelfile_text, encoding="utf-8")
        tuned.refuse_change()


def use_lines(tuned: "TunedModel", where: str, what: str) -> list[tuple[str, str]]:
    """Lines that load an export, by program."""
    from lean_finetune.commands.tuned.conversation import GGUF, MMPROJ, OLLAMA_ARCHITECTURES
    from lean_finetune.commands.tuned.prompt_images import NOT_CONVERTED, parts_are_converted, takes_images
    from lean_finetune.model.empty_model import is_multimodal

    multimodal = is_multimodal(tuned.config)
    kind = "AutoModelForMultimodalLM" if multimodal else "AutoModelForCausalLM"
    if what == "adapter":
        alone = f"AutoPeftModelForCausalLM.from_pretrained({where!r})"
        on_base = f"PeftModel.from_pretrained({kind}.from_pretrained({tuned.base_name!r}), {where!r})"
        return [("PEFT", on_base if multimodal else alone), ("vLLM", vllm_adapter_line(tuned, where))]
    name, gguf = Path(where).name.lower().lstrip("-") or "model", f"{where}/{GGUF}"
    convert = [["python", "convert_hf_to_gguf.py", where, "--outfile", gguf]]
    run, alone = ["llama-cli", "-m", gguf], ""
    if parts_are_converted(tuned):
        others = f"{where}/{MMPROJ}"
        convert.append(["python", "convert_hf_to_gguf.py", where, "--mmproj", "--outfile", others])
        run = ["llama-mtmd-cli", "-m", gguf, "--mmproj", others]
    elif takes_images(tuned):
        alone = f"  # {NOT_CONVERTED}"
    make = [["ollama", "create", name, "-f", f"{where}/Modelfile"], ["ollama", "run", name]]
    return [
        ("transformers", f"{kind}.from_pretrained({where!r})"),
        ("vLLM", shell_line(["vllm", "serve", where])),
        ("llama.cpp", _in_turn(*convert, run) + alone),
        ("Ollama", _in_turn(*([] if tuned.architecture in OLLAMA_ARCHITECTURES else convert), *make) + alone),
    ]


def _in_turn(*commands: list[str]) -> str:
    """Commands of which each runs if the one before succeeded."""
    return " && ".join(map(shell_line, commands))


def vllm_adapter_line(tuned: "TunedModel", where: str) -> str:
    """The command that serves the base at its commit with the adapter, or why vLLM has none."""
    adapter = tuned.adapter or {}
    rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    allowed = next((most for most in VLLM_RANKS if most >= rank), None)
    whole = adapter.get("modules_to_save") or adapter.get("trainable_token_indices")
    if adapter.get("use_dora") or whole or allowed is None:
        reason = "whole layers" if whole else "DoRA" if adapter.get("use_dora") else f"ranks above {VLLM_RANKS[-1]}"
        return f"does not load {reason} as an adapter: use --what merged"
    revision = ["--revision", tuned.base_revision] if tuned.base_revision else []
    options = ["--tokenizer", where, "--enable-lora", "--max-lora-rank", str(allowed), "--lora-modules"]
    return shell_line(["vllm", "serve", tuned.base_name, *revision, *options, f"{Path(where).name.lower()}={where}"])


def card(tuned: "TunedModel", name: str, what: str) -> str:
    """The model card: metadata that hubs read, the pinned base, and how to load the model."""
    from lean_finetune.commands.tuned.prompt_images import takes_images
    from lean_finetune.islands.tower import TOWER
    from lean_finetune.pinning.hub import HUB_ID

    base, commit = tuned.base_name, tuned.base_revision
    on_hub = not os.path.isdir(base) and HUB_ID.fullmatch(base) is not None
    lines = "\n".join(f"# {title}\n{line}" for title, line in use_lines(tuned, name, what))
    return "\n".join(
        [
            "---",
            *(
                [f"base_model: {base}", f"base_model_relation: {'adapter' if what == 'adapter' else 'finetune'}"]
                if on_hub
                else []
            ),
            f"library_name: {'peft' if what == 'adapter' else 'transformers'}",
            f"pipeline_tag: {TOWER.task if takes_images(tuned) else 'text-generation'}",
            "tags:",
            "- lean-finetune",
            "---",
            "",
            f"# {name}",
            "",
            f"{'An adapter for' if what == 'adapter' else 'Fine-tuned from'} {base if on_hub else 'a local model'}"
            + (f" at commit `{commit}`." if commit else "."),
            "",
            "```",
            lines,
            "```",
            "",
        ]
    )


def upload(directory: Path, repository: str, *, private: bool) -> str:
    """Upload a directory in one commit; returns the repository's address.

    Raises:
        UserError: the name is wrong, or the hub refused.
    """
    from huggingface_hub import HfApi

    from lean_finetune.pinning.hub import HUB_ID, hub_errors

    if not HUB_ID.fullmatch(repository):
        raise UsageFault(f"--push: must be org/name; got {repository!r}; correct it")
    with hub_errors("--push", repository):
        HfApi().create_repo(repository, private=private, exist_ok=True)
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=directory, commit_message="Upload the tuned model"
        )
    return str(commit.commit_url)
