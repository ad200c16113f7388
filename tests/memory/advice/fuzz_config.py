"""Put mutated config.json files through `lean-finetune fit`.

`python -m tests.memory.advice.fuzz_config SEED COUNT [FIRST]`

Prints one line of JSON for each: how it ended, CPU seconds, peak memory. It should end in an answer or one line;
anything else is a fault. One process tries all, under a limit of its address space and of CPU time for each.
"""

import copy
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from click.testing import CliRunner

from lean_finetune.commands.fit import fit
from lean_finetune.core.errors import DoesNotFit

MOST_CPU_SECONDS = 60.0
MOST_BYTES = 6 << 30
LONGEST_LINE = 1200
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "torch_dtype": "bfloat16", **SIZES, **HEADS}  # fmt: skip # noqa: E501
GEMMA = {"model_type": "gemma3_text", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], **SIZES, **HEADS}  # fmt: skip # noqa: E501
BASES: tuple[dict[str, Any], ...] = (
    LLAMA,
    {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True, "attention_bias": True},
    {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}, "hidden_act": "silu"},
    {
        **LLAMA,
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    },
    {
        **LLAMA,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            "ignore": ["lm_head"],
        },
    },
    {
        **SIZES,
        **HEADS,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"hidden_size": 32, "num_hidden_layers": 1}},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 256},
    {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 8},
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 63, 1.5, -0.5, 1e308, 2**31, 2**62, 2**70, 10**9, 10**6, 65_537, 513),
    *("", "x", "4", "auto", "bfloat16", "\ud800", "\0", "x" * 5000, "../../etc/passwd", "silu", "full_attention"),
    *([], {}, [1], ["x"], [None], {"a": 1}, {"": {}}, [[]], {"rope_type": "dynamic", "factor": 2.0}, {"type": "x"}),
    *({"rope_type": 3}, {"quant_method": "x"}, {"quant_method": ["x"]}, {"load_in_4bit": "x"}, [1, "a", None, {}]),
    *(["full_attention"] * 3, ["x", "y"], ["mamba"] * 2, ["sliding_attention"] * 2),
)
ADDED: tuple[tuple[str, Any], ...] = (
    ("num_labels", 10**9),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 100_000),
    ("layer_types", ["full_attention"] * 1_000_000),
    ("id2label", {str(number): "x" for number in range(50_000)}),
    ("dtype", ["x"]),
    ("torch_dtype", "float4"),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": "x"}),
    ("quantization_config", {"quant_method": "mxfp4", "modules_to_not_convert": 3}),
    ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": [1]}),
    (
        "quantization_config",
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": 1}},
    ),
    ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    ("quantization_config", "x"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": "x"}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("auto_map", {"AutoConfig": "x.Y"}),
    ("is_encoder_decoder", True),
    ("is_decoder", False),
    ("attn_implementation", "x"),
    ("_attn_implementation", "flash_attention_2"),
    ("use_cache", "x"),
    ("pad_token_id", 10**9),
    ("tie_word_embeddings", "x"),
    ("text_config", {"model_type": "llama"}),
    ("per_layer_config", [1]),
    ("num_experts", 10**9),
    ("pretraining_tp", 10**6),
    ("sliding_window", 0),
    ("mlp_only_layers", "x"),
    ("transformers_version", ["x"]),
    ("architectures", "x"),
    ("model_type", "bert"),
    ("model_type", "llama4"),
    ("model_type", "t5"),
)


class OutOfTime(BaseException):
    """A case took too long. No Exception, so that no handler hides it."""


def mutated(chosen: random.Random) -> str:
    """The text of a mutated configuration."""
    config = copy.deepcopy(chosen.choice(BASES))
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        places = list(_places(config))
        section, key = chosen.choice(places)
        match chosen.randrange(7):
            case 0:
                del section[key]
            case 1:
                added, value = chosen.choice(ADDED)
                chosen.choice([config, *(part for part in config.values() if isinstance(part, dict))])[added] = value
            case 2:
                section[key] = copy.deepcopy(chosen.choice(list(section.values())))
            case 3 | 4:
                alike = [value for value in VALUES if type(value) is type(section[key])]
                section[key] = copy.deepcopy(chosen.choice(alike or VALUES))
            case _:
                section[key] = copy.deepcopy(chosen.choice(VALUES))
        if not config:
            break
    text = json.dumps(config)
    place = chosen.randrange(len(text))
    match chosen.randrange(30):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + chosen.choice('[]{}",:9\0\u20ac') + text[place + 1 :]
        case 2:
            return text[:-1] + ', "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
        case 3:
            return text[:-1] + ', "a": ' + '{"b": ' * 300 + "1" + "}" * 301
    return text


def _places(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key with the object that has it."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _places(value)


def try_fit(text: str, directory: Path) -> dict[str, Any]:
    """How `fit` ends for a configuration."""
    (directory / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    Path("/proc/self/clear_refs").write_text("5")  # The peak of resident memory starts anew.
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
    try:
        result = CliRunner().invoke(fit, ["--model", str(directory), "--gpu", "RTX-4090", "--length", "256"])
        error, lines = result.exception, result.stderr.splitlines()
    except OutOfTime as late:
        error, lines = late, []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
    found = {"cpu_seconds": round(time.process_time() - start, 1), "peak_bytes": peak}
    if error is not None and not isinstance(error, SystemExit):
        return {**found, "end": "fault", "why": "".join(traceback.format_exception(error))[-3000:]}
    refusals = [line for line in lines if line.startswith("error: ")]
    if result.exit_code in (0, DoesNotFit.exit_code):
        return {**found, "end": "answered" if peak < MOST_BYTES else "fault", "why": result.stdout[:80]}
    one_line = len(refusals) == 1 and len(refusals[0]) <= LONGEST_LINE and "MemoryError" not in refusals[0]
    return {**found, "end": "refused" if one_line and peak < MOST_BYTES else "fault", "why": " ".join(lines)[-600:]}


def out_of_time(number: int, frame: FrameType | None) -> None:
    """End a case."""
    raise OutOfTime


def main(seed: int, count: int, first: int = 0) -> None:
    """Try `count` configurations after the first ones of a seed."""
    from lean_finetune.commands import fit_text  # noqa: F401  (imports torch, before the limit of the address space)

    chosen = random.Random(seed)
    signal.signal(signal.SIGPROF, out_of_time)
    with tempfile.TemporaryDirectory() as name:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.RLIM_INFINITY))
        for number in range(count):
            text = mutated(chosen)
            if number >= first:
                print(json.dumps({"case": number, **try_fit(text, Path(name)), "text": text[:400]}), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
