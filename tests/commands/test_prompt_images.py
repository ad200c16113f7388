"""`lean-finetune chat` and `generate` with images."""

import base64
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from data.synth import images
from lean_finetune.commands.chat import chat
from lean_finetune.commands.export import export
from lean_finetune.commands.generate import generate
from lean_finetune.commands.tuned import tuned_model
from lean_finetune.commands.tuned.answer_memory import answer_bytes
from lean_finetune.commands.tuned.conversation import Prompter
from lean_finetune.commands.tuned.prompt_images import shown_images
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.merge_adapters import write_merged
from lean_finetune.pinning.locate import TINY_DIRECTORY, TOKENIZER_FILES
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.small_vision import vision_model
from tests.workspace import error, invoke, write_rows

NEW_TOKENS = 8
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two images and a small Qwen2.5-VL."""
    root = tmp_path_factory.mktemp("drawn")
    weights = load_file(vision_model(root / "model") / "model.safetensors")
    larger = {name: 6 * tensor if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(larger, root / "model/model.safetensors", metadata={"format": "pt"})  # Answers that depend on images.
    images.write(root, train=2, heldout=0, seed=0)
    Image.open(root / "images/train-0001.png").resize((140, 112)).save(root / "images/wide.png")
    return root


def expected(model: Path, files: list[Path], question: str = QUESTION, weights: Path | None = None) -> str:
    """The answer of transformers' model, called with the output of its processor."""
    processor = ImageProcessor(model)._processor
    content = [{"type": "image"} for _ in files] + [{"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(file).convert("RGB") for file in files]
    inputs = processor(text=[text], images=images or None, return_tensors="pt", return_mm_token_type_ids=True)
    lm: Any = AutoModelForMultimodalLM.from_pretrained(weights or model, dtype=torch.float32).eval()
    found = lm.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(found, skip_special_tokens=True))


def answers(source: Path, *arguments: str) -> list[str]:
    """The answers of `generate` to a file of prompts."""
    out = source.with_suffix(".out")
    result = invoke(generate, str(source), str(out), "--max-new-tokens", str(NEW_TOKENS), *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["answer"] for line in out.read_text(encoding="utf-8").splitlines()]


def talk(lines: str, *arguments: str) -> Result:
    """Chat with these lines as standard input."""
    return CliRunner().invoke(chat, [*arguments, "--max-new-tokens", str(NEW_TOKENS)], input=lines)


def test_images_of_prompts_give_the_answers_of_transformers(drawn: Path, tmp_path: Path):
    """Other pixels, positions or placeholders than those of training, and padding that changes the positions."""
    one, wide = drawn / "images/train-0000.png", drawn / "images/wide.png"
    inline = f"data:image/png;base64,{base64.b64encode(wide.read_bytes()).decode()}"
    parts = [{"type": "image"}, {"type": "image_url", "image_url": {"url": inline}}, {"type": "text", "text": QUESTION}]
    rows = [
        {"messages": [{"role": "user", "content": f"<image>{QUESTION}"}], "images": ["images/train-0000.png"]},
        {"messages": [{"role": "user", "content": QUESTION}]},
        {"messages": [{"role": "user", "content": parts}], "images": ["images/train-0000.png"]},
        {"messages": [{"role": "user", "content": f"<img>images/train-0000.png</img>{QUESTION}"}]},
    ]
    found = answers(write_rows(drawn / "prompts.jsonl", rows), "--model", str(drawn / "model"))
    assert found == [expected(drawn / "model", files) for files in ([one], [], [one, wide], [one])]
    source = write_rows(tmp_path / "plain.jsonl", rows[1:2])
    assert answers(source, "--model", str(drawn / "model"), "--image", str(one), "--image", str(wide)) == found[2:3]
    assert found[0] != found[2]


def test_a_chat_shows_its_images_in_every_turn(drawn: Path):
    """A second question about an image that the model no longer sees."""
    model, file = str(drawn / "model"), drawn / "images/wide.png"
    shown = talk(f"{QUESTION}\n", "--model", model, "--image", str(file))
    assert shown.stdout == expected(drawn / "model", [file]) + "\n"
    turns = talk(f"{QUESTION}\n{QUESTION}\n/reset\n{QUESTION}\n", "--model", model, "--image", str(file)).stdout
    assert turns.startswith(shown.stdout) and turns.endswith(shown.stdout)
    row = {"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": shown.stdout[:-1]}
    messages = [*row, {"role": "user", "content": QUESTION}]
    source = write_rows(drawn / "turns.jsonl", [{"messages": messages, "images": [str(file)]}])
    assert answers(source, "--model", model)[0] in turns


@pytest.mark.parametrize(("vision", "projector"), [("frozen", "frozen"), ("lora", "full"), ("full", "frozen")])
def test_an_adapter_answers_about_images(drawn: Path, tmp_path: Path, vision: str, projector: str):
    """An adapter whose base is built without its tower, as for text."""
    torch.manual_seed(1)
    spec = spec_of(method="lora", precision="fp32", vision=vision, projector=projector)
    model: Any = load_model(drawn / "model", spec, CPU, images=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or ".modules_to_save." in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    save_adapter(model, tmp_path / "tuned", str(drawn / "model"))
    for name in TOKENIZER_FILES:
        if (drawn / "model" / name).is_file():
            (tmp_path / "tuned" / name).write_bytes((drawn / "model" / name).read_bytes())
    (tmp_path / "merged").mkdir()
    write_merged(drawn / "model", ["model.safetensors", "config.json"], tmp_path / "tuned", spec, tmp_path / "merged")
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": QUESTION}]}])
    file = drawn / "images/wide.png"
    tuned = ["--model", str(tmp_path / "tuned"), "--bits", "16"]
    found = answers(source, *tuned, "--image", str(file))
    assert found == [expected(drawn / "model", [file], weights=tmp_path / "merged")]
    assert answers(source, *tuned) == [expected(drawn / "model", [], weights=tmp_path / "merged")]


@pytest.mark.slow
def test_an_adapter_of_a_mixture_answers(tmp_path: Path, drawn: Path):
    """Its targets name a layer of the frozen tower as a convolution is named, which the prediction then refused."""
    model = vision_model(tmp_path / "model", "qwen3_vl_moe")
    lm: Any = load_model(model, spec_of(method="lora", precision="fp32"), CPU, images=True)
    save_adapter(lm, tmp_path / "tuned", str(model))
    for name in TOKENIZER_FILES:
        if (model / name).is_file():
            (tmp_path / "tuned" / name).write_bytes((model / name).read_bytes())
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": QUESTION}]}])
    for shown in ([], ["--image", str(drawn / "images/wide.png")]):
        found = answers(source, "--model", str(tmp_path / "tuned"), "--bits", "16", *shown)
        assert found == answers(source, "--model", str(model), *shown)


def test_an_export_says_how_other_programs_get_the_parts_for_images(drawn: Path, tmp_path: Path):
    """A model that answers about images in training, and in llama.cpp has never seen one."""
    shown = invoke(export, str(tmp_path / "out"), "--model", str(drawn / "model")).stdout
    convert = f"python convert_hf_to_gguf.py {tmp_path}/out"
    projector = f"{tmp_path}/out/mmproj-model.gguf"
    assert f"{convert} --mmproj --outfile {projector} && llama-mtmd-cli -m {tmp_path}/out/model.gguf" in shown
    assert f"--mmproj {projector}\n" in shown
    card = (tmp_path / "out/README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "--mmproj" in card
    assert (tmp_path / "out/Modelfile").read_text().startswith("FROM .\n")  # Ollama converts Qwen2.5-VL itself.
    model = vision_model(tmp_path / "qwen2_vl", "qwen2_vl")
    invoke(export, str(tmp_path / "gguf"), "--model", str(model))
    assert "FROM ./model.gguf\nFROM ./mmproj-model.gguf\n" in (tmp_path / "gguf/Modelfile").read_text()
    model = vision_model(tmp_path / "llava", "llava")
    shown = invoke(export, str(tmp_path / "clip"), "--model", str(model)).stdout
    assert "mmproj" not in shown and "# text alone: the converter does not know this vision tower" in shown
    assert "mmproj" not in (tmp_path / "clip/Modelfile").read_text()


def test_what_cannot_be_shown_is_one_line(drawn: Path, tmp_path: Path):
    """A traceback, or an answer about an image that was not seen."""
    model, image = str(drawn / "model"), str(drawn / "images/wide.png")
    assert "takes no images" in error(talk("x\n", "--model", str(TINY_DIRECTORY), "--image", image), 2)
    refusal = error(talk("x\n", "--model", model, "--image", "gone.png"))
    assert refusal.startswith("--image: ") and "gone.png cannot be read" in refusal
    refusal = error(talk("x\n", "--model", model, "--image", "https://a.org/b.png"))
    assert refusal.startswith('--image: it is a URL, and images are not fetched: "https://a.org/b.png"; download')
    (tmp_path / "text.png").write_text("no image")
    refusal = error(talk("x\n", "--model", model, "--image", str(tmp_path / "text.png")))
    assert refusal.startswith("--image: ") and "text.png is damaged" in refusal
    shown = talk("x\n", "--model", model, "--image", image, "--length", "24")
    assert "must leave room for a question" in error(shown, 2) and "of the images" in error(shown, 2)
    rows: list[tuple[dict[str, Any], list[str], str]] = [
        ({"prompt": "x", "images": [image]}, [], "plain text has no place for the row's images; write 'messages'"),
        ({"prompt": "x"}, ["--image", image], "plain text has no place for the images of --image"),
        (
            {"messages": [{"role": "user", "content": "<image>x"}], "images": []},
            ["--image", image, "--image", image],
            "the row has 1 place",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["/gone.png"]}, [], "/gone.png cannot be read"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["../up.png"]}, [], "is outside of"),
        (
            {"messages": [{"role": "user", "content": "x"}], "images": [image]},
            ["--image", image],
            "the row has images of its own",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
            ["--image", image],
            "video",
        ),
    ]
    for row, arguments, expected_words in rows:
        source = write_rows(tmp_path / "p.jsonl", [{"prompt": "One"}, row] if not arguments else [row])
        refusal = error(invoke(generate, str(source), str(tmp_path / "a.jsonl"), "--model", model, *arguments))
        assert refusal.startswith(f"{source}:{1 if arguments else 2}: ") and expected_words in refusal, refusal
    row = {"messages": [{"role": "user", "content": "x"}], "images": [image]}
    source = write_rows(tmp_path / "p.jsonl", [row])
    refusal = error(invoke(generate, str(source), str(tmp_path / "a.jsonl"), "--model", str(TINY_DIRECTORY)))
    assert refusal.startswith(f"{source}:1: it has images, and ") and not (tmp_path / "a.jsonl").exists()


@pytest.mark.slow
def test_the_memory_of_images_is_predicted(drawn: Path, tmp_path: Path):
    """A tower, or its pixels, that the limit of a conversation leaves out."""
    Image.open(drawn / "images/wide.png").resize((560, 420)).save(tmp_path / "large.png")
    tuned = tuned_model.find_tuned(drawn / "model", None)
    with shown_images(tuned, Prompter(drawn / "model"), [str(tmp_path / "large.png")]) as shown:
        assert shown is not None
        length = len(shown.ids([{"role": "user", "content": QUESTION}])) + NEW_TOKENS
        predicted = answer_bytes(shown.tuned, rows=1, tokens=length, new_tokens=NEW_TOKENS, shown=shown.known)
        made = ImageProcessor(drawn / "model").arguments([[Image.open(tmp_path / "large.png")]])
    predicted -= made[
        "pixel_values"
    ].nbytes  # On a CPU they are not copied from NumPy's memory, which the meter does not count.
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("chat"), meter.phase("chat"):
        talk(f"{QUESTION}\n", "--model", str(drawn / "model"), "--image", str(tmp_path / "large.png"))
    assert 0.95 * predicted < meter.result().peak_bytes_by_phase["chat"] <= predicted
