"""Models that are measured on a GPU."""

from collections.abc import Mapping

from transformers import GptOssConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from tests.kit.specs import llama

MODELS: Mapping[str, PretrainedConfig] = {
    "Llama-3.1-8B": llama(4096, 14336, layers=32, heads=32, kv_heads=8, max_position_embeddings=131072),
    "Llama-3.2-3B": llama(
        3072, 8192, layers=28, heads=24, kv_heads=8, head_dim=128, tied=True, max_position_embeddings=131072
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B, 4 layers": Qwen3MoeConfig(  # type: ignore[call-arg] # head_dim is not a field of the class.
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "gpt-oss-20b, 4 layers": GptOssConfig(num_hidden_layers=4, num_local_experts=32),
    "tiny experts": Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=256,
    ),
    "tiny": llama(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=256, tied=True),
    "tiny, untied": llama(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=256),
}
