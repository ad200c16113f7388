"""A small Qwen2.5-VL with random weights, for runs with images that need no download.

`python -m data.synth.vision_model OUT` writes config, weights, tokenizer, chat template and image processor to OUT.
"""

from pathlib import Path
from typing import Any

import click

from lean_finetune.pinning.locate import TINY_DIRECTORY

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS = 64, 4
TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_heads": HEADS,
    "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [3],
    "patch_size": 14,
    "window_size": 112,
}


def write(directory: Path, seed: int) -> None:
    """Write the model's files to `directory`."""
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIRECTORY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    text = {**TEXT, "vocab_size": len(tokenizer)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **ids)
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    for part in (model, Qwen2VLImageProcessorPil(), tokenizer):
        part.save_pretrained(directory)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int) -> None:
    """Write a small Qwen2.5-VL with random weights to OUT."""
    write(out, seed)


if __name__ == "__main__":
    main()
