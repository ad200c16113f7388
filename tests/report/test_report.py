"""The report: the right error, no made-up figure, the same bytes again."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image
from ruamel.yaml import YAML

from lean_finetune.core.atomic_files import write_csv, write_json
from lean_finetune.memory.predict.peak_explanation import TIMELINE_COLUMNS
from stages.report import main
from tests.report.conftest import GENERATION, MIB, TIMELINE, metrics, write_inputs
from tests.workspace import invoke, run_module, told


def report(place: Path) -> tuple[dict, str]:
    """Run the stage; its figures and its page."""
    result = invoke(main)
    assert result.exit_code == 0, result.output
    return json.loads((place / "data/report/figures.json").read_text()), (place / "data/report/report.md").read_text()


def test_error_is_the_prediction_over_the_measurement(place):
    """The published figure: a swapped quotient or sign would flatter the estimator."""
    numbers, text = report(place)
    assert numbers["predicted_error_percent"] == pytest.approx(100 * (120 / 125 - 1))
    assert numbers["error_percent_by_phase"] == {
        "load": None,
        "forward": pytest.approx(0.0),
        "backward": pytest.approx(-4.0),
        "clip": None,
        "optimizer": pytest.approx(0.0),
    }
    assert numbers["heldout_loss_change"] == -1.25 and numbers["exact_match_change_points"] == 100.0
    assert (
        "predicted 0.1172 GiB at its peak (backward), measured 0.1221 GiB: the prediction was off by -4.000 %" in text
    )
    assert "| backward | 0.1172 GiB | 0.1221 GiB | -4.000 % |" in text
    assert "| load | – | 41 MiB | – |" in text and "| clip | – | – | – |" in text


def test_what_was_not_measured_is_null_and_said_so(place):
    """A device without a measurement must give no error, not an error of zero."""
    found = metrics()
    found["train"] |= {"peak_bytes_measured": None, "measured_by_phase": {"forward": None}, "peak_measured_how": None}
    write_inputs(place, found, [GENERATION])
    numbers, text = report(place)
    assert numbers["predicted_error_percent"] is None and set(numbers["error_percent_by_phase"].values()) == {None}
    assert "not measured on cpu" in text and "None" not in text


def test_a_prediction_for_a_gpu_is_not_held_against_a_cpu(place):
    """`hardware.gpu: H100` on a laptop predicts what an H100 would hold: its error here means nothing."""
    found = metrics()
    found["estimate"]["gpu"] = "H100"
    write_inputs(place, found, [GENERATION])
    numbers, text = report(place)
    assert numbers["predicted_error_percent"] is None and set(numbers["error_percent_by_phase"].values()) == {None}
    assert "cannot be compared" in text
    found["train"]["device"] = "NVIDIA H100 80GB HBM3"
    write_inputs(place, found, [GENERATION])
    assert report(place)[0]["predicted_error_percent"] == pytest.approx(-4.0)


def test_memory_plot_holds_measured_steps_only(place):
    """A step without a measurement must not be drawn at zero."""
    report(place)
    with open(place / "data/report/memory.csv", newline="") as file:
        records = [{name: float(value) for name, value in record.items()} for record in csv.DictReader(file)]
    assert [record["step"] for record in records] == [0, 2]
    assert [record["measured_gib"] for record in records] == [125 * MIB / 2**30, 110 * MIB / 2**30]
    assert {record["predicted_gib"] for record in records} == {120 * MIB / 2**30}


def test_the_page_names_what_was_trained_and_what_came_out(place):
    _, text = report(place)
    for line in (
        "| model | org/base at c0ffee |",
        "| data | rows.jsonl, format messages |",
        "| truncated rows | 1,250 (25.0 %) longer than data.max_length, which lost trained tokens |",
        "| dropped rows | 3 (0.1 %): 1 had no answer within data.max_length, 2 repeated another row |",
        "| micro-batches | bucketed; at most 1,024 padded tokens, 25 rows, 512 tokens a row |",
        "| train.grad_ckpt | false |",
        "| hardware.num_gpus | 1 |",
        "| gradients | 30 MiB | 25.0 % |",
        "| up to 64 tokens | 200 | 2.5 | 1.25 | 12.18 | 3.49 |",
        "| sums | 1 | 0 % | 100 % |",
    ):
        assert line in text
    assert "waiting" not in text and "Measured peak of each" not in text
    assert text.index("up to 64") < text.index("over 512") < text.index("**all**")


def test_several_gpus_are_told_apart(place):
    """The most of any GPU alone, and no word of what they wait for each other."""
    with open(place / "params.yaml") as file:
        params = YAML().load(file)
    params["hardware"]["num_gpus"], params["train"]["sharding"] = 2, "zero3"
    with open(place / "params.yaml", "w") as file:
        YAML().dump(params, file)
    found = metrics()
    found["train"]["peak_bytes_measured_by_rank"] = [125 * MIB, 120 * MIB]
    write_inputs(place, found, [GENERATION])
    _, text = report(place)
    assert "| hardware.num_gpus | 2 |" in text and "| train.sharding | zero3 |" in text
    assert "| waiting | 1.5 % of the GPUs' time, for the one with the most tokens |" in text
    assert "Measured peak of each of 2 processes: 0.1221 GiB, 0.1172 GiB." in text


def test_odd_text_cannot_break_the_page(place):
    """Generated text is anything: a fence or a pipe in it would swallow the rest of the page."""
    odd = {**GENERATION, "family": "a|b\n# c", "tuned": "x" * 5000}
    found = metrics()
    found["evaluate"]["by_family"] = {"a|b\n# c": found["evaluate"]["by_family"]["sums"]}
    write_inputs(place, found, [odd])
    _, text = report(place)
    assert "| a\\|b # c | 1 | 0 % | 100 % |" in text and "#### a\\|b # c" in text
    assert "    I | do\n    ```\n    not know" in text
    assert "x" * 801 not in text
    assert not any(line.startswith(("```", "# c")) for line in text.splitlines())


def test_without_questions_the_page_says_so(place):
    """evaluate.generate_rows 0, or plain texts: null figures, no crash."""
    found = metrics()
    found["evaluate"] |= {
        "generated_rows": 0,
        "base_exact_match_percent": None,
        "tuned_exact_match_percent": None,
        "by_family": {},
    }
    write_inputs(place, found, [])
    numbers, text = report(place)
    assert numbers["exact_match_change_points"] is None
    assert "no held-out row has a prompt that can be answered" in text and "None %" not in text


def test_questions_left_out_and_perplexities_without_a_number_are_shown(place):
    """A match over the short answers alone must not pass for one over all; a null must not break the page."""
    found = metrics()
    found["evaluate"] |= {"unanswerable_rows": 1234, "tuned_perplexity": None}
    write_inputs(place, found, [GENERATION])
    _, text = report(place)
    assert "Skipped: 1,234 held-out rows" in text
    assert "(perplexity 12.18 before, – after)" in text


def test_what_merging_cost_is_shown_where_it_was_asked(place):
    """evaluate.merged: a model that is published merged, judged by its adapter's figures."""
    assert "Merged into one model" not in report(place)[1]
    found = metrics()
    found["evaluate"] |= {"merged_loss": 1.7321, "merged_minus_tuned_loss": 0.0021, "merged_exact_match_percent": None}
    write_inputs(place, found, [GENERATION])
    assert "Merged into one model: loss 1.732, +0.0021 beside the adapter on its base." in report(place)[1]


def test_samples_are_of_different_families(place):
    """Six samples of one task would show one sixth of the result."""
    names = [f"family{number:02}" for number in range(8)]
    lines = [{**GENERATION, "family": name} for _ in range(5) for name in names]
    write_inputs(
        place,
        metrics()
        | {
            "evaluate": metrics()["evaluate"]
            | {"by_family": dict.fromkeys(names, metrics()["evaluate"]["by_family"]["sums"])}
        },
        lines,
    )
    _, text = report(place)
    shown = [line for line in text.splitlines() if line.startswith("#### ")]
    assert len(shown) == len(set(shown)) == 6


def test_a_refused_prediction_is_shown(place):
    """With estimate.enforce false the run goes on: the reader must still see that it was not expected to fit."""
    (place / "data/estimate/verdict.json").write_text('{"enforce": true, "refusal": "predicted peak 9 GiB exceeds 8"}')
    assert "Verdict: predicted peak 9 GiB exceeds 8." in report(place)[1]


def test_what_memory_did_while_it_trained_is_shown(place):
    """A leak that was warned of in a log which nobody reads."""
    assert "Memory over the run: flat: held_bytes grows by 0 bytes a step; " in report(place)[1]


def test_what_a_gpu_reserves_is_shown_and_a_cpu_has_no_such_row(place):
    """A process told to take no more than its tensors."""
    assert "reserved" not in report(place)[1]
    found = metrics()
    found["estimate"] |= {
        "gpu": "L4",
        "reserved_bytes_predicted": 150 * MIB,
        "reserved_bytes_predicted_expandable": 130 * MIB,
        "reserved_bytes_predicted_native": 150 * MIB,
        "process_bytes_predicted": 291 * MIB,
        "host_bytes_predicted": 512 * MIB,
        "reserved_replayed": "worst micro-batches only: it is a test",
    }
    write_inputs(place, found, [GENERATION])
    text = report(place)[1]
    assert "Reserved over the plan: worst micro-batches only: it is a test." in text
    assert "| reserved, expandable segments | 0.127 GiB |" in text
    assert "| process, without margin | 0.2842 GiB |" in text


def test_what_the_plan_reserves_is_drawn_where_it_was_replayed(place):
    """A staircase that nobody sees, or a picture of nothing on a CPU."""
    gpu = {
        **dict.fromkeys((f"reserved_bytes_predicted{kind}" for kind in ("", "_expandable", "_native")), 150 * MIB),
        **{"process_bytes_predicted": 291 * MIB, "host_bytes_predicted": 512 * MIB},
        **{"reserved_replayed": "all 3 steps replayed", "reserved_settled_step": 1, "retries_predicted": 2},
    }
    found = metrics()
    found["estimate"] |= gpu
    write_inputs(place, found, [GENERATION])
    text = report(place)[1]
    assert "Reserved over the plan: all 3 steps replayed." in text and "reserved.png" not in text
    rows = "".join(f"{step},0.1,0.{step + 1},0.1,0\n" for step in range(3))
    header = "step,allocated_gib,reserved_gib,reserved_expandable_gib,retries\n"
    (place / "data/estimate/reserved.csv").write_text(header + rows)
    text = report(place)[1]
    assert "It is constant after optimizer step 1 of these." in text and "frees its cache 2 times" in text
    picture = (place / "data/report/reserved.png").read_bytes()
    (place / "data/estimate/reserved.csv").write_text(header + rows.replace("0.3", "0.2"))
    report(place)
    assert (place / "data/report/reserved.png").read_bytes() != picture


def test_the_peak_is_taken_apart(place):
    """A peak nobody can do anything about: no tensor, module or reason named."""
    _, text = report(place)
    assert (
        "| activations | mm in forward | `model.layers.*.mlp.up_proj` | 4 × 64 × 128 bfloat16 | 32 | 50 MiB |" in text
    )
    assert "| weights | held | – | – | 32 | 50 MiB |" in text
    assert "| weights | bf16, 2 bytes a value | 9 | 40 MiB |" in text


def test_two_processes_write_the_same_bytes(place):
    """A picture with a date or a set's order in it would mark the report as changed after every run."""
    outcomes = []
    for seed in ("1", "2"):
        done = run_module("stages.report", cwd=place, env={"PYTHONHASHSEED": seed})
        assert (done.returncode, done.stderr) == (0, "")
        outcomes.append(
            {p.name: p.read_bytes() for p in [*(place / "data/report").iterdir(), place / "metrics/report.json"]}
        )
    assert outcomes[0] == outcomes[1]
    assert {
        *("report.md", "report.json", "figures.json", "memory.csv"),
        *("memory.png", "timeline.png", "loss.png", "switches.png"),
    } == set(outcomes[0])


def test_pictures_are_drawn_from_the_numbers(place):
    """A blank canvas has one colour, and a plot that ignores its input never changes."""
    report(place)
    before = {path.name: path.read_bytes() for path in (place / "data/report").glob("*.png")}
    for name in before:
        with Image.open(place / "data/report" / name) as image:
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10, name
    found = metrics()
    found["train"]["measured_by_phase"]["forward"] = 60 * MIB
    write_inputs(place, found, [GENERATION])
    curves = (place / "data/train/curves.csv").read_text()
    (place / "data/train/curves.csv").write_text(curves.replace("2.0", "2.9"))
    write_csv(place / "data/estimate/timeline.csv", TIMELINE_COLUMNS, TIMELINE[1:])
    (place / "data/estimate/switches.csv").write_text("switch,peak_gib\ncurrent,0.117\ngrad_ckpt=true,0.05\n")
    report(place)
    assert all((place / "data/report" / name).read_bytes() != pixels for name, pixels in before.items())


@pytest.mark.parametrize(
    "missing",
    [
        "data/train/figures.json",
        "data/train/curves.csv",
        "data/estimate/switches.csv",
        "data/evaluate/generations.jsonl",
    ],
)
def test_a_missing_input_is_told_in_one_line(place, missing):
    (place / missing).unlink()
    line = told(invoke(main))
    assert missing in line and "dvc repro" in line
    assert not (place / "data/report").exists() and not (place / "metrics/report.json").exists()


def test_damaged_inputs_are_told_by_line(place):
    (place / "data/evaluate/generations.jsonl").write_text('{"family": "sums"\n')
    assert "generations.jsonl:1: not JSON" in told(invoke(main))
    write_inputs(place, metrics(), [GENERATION])
    (place / "data/train/curves.csv").write_text("step,loss\n")
    assert "curves.csv: holds no record" in told(invoke(main))


def test_joined_rows_are_not_said_to_be_as_long_as_their_sequence(place):
    path = place / "data/batches/figures.json"
    write_json(path, {**json.loads(path.read_text()), "mode": "packed", "max_batch_length": 1024})
    _, text = report(place)
    assert "| micro-batches | packed; at most 1,024 padded tokens, 25 rows |" in text


def test_a_run_without_held_out_rows_has_a_page(place):
    """data.heldout_fraction 0 is a user's choice; the last stage must not fail on it."""
    found = metrics()
    nothing = dict.fromkeys(("base_loss", "tuned_loss", "base_perplexity", "tuned_perplexity"))
    nothing |= dict.fromkeys(("base_exact_match_percent", "tuned_exact_match_percent"))
    counts = {"evaluated_rows": 0, "generated_rows": 0, "by_length": {}, "by_family": {}}
    found["evaluate"] |= {**nothing, **counts}
    found["tokenize"]["heldout_rows"] = 0
    write_inputs(place, found, [])
    numbers, text = report(place)
    assert numbers["heldout_loss_change"] is None and numbers["exact_match_change_points"] is None
    assert text.count("no rows are held out (data.heldout_fraction is 0)") == 3
