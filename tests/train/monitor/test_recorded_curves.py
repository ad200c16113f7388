"""Recorded curves: those of other tools are read by documented names, and a bad file is refused with its line."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from cuda_memory.growth import PEAK, Growth
from cuda_memory.units import GIB
from lean_finetune.commands.explain import explain
from lean_finetune.core.atomic_files import write_csv
from lean_finetune.core.errors import UserError
from lean_finetune.train.callbacks.callback import CURVE_COLUMNS
from lean_finetune.train.monitor.growth_advice import (
    MOST_BYTES,
    PIPELINE_COLUMNS,
    explained,
    read_recorded,
    usual_causes,
)


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def test_units_are_taken_from_column_names(tmp_path: Path):
    """Also behind the byte order mark with which Excel saves tables."""
    path = written(
        tmp_path / "curve.csv", "\ufeffstep,allocated_gib,reserved_mib,rss_bytes,gpu\n0,1.5,2048,7,a\n1,,2048,7,b\n"
    )
    assert read_recorded(path) == [
        {"step": 0, "allocated_bytes": 1.5 * GIB, "reserved_bytes": 2 * GIB, "rss_bytes": 7},
        {"step": 1, "allocated_bytes": None, "reserved_bytes": 2 * GIB, "rss_bytes": 7},
    ]


def test_a_curve_of_stage_train_is_read(tmp_path: Path):
    """Columns renamed in the loop, and no longer known here."""
    path = tmp_path / "curves.csv"
    write_csv(path, CURVE_COLUMNS, [{name: step for name in CURVE_COLUMNS} for step in range(3)])
    assert {"step", "allocated_bytes", "live_bytes", "reserved_bytes", "rss_bytes", "rss_own_bytes"} < set(
        read_recorded(path)[0]
    )
    assert {"largest_micro_batch_tokens", "tokens", "longest_row"} < set(read_recorded(path)[0])


def leaking(columns: str) -> str:
    others = ",1" * columns.count(",")
    return f"step,{columns}\n" + "".join(f"{step},{1000 + 2 * step}{others}\n" for step in range(100))


@pytest.mark.parametrize(
    ("column", "cause"),
    [("live_mib", "`total += loss` without .item()"), ("rss_mib", "a list or dictionary that grows")],
)
def test_a_curve_of_another_program_names_usual_causes_and_no_switch_of_ours(tmp_path: Path, column: str, cause: str):
    """A user of Trainer was told to run `dvc exp run -S train.optimizer=adamw`."""
    lines = explained(written(tmp_path / "curve.csv", leaking(column)), None)
    assert lines[0].startswith("leak: ") and "usual causes:" in lines and any(cause in line for line in lines)
    assert not any("dvc" in line or "-S " in line for line in lines)
    assert any("lean-finetune snapshot" in line for line in lines) == (column == "live_mib")


def test_a_curve_of_stage_train_names_our_switches(tmp_path: Path):
    columns = "live_mib,supervised_tokens,padded_tokens,micro_batches"
    (line,) = explained(written(tmp_path / "curve.csv", leaking(columns)), None)
    assert "`dvc exp run -S train.optimizer=adamw" in line
    assert PIPELINE_COLUMNS < {*CURVE_COLUMNS}


def test_every_growth_has_causes_and_none_has_none(tmp_path: Path):
    assert any("limit the tokens" in cause for cause in usual_causes(Growth(cause="length", series=PEAK)))
    assert usual_causes(Growth(cause="steady", series=PEAK)) == ()
    rows = "".join(f"{step},1000,{1500 + 10 * step}\n" for step in range(100))
    text = "\n".join(explained(written(tmp_path / "pieces.csv", f"step,allocated_mib,reserved_mib\n{rows}"), None))
    assert text.startswith("fragmentation: ") and "PYTORCH_ALLOC_CONF=expandable_segments:True" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"curve\.csv:1: a curve must have the column step and .*; got an empty file"),
        ("step,loss\n0,1\n", r"curve\.csv:1: .*; got step, loss; rename its columns"),
        ("rss_bytes\n0\n", r"curve\.csv:1: a curve must have the column step"),
        ("step,rss_bytes,rss_mib\n0,1,1\n", r"curve\.csv:1: .* each once; got step, rss_bytes, rss_mib"),
        ("step,rss_bytes\n", r"curve\.csv: must have a line for each step"),
        ("step,rss_bytes\n0,1\n1\n", r"curve\.csv:3: a line must have 2 cells as the header; got 1"),
        ("step,rss_bytes\n0,many\n", r"curve\.csv:2: rss_bytes must be a number of 0 or more; got 'many'"),
        ("step,rss_bytes\n0,nan\n", r"curve\.csv:2: rss_bytes must be a number of 0 or more; got 'nan'"),
        ("step,rss_bytes\n0,-1\n", r"curve\.csv:2: rss_bytes must be a number of 0 or more; got '-1'"),
        ("step,rss_bytes\n,1\n", r"curve\.csv:2: steps must increase; got None"),
        ("step,rss_bytes\n0,1\n0,1\n", r"curve\.csv:3: steps must increase; got 0.0 after 0.0"),
        ('step,rss_bytes\n0,"1\n', r"curve\.csv: must be a CSV file in UTF-8"),
        ("step,rss_bytes\n\udcff,1\n", r"curve\.csv: must be a CSV file in UTF-8"),
    ],
)
def test_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        read_recorded(written(tmp_path / "curve.csv", text))


def test_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.csv: must be a CSV file that can be read; No such file"):
        read_recorded(tmp_path / "none.csv")


def test_a_curve_of_any_size_is_not_read(tmp_path: Path):
    """Lines without an end took all memory."""
    path = written(tmp_path / "curve.csv", "step,rss_bytes\n")
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(UserError, match=rf"curve\.csv: a curve must have at most {MOST_BYTES} bytes; got"):
        read_recorded(path)


def test_the_command_explains_and_trains_nothing(tmp_path: Path):
    lines = "".join(f"{step},{1000 + 2 * step}\n" for step in range(100))
    path = written(tmp_path / "curve.csv", f"step,rss_mib\n{lines}")
    done = CliRunner().invoke(explain, [str(path), "--left-gib", "2"])
    assert done.exit_code == 0
    assert done.output.startswith("leak: rss_bytes grows steadily (batch shapes unknown) by 2 MiB a step")
    assert "the remaining 2 GiB are used up at about step 1123" in done.output
    assert done.output.splitlines() == explained(path, 2)
    path.write_text("step,rss_mib\n0,x\n")
    done = CliRunner().invoke(explain, [str(path)])
    assert done.exit_code == 1
    assert "curve.csv:2: rss_bytes must be a number" in done.output and "Traceback" not in done.output
