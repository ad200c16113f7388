"""What adapter_config.json may say: each hostile value is one line, within a second and a few megabytes."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lean_finetune.core.errors import UserError
from lean_finetune.pinning import name_patterns
from lean_finetune.pinning.adapter_config import AdaptedLayers
from lean_finetune.pinning.adapter_files import read_adapter
from lean_finetune.pinning.name_patterns import NamePattern, PatternFault, Steps

LAYER = "model.layers.0.self_attn.q_proj"
ENDLESS = r"([a-z_]+\.?)+!"
"""Python's `re` takes longer than the world has existed to see that no layer matches."""
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:qkv_proj|q_proj|k_proj|"
    r"v_proj|o_proj|gate_proj|up_proj|down_proj|qkv|proj|fc1|fc2).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|"
    r"attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
HONEST = (
    UNSLOTH,
    r"^(model\.language_model(?=\.).*\.(q_proj|up_proj|down_proj))$",
    r"^(?!.*(?:vision_tower|visual)).*(?:q_proj|up_proj).*",
    r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
    r".*\.(q|k)_proj",
    r"(.*\.)?layers\.(0|2|1[0-9])\..*_proj",
    r"(?:\w+\.)*q_proj",
    r"model\.(?:language_model\.)?layers\.\d{1,2}\.\S*proj\b",
)
"""Patterns as tools and their users write them."""
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "targets no pattern": ({"target_modules": "("}, "(target_modules: is no pattern (missing ), unterminated"),
    "targets nested": ({"target_modules": "(" * 3000 + "a" + ")" * 3000}, "(target_modules: is no pattern"),
    "targets of a million": ({"target_modules": "x|" * 500_000}, "(target_modules"),
    "targets go back": ({"rank_pattern": {r"(q*)\1x?": 4}}, "of a kind that is not matched here (GROUPREF)"),
    "targets take long": ({"rank_pattern": {"(" * 40 + "." + "{1,1000})" * 40 + "!": 4}}, "takes too many steps"),
    "targets with flags": ({"target_modules": "(?i)q_proj"}, "(target_modules: has flags"),
    "exclusion no pattern": ({"exclude_modules": "[z-a]"}, "(exclude_modules: is no pattern (bad character range"),
    "endless ranks": ({"rank_pattern": {f"{ENDLESS}|q_proj": 8}}, "adapter_config.json says rank 8; download"),
    "ranks no pattern": ({"rank_pattern": {"(": 4}}, "(rank_pattern: is no pattern (missing )"),
    "scales no pattern": ({"alpha_pattern": {"*": 4}}, "(alpha_pattern: is no pattern (nothing to repeat"),
    "patterns of lists": ({"layers_to_transform": [0], "layers_pattern": [ENDLESS]}, "(layers_pattern."),
    "patterns of copies": ({"modules_to_save": [ENDLESS]}, "(modules_to_save.0: String should match pattern"),
    "a huge rank": ({"rank_pattern": {"q_proj": 10**7}}, "(rank_pattern.q_proj: Input should be less than or equal to"),
    "a larger rank": ({"rank_pattern": {"q_proj": 60_000}}, "adapter_config.json says rank 60000; download"),
    "a rank below": ({"rank_pattern": {"q_proj": -1}}, "(rank_pattern.q_proj: Input should be greater than"),
    "rank 2^63": ({"r": 2**63}, "(r: Input should be less than or equal to 65536; got 9223372036854775808)"),
    "rank 10^400": ({"r": 10**400}, "(r: Input should be less than or equal to 65536; got 1000"),
    "rank true": ({"r": True}, "(r: Input should be a valid integer; got True)"),
    "scale 10^400": ({"lora_alpha": 10**400}, "(lora_alpha: Input should be less than or equal to 1000000"),
    "scale infinite": ({"lora_alpha": float("inf")}, "(lora_alpha: Input should be"),
    "scales infinite": ({"alpha_pattern": {"q_proj": float("nan")}}, "(alpha_pattern.q_proj: Input should be"),
    "dropout 7": ({"lora_dropout": 7}, "(lora_dropout"),
    "a token of a terabyte": ({"trainable_token_indices": [10**12]}, "(trainable_token_indices"),
    "tokens without rows": ({"trainable_token_indices": [1]}, "has no rows of the tokens that adapter_config.json"),
    "layers repeated": ({"layer_replication": [[0, 10**6]]}, "(layer_replication: makes another model of its base"),
    "experts of Arrow": ({"arrow_config": {"top_k": 3}}, "(arrow_config: makes another model of its base"),
    "pissa": ({"init_lora_weights": "pissa_niter_100000000"}, "pissa_niter_100000000, which changed its base; merge"),
    "loftq": ({"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 10**9}}, "=loftq, which changed its"),
    "corda": ({"init_lora_weights": "corda", "corda_config": {"cache_file": "/dev/zero"}}, "=corda, which changed"),
    "an unknown start": ({"init_lora_weights": "x"}, "(init_lora_weights"),
    "another Megatron": ({"megatron_config": {"a": 1}}, "(megatron_config: Input should be None; got {'a': 1})"),
    "base of 5000 letters": ({"base_model_name_or_path": "x" * 5000}, "(base_model_name_or_path: String should have"),
    "a name of codes": ({"target_parameters": ["\x1b]52;c;eA==\x07"]}, "(target_parameters.0: String should match"),
}
"""Keys of adapter_config.json, and a part of the refusal."""


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Make an adapter of one layer with other keys in its config."""

    def make(**values: Any) -> Path:
        A, B = np.zeros((4, 8), np.float32), np.zeros((8, 4), np.float32)
        name = f"base_model.model.{LAYER}.lora_"
        save_file({f"{name}A.weight": A, f"{name}B.weight": B}, tmp_path / "adapter_model.safetensors")
        config = {"base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **values}))
        return tmp_path

    return make


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_value_is_refused_in_one_line(
    name: str, adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """A pattern that is matched for ever, gigabytes of adapters, or a traceback of PEFT."""
    monkeypatch.setattr(name_patterns, "MOST_STEPS", 200_000)
    values, expected = VALUES[name]
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        read_adapter(adapter(**values))
    text = str(caught.value)
    assert expected in text and "\n" not in text and len(text) < 700, text
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("pattern", HONEST)
def test_an_honest_pattern_is_matched_as_python_matches_it(pattern: str):
    """Unsloth's pattern refused, or another layer adapted than in training."""
    lists = ("model.layers.", "model.language_model.layers.", "model.visual.blocks.")
    layers = ("self_attn", "self_attn.q_proj", "mlp.up_proj", "mlp.act_fn", "attn.qkv", "input_layernorm")
    names = [f"{prefix}{number}.{layer}" for prefix in lists for number in (0, 7, 11) for layer in layers]
    expected = [name for name in names if re.fullmatch(pattern, name)]
    matcher = NamePattern(pattern, Steps())
    assert [name for name in names if matcher.matches(name)] == expected and 0 < len(expected) < len(names)


@pytest.mark.parametrize(
    "pattern",
    [
        ENDLESS.replace("!", "[!]"),
        r"(a|a)*[!]",
        ".*" * 30 + "[!]",
        r"(?:(?=[a.]*)[a-z.]*)*[!]",
        "([a-z.]?){200}[a-z.]{200}[!]",
    ],
)
def test_an_endless_pattern_is_matched_at_once(pattern: str):
    """A pattern for which `re` tries all of 2^80 ways."""
    steps, name = Steps(), "model.language_model.layers.10.self_attn.q_proj.lora.and.more.of.the.same.name"
    start = time.perf_counter()
    try:
        assert not NamePattern(pattern, steps).matches(name)
    except PatternFault as fault:
        assert "takes too many steps" in str(fault)
    assert time.perf_counter() - start < 5


def test_parts_of_patterns_are_matched_as_python_matches_them():
    """Random patterns of all parts against random names."""
    draw = np.random.default_rng(3)

    def chosen(*choices: str) -> str:
        return str(draw.choice(choices))

    def pattern(depth: int) -> str:
        parts = []
        for _ in range(draw.integers(1, 4)):
            inner = pattern(depth - 1) if depth else "b"
            atom = chosen(
                *"ab.c", r"\.", r"\d", r"\w", r"\W", r"\b", r"\B", "^", "$", "[ab]", "[^a]", r"[\d.]", "[^b-d]"
            )
            atom = chosen(atom, atom, f"({inner})", f"(?:{inner}|{atom})", f"(?={inner})", f"(?!{inner})")
            parts.append(atom + chosen("", "", "", "*", "+?", "?", "{2}", "{1,2}", "{0,3}?", "{2,}"))
        return "".join(parts)

    tried = matched = 0
    while tried < 500:
        text, name = pattern(2), "".join(draw.choice(list("ab.c1"), draw.integers(1, 7)))
        try:
            expected = re.compile(text).fullmatch(name) is not None
        except re.error:
            continue
        assert NamePattern(text, Steps()).matches(name) is expected, (text, name)
        tried, matched = tried + 1, matched + expected
    assert matched > 30


def test_a_number_in_a_name_counts_where_peft_counts_it():
    """`layers_to_transform` of the wrong list: experts in place of layers."""
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "layers.1.x.q_proj"], "layers_to_transform": [1]}
    named = AdaptedLayers(adapter)
    expected = {
        "model.layers.1.q_proj": True,
        "model.layers.0.experts.1.q_proj": False,
        "layers.1.x.q_proj": True,
        "layers.1.q_proj": False,
        "model.layers.2.q_proj": False,
    }
    assert {name: named.has(name) for name in expected} == expected
    experts = AdaptedLayers({**adapter, "layers_pattern": ["experts"]})
    assert experts.has("model.layers.0.experts.1.q_proj") and not experts.has("model.layers.1.self.q_proj")
