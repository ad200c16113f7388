"""Commands that need no PyTorch answer without importing it or another slow library."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lean_finetune.cli import main
from lean_finetune.stages.code import entries
from tests.conftest import ROOT
from tests.processes import run_bounded

SLOW_LIBRARIES = ("torch", "transformers", "datasets", "matplotlib", "dvc")
"""Each takes between half a second and seven of CPU."""
PROGRAM = """
import runpy, sys
for module, *arguments in {commands!r}:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, (module, ended.code)
    print("END")
    assert not (loaded := [name for name in {slow!r} if name in sys.modules]), (module, arguments, loaded)
"""


def test_help_and_cheap_commands_import_no_slow_library(tmp_path: Path):
    """Seven seconds of imports for a page of text."""
    curve = tmp_path / "curve.csv"
    curve.write_text("step,live_gib\n" + "".join(f"{step},{10 + 0.02 * step}\n" for step in range(20)))
    commands = [[f"stages.{stage}", "--help"] for stage in ("code", *entries(ROOT))]
    helps = [[name, "--help"] for name in main.commands]
    for arguments in (["--help"], *helps, ["fit", "--list-gpus"]):
        commands.append(["lean_finetune.cli", *arguments])
    commands.append(["lean_finetune.cli", "explain", str(curve)])
    program = PROGRAM.format(commands=commands, slow=SLOW_LIBRARIES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_bounded([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    texts = done.stdout.split("END\n")[: len(commands)]
    assert all("Usage: " in text and len(text.splitlines()) > 5 for text in texts[:-2])
    assert "H100" in texts[-2] and len(texts[-2].splitlines()) >= 16
    assert texts[-1].startswith("leak: live_bytes grows steadily")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["fitt"], "'fitt'"),
        (["preset", "8b-qlora-24gb"], "no command any more; `lean-finetune plan --model MODEL --gpu GPU` chooses"),
        (["--lenght"], "--lenght"),
        (["fit", "nonsense"], "(nonsense)"),
        (["fit", "--length", "0"], "'--length'"),
        (["generate"], "'PROMPTS'"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_exit_code_2(arguments: list[str], wrong: str):
    """Click alone prints four lines. Scripts tell a wrong call from a run that failed by the exit code."""
    answer = CliRunner().invoke(main, arguments, prog_name="lean-finetune")
    assert answer.exit_code == 2 and answer.stdout == ""
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1
    assert wrong in answer.stderr and "--help`" in answer.stderr
