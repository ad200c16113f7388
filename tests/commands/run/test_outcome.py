"""What `run` ends with: figures and answers as they are, in the columns of the terminal."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.run.outcome import outcome_lines, read_outcome
from lean_finetune.core.atomic_files import FIGURES, write_json
from tests.workspace import write_rows

QUESTION = "<|im_start|>user\nWhat is 2 + 2?\nShort.<|im_end|>\n<|im_start|>assistant\n"


def answer(**values: Any) -> dict[str, Any]:
    """A line of generations.jsonl."""
    line = {"family": "add", "prompt": QUESTION, "expected": "4", "base": "5", "tuned": "4"}
    return {**line, "base_correct": False, "tuned_correct": True, **values}


def lines_of(place: Path, *answers: dict[str, Any], columns: int = 80, **evaluate: Any) -> list[str]:
    """The lines after a run with these answers and figures."""
    write_json(place / "data/estimate" / FIGURES, {"peak_bytes_predicted": 50 * 2**20})
    write_json(place / "data/estimate/verdict.json", {"refusal": None})
    write_json(place / "data/train" / FIGURES, {"peak_bytes_measured": evaluate.pop("measured", 50 * 2**20)})
    write_json(place / "data/evaluate" / FIGURES, {"base_loss": 2.0, "tuned_loss": 0.5, **evaluate})
    write_rows(place / "data/evaluate/generations.jsonl", list(answers))
    return list(outcome_lines(read_outcome(), Path("p"), elsewhere=True))


def test_figures_before_and_after(home: Path):
    lines = lines_of(home, answer())
    assert lines[1:3] == [
        "memory         fits: peak of tensors 50 MiB predicted, 50 MiB measured (+0.0%)",
        "held-out loss  2 before training, 0.5 after",
    ]
    assert lines[4:8] == [
        "asked          What is 2 + 2? / Short.",
        "expected       4",
        f"{'before (differs)':<38} | after (exact)",
        f"{'5':<38} | 4",
    ]
    assert lines[9:11] == ["report         p/data/report/report.html", "next           cd p"]
    lines = lines_of(home, measured=None, base_loss=None, tuned_loss=None)
    assert lines[1].endswith("predicted, not measured") and lines[2].endswith("not known: no rows are held out")
    lines = lines_of(home, base_reward_accuracy=0.5, tuned_reward_accuracy=0.75)
    assert "right order    50.0 % before training, 75.0 % after" in lines


def test_a_project_without_a_commit_gets_one_before_experiments(home: Path):
    """Experiments in a repository of the user's: `compare` listed ninety parameters, and no baseline."""
    commands = [line[15:] for line in lines_of(home)]
    first = commands.index(next(line for line in commands if line.startswith("lean-finetune chat")))
    assert commands[first - 1].startswith("git add ") and commands[first - 1].endswith(
        '&& git commit -m "Start a lean-finetune project"'
    )


def test_an_answer_that_was_not_compared_is_not_called_wrong(home: Path):
    """A free text that differs from the row's own in one word."""
    text = "\n".join(lines_of(home, answer(base_correct=None, tuned_correct=None)))
    assert "before " in text and "(differs)" not in text and "(exact)" not in text


def test_the_answers_are_spread_over_the_file(home: Path):
    """The best of many answers would not show what was learnt."""
    lines = lines_of(home, *(answer(expected=str(number)) for number in range(9)))
    assert [line.split()[1] for line in lines if line.startswith("expected")] == ["0", "3", "6"]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("<s>[INST] Say hi. [/INST]", "Say hi."),
        ("<start_of_turn>user\nSay hi.<end_of_turn>\n<start_of_turn>model\n", "Say hi."),
        (
            "<|start_header_id|>user<|end_header_id|>\n\nSay hi.<|eot_id|><|start_header_id|>model<|end_header_id|>",
            "Say hi.",
        ),
        ("Once upon a time", "Once upon a time"),
        ("<|im_start|>user\nIs 1 < 2 and x<y>z?<|im_end|>\n<|im_start|>assistant\n", "Is 1 < 2 and x<y>z?"),
        ("User: Say hi.\n", "Say hi."),
        ("", ""),
    ],
)
def test_a_prompt_is_shown_without_its_template(home: Path, prompt: str, asked: str):
    lines = lines_of(home, answer(prompt=prompt))
    assert next(line for line in lines if line.startswith("asked"))[15:].strip() == asked


def test_long_wide_and_hostile_texts_stay_in_their_columns(home: Path, monkeypatch: pytest.MonkeyPatch):
    """A line of 10,000 characters, characters of two columns, and codes that clear the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    texts = ["word " * 2000, "x" * 5000, "把三周换算成天。" * 50, "\x1b[2J\u202eabc\r\b", ""]
    wide = json.loads('"\\u628a"')
    for text in texts:
        for line in lines_of(home, answer(prompt=text, expected=text, base=text, tuned=text)):
            assert len(line) + sum(one >= "\u3000" for one in line) <= 80, line
            assert line.isprintable()
    assert wide in "".join(lines_of(home, answer(tuned=texts[2])))
    assert "(nothing)" in "".join(lines_of(home, answer(tuned="")))
