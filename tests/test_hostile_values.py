"""YAML of strangers ends in a value or in one line: files, and values of the command line."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc.exceptions import DvcException
from dvc.utils.hydra import apply_overrides
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.config.load import COMMON_PARAMS, load_params, parse_params, with_flags
from lean_finetune.config.other_tools import tables
from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import NotYaml, parse_yaml
from tests.commands.tool_configs import AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, SWIFT_YAML, TORCHTUNE, TRL

TRIES = 600
SHARES = pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
"""Every fourth value or try, and all of them."""
LONGEST_LINE = 1200
MOST_SECONDS = 10.0
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 8)}]" for k in range(1, 20)
)
MERGE_BOMB = "b0: &b0 {x: 1}\n" + "\n".join(
    f"b{k}: &b{k}\n  <<: [{', '.join([f'*b{k - 1}'] * 8)}]\n  x{k}: 1" for k in range(1, 20)
)
REFUSED = {
    "[" * 3000: "nested more than 50 levels",
    "- " * 3000: "nested more than 50 levels",
    "{a: " * 3000: "nested more than 50 levels",
    "\n".join(" " * level + "a:" for level in range(1000)): "nested more than 50 levels",
    ALIAS_BOMB: "more than 20000 values, counting those of aliases",
    MERGE_BOMB: "more than 20000 values, counting those of aliases",
    "[" + "1," * 21_000 + "]": "more than 20000 values",
    "a" * 1_100_000: "more than 1048576 bytes",
    "&a [*a]": "contains itself",
    "- &a x\n- &a {b: *a}": "contains itself",
    "!!int abc": "invalid literal",
    "!!float x": "could not convert",
    "!!bool x": "KeyError: 'x'",
    "!!timestamp x": "failed to construct timestamp",
    "2024-02-30": "day is out of range",
    "9" * 5000: "Exceeds the limit",
    "0x" + "f" * 5000: "an integer must have at most 1024 bits; got 20000",
    "!!set {a, b}": "type set",
    "!!binary aGFsbG8=": "type bytes",
    "!!python/object/apply:os.system [x]": "could not determine a constructor",
    "? [a]\n: b": "a key must be",
    "? {a: 1}\n: b": "unhashable key",
    "=": "could not determine a constructor",
    "a: 1\n---\nb: 2": "another document",
    "a\0": "unacceptable character",
}
HOSTILE = [
    *REFUSED,
    *("", "~", "{}", "[]", "''", "[[]]", "{a: {b: {c: 1}}}", "[1, two, ~]", "{1: 2, ~: 3, 2024-01-01: 4}", "{[]: 1}"),
    *("0", "-1", "1e999", "-.inf", ".nan", "0.5", "1_0", "0o17", str(2**70), str(-(2**70)), "1e-320", "true", "no"),
    *("2024-01-01", "2024-01-01T25:00:00", "2024-01-01 10:00:00+99:00", "12:30:45", "*x", "&x", "!", "%", "@", "`"),
    *("|", '"\\ud800"', '"\\0"', "'\n'", "\u2028", "\x1b[2J", "a: b: c", "- a\nb", "%YAML 1.1\n---\nno", "\t"),
    *("<<: 3", "&x {a: *x}", "&x [1, *y]", "[&x 1, *x, &x 2, *x]", "!<tag:x> 1", "!!omap [a: 1]", "!!str 1"),
    *("x" * 5000, "[" + "x, " * 900 + "]"),
    *("../../etc/passwd", "hf://", "hf://a/b/c", "$(touch x)", "${oc.env:HOME}", "file:///dev/zero", "~root", "a\\b"),
    *("[{source: a}]", "[{source: [a]}]", "[{source: a, weight: -1}]", "[{source: a, rows: 0.5}]", "[{sauce: a}]"),
    "[[{source: a}]]",
]  # fmt: skip


def one_line(try_it: Callable[..., Any], *arguments: Any) -> str | None:
    """The refusal of what is tried; None if it ends in a value. Any other exception fails the test."""
    start = time.perf_counter()
    try:
        try_it(*arguments)
        return None
    except UserError as error:
        return str(error)
    finally:
        assert time.perf_counter() - start < MOST_SECONDS


def check_refusal(text: str, what: Any) -> None:
    """A refusal is one line that a terminal can show."""
    assert "Traceback" not in text and len(" ".join(text.split())) <= LONGEST_LINE, (what, text[:300])


@pytest.mark.parametrize("text", REFUSED, ids=[f"{text[:12]!r}" for text in REFUSED])
def test_yaml_beyond_a_limit_or_of_another_type_is_refused(text: str):
    """A traceback, or minutes and gigabytes for a small file."""
    start = time.perf_counter()
    with pytest.raises(NotYaml) as caught:
        parse_yaml(text)
    assert REFUSED[text] in str(caught.value) and "\n" not in str(caught.value)
    assert time.perf_counter() - start < MOST_SECONDS


def test_yaml_within_the_limits_is_read():
    """Limits that refuse what people write: aliases, merged keys, anchors of the same name, many values."""
    assert parse_yaml("a: &x {b: 1}\nc:\n  <<: *x\n  d: [*x, *x]\n") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": [{"b": 1}] * 2},
    }
    assert parse_yaml("- &a 1\n- &a 2\n- *a") == [1, 2, 2]
    assert len(parse_yaml("[" + "1," * 10_000 + "]")) == 10_000
    assert parse_yaml("1e-05") == 1e-05 and parse_yaml("no") == "no"


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


@SHARES
def test_hostile_values_of_the_command_line_end_in_a_value_or_one_line(share: int):
    """`--set data.template_date=2024-02-30` and 44 other values of 550 ended in a traceback."""
    chosen, params = random.Random(29), load_params(COMMON_PARAMS)
    keys = [
        *leaves(params.model_dump()),
        "a",
        "train",
        "train.",
        ".",
        "train.lora.rank.x",
        "x." * 300,
        "x." * 3000,
        "data.source.0.source",
    ]
    refused = 0
    for number in range(0, TRIES, share):
        key = chosen.choice(keys)
        value = HOSTILE[number % len(HOSTILE)] if number % 3 else "".join(chosen.choices(HOSTILE[25:], k=2))
        if (text := one_line(with_flags, params, [f"{key}={value}"])) is not None:
            check_refusal(text, (key, value[:80]))
            refused += 1
    assert TRIES // share // 2 < refused < TRIES // share


@SHARES
def test_hostile_files_end_in_a_value_or_one_line(tmp_path: Path, share: int):
    """The same values in params.yaml, as `dvc exp run -S` writes them."""
    chosen, path = random.Random(29), tmp_path / "params.yaml"
    shipped = [line for line in COMMON_PARAMS.read_text(encoding="utf-8").splitlines() if line.lstrip()[:1] != "#"]
    for value in [value for value in HOSTILE if len(value) < 10_000][::share]:
        lines = list(shipped)
        place = chosen.choice([number for number, line in enumerate(lines) if ": " in line])
        lines[place] = f"{lines[place].partition(':')[0]}: {value}"
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        if (text := one_line(load_params, path)) is not None:
            check_refusal(text, value[:80])
        if len(value) < 40 and (text := one_line(change_params, {"seed": 1}, path, path)) is not None:
            check_refusal(text, value[:80])


def test_hostile_values_that_dvc_writes_end_in_a_value_or_one_line(tmp_path: Path):
    """`dvc exp run -S`: DVC parses a value by its own grammar, and writes it or refuses it."""
    chosen, path, written = random.Random(29), tmp_path / "params.yaml", 0
    shipped = [line for line in COMMON_PARAMS.read_text(encoding="utf-8").splitlines() if line.lstrip()[:1] != "#"]
    keys = [*leaves(load_params(COMMON_PARAMS).model_dump())]
    for value in [value for value in HOSTILE if len(value) < 10_000][::3]:
        path.write_text("\n".join(shipped), encoding="utf-8")
        quoted = chosen.choice([value, f"'{value}'", f"[{value}]", f"{{a: {value}}}"])
        try:
            apply_overrides(path, [f"{chosen.choice(keys)}={quoted}"])
        except (DvcException, OmegaConfBaseException, HydraException, ValueError):  # DVC's own answer.
            continue
        written += 1
        if (text := one_line(load_params, path)) is not None:
            check_refusal(text, value[:80])
    assert written > 10


def converted_params(path: Path) -> None:
    """What `lean-finetune import` makes of a file."""
    converted = read_config_of_tool(path, gpus=1)
    list(converted.lines())
    with_flags(load_params(COMMON_PARAMS), converted.flags())


@SHARES
def test_hostile_configurations_of_other_tools_end_in_a_value_or_one_line(tmp_path: Path, share: int):
    """The same values for a key that is there, and for one that the tables know."""
    chosen, path = random.Random(29), tmp_path / "run.yaml"
    keys = [key for table in tables() for key in table["keys"]]
    tools = (AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, SWIFT_YAML, TORCHTUNE, TRL)
    for number, value in enumerate([value for value in HOSTILE if len(value) < 10_000][::share]):
        for tool in tools[number % 3 :: 3]:
            lines = tool.splitlines()
            place = chosen.randrange(1, len(lines))
            lines[place] = f"{lines[place].partition(':')[0]}: {value}"
            lines.append(f"{chosen.choice(keys)}: {value}")
            path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
            if (text := one_line(converted_params, path)) is not None:
                check_refusal(text, value[:80])


def test_variables_of_a_script_do_not_multiply_it(tmp_path: Path):
    """`a=xx…` and `$a$a…`: a small script that is megabytes once its variables are replaced."""
    (tmp_path / "run.sh").write_text(f"a={'x' * 200}\nswift sft --model {'$a' * 20_000}\n")
    text = one_line(read_config_of_tool, tmp_path / "run.sh", 1)
    assert text is not None and "must have at most" in text


def test_a_file_that_ends_never_is_not_read_to_its_end():
    """`--from /dev/zero` took all memory."""
    assert one_line(read_config_of_tool, Path("/dev/zero"), 1) is not None


def test_parameters_of_a_wrong_shape_are_refused_in_one_line():
    """Keys that params.yaml cannot have, and values that format strings would read."""
    values: dict[Any, Any] = load_params(COMMON_PARAMS).model_dump()
    for wrong in (
        {**values, "seed": {1: {None: 2}}},
        {**values, 3: 4},
        {**values, "data": {**values["data"], None: 1}},
    ):
        assert (text := one_line(parse_params, wrong)) is not None
        check_refusal(text, "")
    refusal = one_line(with_flags, load_params(COMMON_PARAMS), ["run.rendezvous='{train.lr} {x} {0.__class__}'"])
    assert refusal is not None and "{train.lr} {x} {0.__class__}" in refusal


@pytest.mark.parametrize(
    "key", ["train.lora.rank", "train.loss_chunk", "run.cpu_threads", "run.data_workers", "data.max_length"]
)
@pytest.mark.parametrize("value", [2**62, 2**63, 10**300])
def test_no_number_is_beyond_what_libraries_take(key: str, value: int):
    """`Overflow when unpacking long long` behind a traceback of PyTorch."""
    fault = one_line(with_flags, load_params(COMMON_PARAMS), [f"{key}={value}"])
    assert fault is not None and fault.startswith(f"{key}: must be less than or equal to ") and len(fault) < 300


def test_an_unknown_key_of_any_length_is_one_short_line():
    fault = one_line(with_flags, load_params(COMMON_PARAMS), ["a" * 5000 + "=1"])
    assert fault is not None and "unknown parameter" in fault and len(fault) < 400
    content = {**load_params(COMMON_PARAMS).model_dump(), "b" * 5000: 1}
    fault = one_line(parse_params, content)
    assert fault is not None and "unknown parameter" in fault and len(fault) < 400


def test_a_pipe_is_read_if_somebody_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--params <(…)` works, and a pipe in place of a file ends no script: reading it waited for a writer forever."""
    monkeypatch.setattr("lean_finetune.core.read_yaml.PIPE_SECONDS", 0.3)
    pipe = tmp_path / "params.yaml"
    os.mkfifo(pipe)
    fault = one_line(load_params, pipe)
    assert fault is not None and "is a pipe that nobody writes for 0.3 s" in fault
    writer = threading.Thread(target=pipe.write_bytes, args=(COMMON_PARAMS.read_bytes() + b"#" * 200_000,))
    writer.start()
    assert load_params(pipe) == load_params(COMMON_PARAMS)
    writer.join()
    assert "is no file" in str(one_line(load_params, Path("/dev/null")))


def test_a_read_only_file_stays(tmp_path: Path):
    """A file whose directory can be written is replaced, though its owner made it read-only."""
    file = tmp_path / "params.yaml"
    file.write_bytes(COMMON_PARAMS.read_bytes())
    file.chmod(0o444)
    fault = one_line(change_params, {"seed": 7}, file, file)
    assert fault == f"{file}: is read-only, so nothing is written; allow it (chmod u+w), or name another file"
    assert file.read_bytes() == COMMON_PARAMS.read_bytes()


SCRIPT = """MODEL=org/model
ARGS=(--model $MODEL --tuner_type full
  --max_length 8192)
ARGS+=(--lora_rank "$((64 / 8))")
if [ -n "$X" ]; then Y=1; fi
CUDA_VISIBLE_DEVICES=0 swift sft "${ARGS[@]}" --dataset 'org/rows#500' --output_dir ${OUT:-out} 2>&1 | tee log
"""
SIGNS = "\"'`$(){}[]<>|&;\\\n#=-@* \x1b\0é\u202e"
BOMBS = [
    "$" * 100_000,
    "(" * 100_000,
    "$(" * 5000,
    "${" * 5000 + "}" * 5000,
    "A=(x)\n" + "A=(${A[@]} ${A[@]})\n" * 40,
    "A=xx\n" + "A+=$A\n" * 40,
    "cat <<E",
    "cat" + " <<E" * 20_000,
    "if true; then\n" * 20_000,
    "'" * 99_999,
    "\\\n" * 200_000,
]


def test_scripts_of_strangers_are_read_or_refused_in_one_line(tmp_path: Path):
    """A script that takes minutes or a traceback, because nobody runs it here."""
    rng = random.Random(46)
    texts = [f"{bomb}\n{SCRIPT}" for bomb in BOMBS]
    for _ in range(TRIES // 6):
        signs = list(SCRIPT)
        for _ in range(rng.randint(1, 6)):
            signs.insert(rng.randrange(len(signs)), rng.choice(SIGNS))
            del signs[(at := rng.randrange(len(signs))) : at + rng.choice((0, 0, 1, 9))]
        texts.append("".join(signs))
    path = tmp_path / "run.sh"
    for text in texts:
        path.write_text(text)
        start = time.perf_counter()
        fault = one_line(read_config_of_tool, path, 1)
        assert time.perf_counter() - start < MOST_SECONDS and "\n" not in (fault or ""), text[:200]
