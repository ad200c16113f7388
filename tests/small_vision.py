"""Small models that take images, by family: config, random weights, tokenizer, chat template and processor."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TINY = Path(__file__).parents[1] / "lean_finetune" / "tiny"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def tokenizer() -> Any:
    """The shipped tokenizer with tokens for pictures."""
    made: Any = AutoTokenizer.from_pretrained(TINY)
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    made.chat_template = TEMPLATE
    return made


def vision_model(directory: Path, family: str = "qwen2_5_vl", *, seed: int = 0, **text: Any) -> Path:
    """Write a small model of a family that takes images; `text` are sizes of its language model."""
    words = tokenizer()
    config, images = FAMILIES[family](words, text)
    torch.manual_seed(seed)
    kind: Any = AutoModelForMultimodalLM._model_mapping[type(config)]
    model = kind._from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(directory)
    images.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def _ids(words: Any) -> dict[str, Any]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, words.convert_tokens_to_ids(list(MARKS)), strict=True))


def _text(words: Any, text: dict[str, Any], kind: str) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return {**TEXT, "model_type": kind, "vocab_size": len(words), "rope_parameters": rope, **text}


def _qwen2_5_vl(words: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig

    vision = {
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        **{"fullatt_block_indexes": [1], "patch_size": 14, "window_size": 56},
    }
    config = Qwen2_5_VLConfig(
        text_config=_text(words, text, "qwen2_5_vl_text"), vision_config=vision, **_ids(words), tie_word_embeddings=True
    )
    return config, Qwen2VLImageProcessorPil()


def _qwen2_vl(words: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14}
    config = Qwen2VLConfig(
        text_config=_text(words, text, "qwen2_vl_text"), vision_config=vision, **_ids(words), tie_word_embeddings=True
    )
    return config, Qwen2VLImageProcessorPil()


def _qwen3_vl(words: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen3VLConfig

    vision = {
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        **{"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    }
    config = Qwen3VLConfig(
        text_config=_text(words, text, "qwen3_vl_text"), vision_config=vision, **_ids(words), tie_word_embeddings=True
    )
    return config, Qwen2VLImageProcessorPil(patch_size=16)


FAMILIES: dict[str, Any] = {"qwen2_5_vl": _qwen2_5_vl, "qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl}
"""Config and image processor of a small model, by family."""
