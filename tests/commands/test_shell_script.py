"""Shell scripts that start ms-swift: the words of their command, with the variables and arrays of the script."""

from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.convert.shell_script import Unresolved, commands_of
from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import MOST_BYTES
from tests.commands.tool_configs import TORCHTUNE
from tests.workspace import error, invoke

FLAGS = "--model org/model --tuner_type full"


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    """The parameters of a script, and its flags."""
    (tmp_path / "run.sh").write_text(text)
    converted = read_config_of_tool(tmp_path / "run.sh", gpus=1)
    return {**converted.keys, **converted.values}


@pytest.mark.parametrize(
    "text",
    [
        f"ARGS=({FLAGS} --max_length 8192)\nswift sft \"${{ARGS[@]}}\" --dataset a\n",
        f"declare -a ARGS=(\n  {FLAGS} # the model's\n  --max_length\n  8192\n)\nswift sft ${{ARGS[*]}} --dataset a\n",
        f"ARGS=({FLAGS})\nARGS+=(--max_length 8192)\nswift sft \"${{ARGS[@]}}\" --dataset a\n",
        f"ARGS='{FLAGS}'\nARGS+=' --max_length 8192'\nswift sft $ARGS --dataset a\n",
        f"COMMON_ARGS=\"{FLAGS} \\\n  --max_length 8192\"\nswift sft $COMMON_ARGS --dataset a\n",
        f"N=4096\nexport LENGTH=$((N * 2)) FLAGS=\"{FLAGS}\"\nswift sft $FLAGS --max_length $LENGTH --dataset a\n",
        f"CMD=\"swift sft {FLAGS} --dataset a\"\n$CMD --max_length ${{LENGTH:-8192}}\n",
        f"n=2\nLOG=it\\'s.log\nswift sft {FLAGS} --max_length $(expr 16384 / $n) --dataset 'a' >$LOG 2>&1 &\nwait $!\n",
        f"cat <<EOF > f\nit's `swift`\nEOF\nif :; then\n  env swift sft {FLAGS} --max_length=8192 --dataset a\nfi\n",
        "MODEL=${1:-org/model}\nswift sft --model \"$MODEL\" --tuner_type full --max_length 8192 --dataset a\r\n",
    ],
)  # fmt: skip
def test_arrays_and_variables_of_the_script_are_read(text: str, tmp_path: Path):
    """Flags in an array or a variable that were lost without a word."""
    found = read(tmp_path, text)
    assert (found["model.name"], found["train.method"]) == ("org/model", "full")
    assert (found["data.max_length"], found["dataset"]) == (8192, "a")


REST = "--tuner_type full --dataset a\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"swift sft \"${{ARGS[@]}}\" {REST}", ":1: ${ARGS[@]} is not set in the script, so that its flags are"),
        (f"# flags\nswift sft $COMMON {REST}", ":2: $COMMON is not set in the script, so that its flags are not known"),
        (f"swift sft --model a/b {REST[:-1]} \"$@\"\n", ":1: $@ is an argument of the script, so that its flags"),
        (f"\nswift sft \\\n  --model $MODEL \\\n  {REST}", ":3: model: must be a value; $MODEL is not set in the"),
        (f"swift sft --model $1 {REST}", ":1: model: must be a value; $1 is an argument of the script; write it there"),
        (f"swift sft --model \"m-$(nproc)\" {REST}", ":1: model: must be a value; m-$(nproc) has the output"),
        (f"swift sft --model `head -1 f` {REST}", ":1: model: must be a value; `head -1 f` has the output"),
        (f"swift sft --model ${{M%/*}} {REST}", ":1: model: must be a value; ${M%/*} is no plain variable"),
        (
            f"M=a/b\nif [ -n \"$BIG\" ]; then\n  M=a/big\nfi\nswift sft --model $M {REST}",
            ":5: model: must be a value; $M is set under a condition in line 3; write it there",
        ),
        (f"M=a\n[ -f b ] && M=b\nswift sft --model $M {REST}", "$M is set under a condition in line 2"),
        (f"(M=a)\nswift sft --model $M {REST}", "$M is set under a condition in line 1"),
        (f"for M in a b; do\n  swift sft --model $M {REST}done\n", ":2: model: must be a value; $M is of a loop"),
        (f"read -p Model M\nswift sft --model $M {REST}", "$M is read while the script runs"),
        (f"export M=a\nunset M\nswift sft --model $M {REST}", "$M is not set in the script"),
        ("swift sft --model a/b --dataset $DATA --tuner_type full\n", ":1: dataset: must be a value; $DATA is not"),
        (f"swift sft --model a/b --max_length=$LENGTH {REST}", ":1: max_length: must be a value; $LENGTH is not set"),
        (f"swift sft --model a/b --gradient_accumulation_steps $((16 / n)) {REST}", "must be a value; $n is not"),
        ("swift sft --model a/b --tuner_type $TYPE --dataset a\n", ":1: tuner_type: must be a value; $TYPE is not"),
        (f"export MAX_PIXELS=1003520\nswift sft --model a/b {REST}", ": ENV.MAX_PIXELS: images are not counted here"),
        (f"swift sft --config run.yaml {REST}", ": its command reads run.yaml; name that file"),
        (f"swift sft --model 'a/b {REST}", ":1: the quotation that begins here has no end; close it"),
        (f"swift sft --model $(echo a {REST}", ":1: $(echo a --tuner_typ has no end; close it"),
        ("A=" + "x" * 1000 + "\n" + "A=$A$A\n" * 30 + f"swift sft $A {REST}", "bytes, with its variables"),
        ("#" * (MOST_BYTES + 1), f": must have at most {MOST_BYTES} bytes"),
    ],
)  # fmt: skip
def test_what_only_a_shell_knows_is_refused_with_its_line(text: str, fault: str, tmp_path: Path):
    """A model, a method or a length that became the default, because it stood in a variable."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/run.sh:") and fault in message and "\n" not in message


def test_variables_of_flags_without_effect_are_left_alone(tmp_path: Path):
    """A script refused for the name of its output directory."""
    text = f'swift sft {FLAGS} --output_dir $OUT/$(date +%s) --dataset a --run_name "$NAME"\n'
    assert read(tmp_path, text)["model.name"] == "org/model"


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A configuration from somebody else that runs a command."""
    monkeypatch.chdir(tmp_path)
    text = f"touch ran; `touch ran`\nA=$(touch ran)\nswift sft {FLAGS} --output_dir $(touch ran) --dataset a\n"
    read(tmp_path, text)
    assert not (tmp_path / "ran").exists()


def test_words_are_those_of_bash():
    """An escaped or quoted variable that is replaced, or one that is not split."""
    text = (
        "A='x y'\nB=(p 'q r')\necho $A \"$A\" '$A' \\$A \"\\$A\" a\\ b \"${B[@]}\" ${B[@]} \"${NONE-n}\" ${A:-z} ''\n"
    )
    [command] = commands_of(text, Path("run.sh"))
    split = ["p", "q r"]
    assert command.words == ["echo", "x", "y", "x y", "$A", "$A", "$A", "a b", *split, *split, "n", "x", "y", ""]
    assert not any(isinstance(word, Unresolved) for word in command.words)


@pytest.mark.parametrize("script", ["swift sft --dataset a\n", "ARGS=(--model '')\nswift sft ${ARGS[@]} --dataset a\n"])
def test_a_script_without_a_model_is_not_imported(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The shipped model `tiny` in a run whose own model was not found."""
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(script)
    assert error(invoke(import_config, "run.sh")) == ("run.sh: must name a model; add model: a hub id or a directory")
    assert not Path("params.yaml").exists()
    Path("run.sh").write_text(script.replace("--dataset", "--model org/model --dataset"))
    assert invoke(import_config, "run.sh").exit_code == 0 and load_params().model.name == "org/model"


def test_a_configuration_without_a_model_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As above, of a tool whose file need not name one."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(TORCHTUNE.replace("checkpoint_dir: /models/llama/", "output_dir: out"))
    expected = "run.yaml: must name a model; add checkpointer.checkpoint_dir: a hub id or a directory"
    assert error(invoke(import_config, "run.yaml")) == expected
    assert not Path("params.yaml").exists()
