"""Small models that take images, by family: config, random weights, tokenizer, chat template and processor."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForMultimodalLM, AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

TINY = Path(__file__).parents[1] / "lean_finetune" / "tiny"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}"
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


@dataclass(frozen=True, kw_only=True)
class SmallFamily:
    """How the small model of a family is made."""

    config: Callable[[Any, dict[str, Any]], Any]
    """The model's config, from the tokenizer and sizes of the language model."""
    images: Any
    """The image processor."""
    place: str
    """What the chat template writes for an image."""
    marks: tuple[str, ...]
    """Special tokens for images."""
    named: dict[str, str] = field(default_factory=dict)
    """Those that the tokenizer has as attributes."""
    processor: dict[str, Any] = field(default_factory=dict)
    """processor_config.json; none if it is empty."""


def tokenizer(family: str = "qwen2_5_vl") -> Any:
    """The shipped tokenizer with a family's tokens for images."""
    known = FAMILIES[family]
    made: Any = AutoTokenizer.from_pretrained(TINY, extra_special_tokens=known.named)
    made.add_special_tokens({"additional_special_tokens": list(known.marks)})
    made.chat_template = TEMPLATE.replace("PLACE", known.place)
    return made


def vision_model(directory: Path, family: str = "qwen2_5_vl", *, seed: int = 0, **text: Any) -> Path:
    """Write a small model of a family that takes images; `text` are sizes of its language model."""
    words, known = tokenizer(family), FAMILIES[family]
    config = known.config(words, {**TEXT, "vocab_size": len(words), **text})
    torch.manual_seed(seed)
    kind: Any = AutoModelForMultimodalLM._model_mapping[type(config)]
    model = kind._from_config(config, dtype=torch.float32)
    if family == "gemma3":  # Zeros in a new model: its images would all look the same.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(directory)
    known.images.save_pretrained(directory)
    if known.processor:
        (directory / "processor_config.json").write_text(json.dumps(known.processor))
    words.save_pretrained(directory)
    return directory


QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen(name: str, text_type: str, vision: dict[str, Any]) -> Callable[[Any, dict[str, Any]], Any]:
    def config(words: Any, text: dict[str, Any]) -> Any:
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        ids = dict(zip(names, words.convert_tokens_to_ids(list(QWEN_MARKS)), strict=True))
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        text = {"model_type": text_type, "rope_parameters": rope, **text}
        kind = getattr(transformers, name)
        return kind(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)

    return config


def _two_parts(
    name: str, text_type: str, vision: dict[str, Any], mark: str, **more: Any
) -> Callable[[Any, dict[str, Any]], Any]:
    """The config of a model whose only token for images is `mark`."""

    def config(words: Any, text: dict[str, Any]) -> Any:
        text = {"model_type": text_type, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **text}
        number = words.convert_tokens_to_ids(mark)
        return getattr(transformers, name)(text_config=text, vision_config=vision, image_token_id=number, **more)

    return config


def _qwen_family(config: Callable[[Any, dict[str, Any]], Any], patch: int = 14) -> SmallFamily:
    return SmallFamily(
        config=config,
        images=Qwen2VLImageProcessorPil(patch_size=patch),
        place="<|vision_start|><|image_pad|><|vision_end|>",
        marks=QWEN_MARKS,
    )


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
_CLIP = {"model_type": "clip_vision_model", **_SIZES, "image_size": 28, "patch_size": 14, "projection_dim": 32}
_PIXTRAL = {"model_type": "pixtral", **_SIZES, "head_dim": 16, "image_size": 140, "patch_size": 14}
_CROPS = {**_SIZES, "image_size": 32, "patch_size": 8}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]
_IMG = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_INTERN = {
    **{"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    "video_token": "<video>",
}
_IDEFICS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_CROP_SIZES: dict[str, Any] = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}


def _pixtral(name: str, merge: int, **more: Any) -> SmallFamily:
    return SmallFamily(
        config=_two_parts(name, "mistral", _PIXTRAL, "[IMG]", **more),
        images=PixtralImageProcessorPil(patch_size=14, size={"longest_edge": 140}),
        place="[IMG]",
        marks=_IMG,
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": merge},
    )


def _idefics(name: str, processor: str, images: Any) -> SmallFamily:
    return SmallFamily(
        config=_two_parts(name, "llama", _CROPS, "<image>", scale_factor=2, pad_token_id=0),
        images=images,
        place="<image>",
        marks=_IDEFICS,
        processor={"processor_class": processor, "image_seq_len": 4},
    )


def _gemma3(words: Any, text: dict[str, Any]) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"][: text["num_hidden_layers"]]
    text = {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": kinds,
        "query_pre_attn_scalar": 16,
        **text,
    }
    vision = {"model_type": "siglip_vision_model", **_SIZES, "image_size": 56, "patch_size": 7}
    mark = words.convert_tokens_to_ids(_GEMMA["image_token"])
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=mark,
    )


def _gemma4(**more: Any) -> Callable[[Any, dict[str, Any]], Any]:
    def config(words: Any, text: dict[str, Any]) -> Any:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"][: text["num_hidden_layers"]]
        kind = {"model_type": "gemma4_text", "sliding_window": 24, "layer_types": kinds, "global_head_dim": 32}
        vision = {**_SIZES, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 8, "pooling_kernel_size": 2}
        ids = {f"{name}_id": words.convert_tokens_to_ids(mark) for name, mark in _GEMMA4.items() if name != "eoa_token"}
        ids["video_token_id"] = words.convert_tokens_to_ids("<|video|>")
        sizes = {"vocab_size_per_layer_input": text["vocab_size"], **more, **text}
        audio = sizes.pop("audio")
        return transformers.Gemma4Config(
            text_config={**kind, **sizes},
            vision_config={**vision, "position_embedding_size": 512},
            audio_config=audio,
            **ids,
        )

    return config


_AUDIO = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
    "subsampling_conv_channels": [4, 2],
}
_GEMMA4_SMALL = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "audio": _AUDIO}
"""As E2B and E4B: embeddings of each layer, and an audio tower."""
_GEMMA4_LARGE = {
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "audio": None, "attention_k_eq_v": True},
    **{"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
}
"""As 26B-A4B and 31B: the tokens of an image see each other."""


_GEMMA4 = {
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}


def _gemma4_family(sizes: dict[str, Any]) -> SmallFamily:
    return SmallFamily(
        config=_gemma4(**sizes),
        images=Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2),
        place="<|image|>",
        marks=("<|video|>",),
        named=_GEMMA4,
        processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
    )


_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_QWEN3_VISION: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    **{"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}


GLM_MARKS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
_GLM_VISION: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    **{"patch_size": 14, "image_size": 56},
}


def _glm(name: str, text_type: str, **more: Any) -> Callable[[Any, dict[str, Any]], Any]:
    def config(words: Any, text: dict[str, Any]) -> Any:
        names = ("image_start", "image_end", "image", "video", "video_start", "video_end")
        numbers = words.convert_tokens_to_ids(list(GLM_MARKS))
        ids = {f"{name}_token_id": number for name, number in zip(names, numbers, strict=True)}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        text = {"model_type": text_type, "rope_parameters": rope, **more, **text}
        return getattr(transformers, name)(text_config=text, vision_config=_GLM_VISION, **ids)

    return config


def _glm_family(config: Callable[[Any, dict[str, Any]], Any], images: Any, processor: str) -> SmallFamily:
    return SmallFamily(
        config=config,
        images=images(),
        place="<|begin_of_image|><|image|><|end_of_image|>",
        marks=GLM_MARKS,
        processor={"processor_class": processor},
    )


_GLM_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1},
}
PADDLE = {
    **{"vision_start_token_id": "<|IMAGE_START|>", "vision_end_token_id": "<|IMAGE_END|>"},
    **{"image_token_id": "<|IMAGE_PLACEHOLDER|>", "video_token_id": "<|video_pad|>"},
}


def _paddle(words: Any, text: dict[str, Any]) -> Any:
    ids = {name: words.convert_tokens_to_ids(mark) for name, mark in PADDLE.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return transformers.PaddleOCRVLConfig(
        text_config={"model_type": "paddleocr_vl_text", "rope_parameters": rope, **text},
        vision_config={**_SIZES, "image_size": 56, "patch_size": 14},
        **ids,
    )


def _granite4(words: Any, text: dict[str, Any]) -> Any:
    vision = {"model_type": "siglip_vision_model", **_SIZES, "hidden_size": 64, "image_size": 32, "patch_size": 8}
    qformer = {"num_hidden_layers": 1, "intermediate_size": 64, "cross_attention_frequency": 1}
    text = {**text, "num_hidden_layers": 6}  # Features enter the decoder in front of each.
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.Granite4VisionConfig(
        text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "logits_scaling": 2.0, **text},
        vision_config={**vision, "vision_use_head": False},
        qformer_config={"model_type": "blip_2_qformer", "use_qformer_text_input": False, **qformer, **without},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
        image_grid_pinpoints=_GRANITE_PINPOINTS,
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0], [1, 1]],
        spatial_vision_layer=2,
        spatial_target_layers=[2, 3, 4, 5],
        projector_dropout=0.0,
    )


_GRANITE_PINPOINTS = [[32, 64], [64, 32], [64, 64], [32, 96]]
_OVIS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def _ovis2(words: Any, text: dict[str, Any]) -> Any:
    vision = {**_CROPS, "hidden_stride": 2, "vocab_size": 64, "num_visual_indicator_tokens": len(_OVIS)}
    return transformers.Ovis2Config(
        text_config={"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **text},
        vision_config=vision,
        image_token_id=words.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=words.convert_tokens_to_ids(list(_OVIS)),
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
    )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3_vl_moe(words: Any, text: dict[str, Any]) -> Any:
    text = {**_EXPERTS, "decoder_sparse_step": 1, "tie_word_embeddings": True, **text}
    return _qwen("Qwen3VLMoeConfig", "qwen3_vl_moe_text", _QWEN3_VISION)(words, text)


def _qwen3_5(name: str, **more: Any) -> Callable[[Any, dict[str, Any]], Any]:
    """Layers of linear attention and one of full attention; a tower without features of earlier layers."""
    vision = {key: value for key, value in _QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}

    def config(words: Any, text: dict[str, Any]) -> Any:
        kinds = ["linear_attention", "full_attention", "linear_attention"][: text["num_hidden_layers"]]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        hybrid = {**heads, "linear_value_head_dim": 16, "layer_types": kinds, "rope_parameters": rope}
        return _qwen(f"{name}Config", f"{_MODEL_TYPES[name]}_text", vision)(words, {**hybrid, **more, **text})

    return config


_MINICPM = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}


def _minicpm(words: Any, text: dict[str, Any]) -> Any:
    kinds = ["linear_attention", "full_attention", "linear_attention"][: text["num_hidden_layers"]]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    hybrid = {**heads, "linear_value_head_dim": 16, "layer_types": kinds, "rope_parameters": rope}
    return transformers.MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **hybrid, **text},
        vision_config={**_SIZES, "image_size": 56, "patch_size": 14},
        insert_layer_id=1,
        image_size=112,
        **{f"{name}_id": words.convert_tokens_to_ids(_MINICPM[name]) for name in ("image_token", "video_token")},
    )


_MODEL_TYPES = {"Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe"}


FAMILIES: dict[str, SmallFamily] = {
    "qwen2_5_vl": _qwen_family(
        _qwen(
            "Qwen2_5_VLConfig",
            "qwen2_5_vl_text",
            {
                **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
                **{"fullatt_block_indexes": [1], "patch_size": 14, "window_size": 56},
            },
        )
    ),
    "qwen2_vl": _qwen_family(
        _qwen(
            "Qwen2VLConfig",
            "qwen2_vl_text",
            {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14},
        )
    ),
    "qwen3_vl": _qwen_family(_qwen("Qwen3VLConfig", "qwen3_vl_text", _QWEN3_VISION), patch=16),
    "qwen3_vl_moe": _qwen_family(_qwen3_vl_moe, patch=16),
    "qwen3_5": _qwen_family(_qwen3_5("Qwen3_5"), patch=16),
    "qwen3_5_moe": _qwen_family(
        _qwen3_5("Qwen3_5Moe", **_EXPERTS, shared_expert_intermediate_size=32, tie_word_embeddings=True), patch=16
    ),
    "glm4v": _glm_family(_glm("Glm4vConfig", "glm4v_text"), Glm4vImageProcessorPil, "Glm4vProcessor"),
    "glm4v_moe": _glm_family(
        _glm("Glm4vMoeConfig", "glm4v_moe_text", **_GLM_EXPERTS), Glm4vImageProcessorPil, "Glm4vProcessor"
    ),
    "glm46v": _glm_family(_glm("Glm46VConfig", "glm4v_text"), Glm46VImageProcessorPil, "Glm46VProcessor"),
    "glm_ocr": _glm_family(_glm("GlmOcrConfig", "glm_ocr_text"), Glm46VImageProcessorPil, "Glm46VProcessor"),
    "paddleocr_vl": SmallFamily(
        config=_paddle,
        images=PaddleOCRVLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}),
        place="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        marks=tuple(PADDLE.values()),
        named={"image_token": PADDLE["image_token_id"]},
        processor={"processor_class": "PaddleOCRVLProcessor"},
    ),
    "gemma3": SmallFamily(
        config=_gemma3,
        images=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        place="<start_of_image>",
        marks=(),
        named=_GEMMA,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
    ),
    "gemma4": _gemma4_family(_GEMMA4_SMALL),
    "gemma4_large": _gemma4_family(_GEMMA4_LARGE),
    "llava": SmallFamily(
        config=_two_parts("LlavaConfig", "llama", _CLIP, "<image>", image_seq_length=4),
        images=LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        place="<image>\n",
        marks=("<image>",),
        processor={"processor_class": "LlavaProcessor", **_LLAVA},
    ),
    "llava_next": SmallFamily(
        config=_two_parts("LlavaNextConfig", "llama", _CLIP, "<image>", image_grid_pinpoints=_PINPOINTS),
        images=LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=_PINPOINTS
        ),
        place="<image>\n",
        marks=("<image>",),
        processor={"processor_class": "LlavaNextProcessor", **_LLAVA},
    ),
    "pixtral": _pixtral(
        "LlavaConfig", 1, vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=1
    ),
    "mistral3": _pixtral("Mistral3Config", 2, spatial_merge_size=2),
    "internvl": SmallFamily(
        config=_two_parts(
            "InternVLConfig",
            "qwen2",
            {**_SIZES, "image_size": [28, 28], "patch_size": [7, 7]},
            "<IMG_CONTEXT>",
            image_seq_length=4,
        ),
        images=GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}),
        place="<IMG_CONTEXT>\n",
        marks=tuple(_INTERN.values()),
        named=_INTERN,
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "granite4_vision": SmallFamily(
        config=_granite4,
        images=LlavaNextImageProcessorPil(
            size={"height": 32, "width": 32},
            crop_size={"height": 32, "width": 32},
            image_grid_pinpoints=_GRANITE_PINPOINTS,
        ),
        place="<image>\n",
        marks=("<image>",),
        processor={
            **{"processor_class": "Granite4VisionProcessor", "patch_size": 8, "downsample_rate": "1/2"},
            "vision_feature_select_strategy": "full",
        },
    ),
    "minicpmv4_6": SmallFamily(
        config=_minicpm,
        images=MiniCPMV4_6ImageProcessorPil(scale_resolution=112, patch_size=14),
        place="<|image_pad|>",
        marks=(),
        named=_MINICPM,
        processor={"processor_class": "MiniCPMV4_6Processor"},
    ),
    "ovis2": SmallFamily(
        config=_ovis2,
        images=Ovis2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True),
        place="<image>",
        marks=("<image>", "<IMG_ATOM>", *_OVIS),
        processor={"processor_class": "Ovis2Processor", "image_seq_length": 4},
    ),
    "smolvlm": _idefics("SmolVLMConfig", "SmolVLMProcessor", SmolVLMImageProcessorPil(**_CROP_SIZES)),
    "idefics3": _idefics("Idefics3Config", "Idefics3Processor", Idefics3ImageProcessorPil(**_CROP_SIZES)),
}
"""How the small model of each family is made."""
NO_LAYERS = ("gemma3", "ovis2")
"""Families whose projector has no linear layer, so that it cannot have adapters."""


def adapted_parts(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes without adapters of a projector that cannot have any."""
    without = family in NO_LAYERS and changes.get("projector") == "lora"
    return {name: value for name, value in changes.items() if not (without and name == "projector")}
