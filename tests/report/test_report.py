"""The report: correct error of the prediction, no invented figure, the same bytes again."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.config.declared_params import dotted_values
from lean_finetune.config.load import load_params
from lean_finetune.core.atomic_files import write_sealed
from lean_finetune.report.content import memory_records, report_metrics, summary
from lean_finetune.report.pages import html_page, markdown_page
from lean_finetune.report.report_inputs import Inputs, shortened
from stages.report import main
from tests.report.conftest import GENERATION, GPU, MIB, OF_PAIRS, PAIR, metrics, seal, write_inputs, write_pairs
from tests.workspace import error, invoke, run_module


def inputs_of(place: Path) -> Inputs:
    stages = ("tokens", "batches", "estimate", "train", "tuned", "evaluate")
    return Inputs(locks=place / "locks", **{name: place / "data" / name for name in stages})


def report(place: Path, **settings: Any) -> tuple[dict, str]:
    """Figures and report.md; `settings` replace parameters."""
    inputs = inputs_of(place)
    figures = report_metrics(inputs)
    return figures, markdown_page(inputs, dotted_values(load_params(place / "params.yaml")) | settings, figures)


def test_error_is_prediction_over_measurement(place):
    """A swapped quotient or sign flatters the estimate."""
    figures, text = report(place)
    assert figures["predicted_error_percent"] == pytest.approx(100 * (120 / 125 - 1))
    assert figures["error_percent_by_phase"] == {
        "load": None,
        "forward": pytest.approx(0.0),
        "backward": pytest.approx(-4.0),
        "clip": None,
        "optimizer": pytest.approx(0.0),
    }
    assert figures["heldout_loss_change"] == -1.25 and figures["exact_match_change_points"] == 100.0
    assert "- **Predicted tensor peak**: 0.1172 GiB (in backward)" in text
    assert "- **Measured tensor peak**: 0.1221 GiB (on cpu: the prediction is off by -4.000 %)" in text
    assert "| backward | 0.1172 GiB | 0.1221 GiB | -4.000 % |" in text
    assert "| load | – | 0.04004 GiB | – |" in text, "MiB and GiB in one column"
    assert "– means not measured (clip); not predicted (load, clip)." in text


def test_missing_measurement_gives_no_error(place):
    """An error of zero where nothing was measured."""
    nothing = {"peak_bytes_measured": None, "measured_by_phase": {"forward": None}, "peak_measured_how": None}
    write_inputs(place, train=nothing)
    figures, text = report(place)
    assert figures["predicted_error_percent"] is None and set(figures["error_percent_by_phase"].values()) == {None}
    assert "not measured on cpu" in text and "None" not in text


def test_the_page_says_whose_weights_were_kept(place):
    """The loss of an earlier step beside a curve that ends higher."""
    assert "| kept weights |" not in report(place)[1]
    write_inputs(place, train={"kept_step": 2, "heldout_loss_kept": 1.25, "stopped_after_step": 5})
    text = report(place)[1]
    assert "| kept weights | those after optimizer step 2, with the lowest held-out loss (1.25" in text
    assert "| ended early | after optimizer step 5: the held-out loss fell no more |" in text
    write_inputs(place, train={"kept_step": 2, "heldout_reward_accuracy_kept": 0.75, "stopped_after_step": 5})
    text = report(place, **{"train.best_by": "accuracy"})[1]
    assert "| kept weights | those after optimizer step 2, with the highest held-out accuracy (0.75) |" in text
    assert "| ended early | after optimizer step 5: the held-out accuracy rose no more |" in text


def test_gpu_prediction_is_not_compared_with_a_cpu(place):
    """`hardware.gpu: H100` on a laptop."""
    write_inputs(place, estimate={"gpu": "H100"})
    figures, text = report(place)
    assert figures["predicted_error_percent"] is None and set(figures["error_percent_by_phase"].values()) == {None}
    assert "cannot be compared" in text
    write_inputs(place, estimate={"gpu": "H100"}, train={"device": "NVIDIA H100 80GB HBM3"})
    assert report(place)[0]["predicted_error_percent"] == pytest.approx(-4.0)


def test_error_is_that_of_the_tier_that_decides(place):
    """Reserved memory decides whether a run fits a GPU; its error can be many times that of the tensors."""
    on_gpu = {"device": "NVIDIA L4", "peak_reserved_bytes": 160 * MIB}
    write_inputs(place, estimate=GPU, train=on_gpu)
    figures, text = report(place)
    assert figures["predicted_error_percent"] == figures["error_percent_by_tier"]["reserved"] == pytest.approx(-6.25)
    assert "the prediction is off by -4.000 %" in text
    assert (
        "**Reserved memory**: 0.1465 GiB → 0.1562 GiB (predicted → measured: off by -6.250 %, by which the run" in text
    )
    write_inputs(place, estimate={**GPU, "deciding_tier": "tensors"}, train=on_gpu)
    figures, text = report(place)
    assert figures["predicted_error_percent"] == pytest.approx(-4.0) and "off by -6.250 %)" in text


def test_memory_plot_has_measured_steps_only(place):
    """A step without a measurement drawn at zero."""
    records = list(memory_records(inputs_of(place)))
    assert [record["step"] for record in records] == [0, 2]
    assert [record["measured_gib"] for record in records] == [125 * MIB / 2**30, 110 * MIB / 2**30]
    assert {record["predicted_gib"] for record in records} == {120 * MIB / 2**30}


def test_page_describes_run_memory_and_results(place):
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
        "Memory over the run: steady: live_bytes grows by 0 bytes a step; ",
        "| activations | mm in forward | model.layers.*.mlp.up_proj | 4 × 64 × 128 bfloat16 | 32 | 50 MiB |",
        "| weights | existing | – | – | 32 | 50 MiB |",
        "| weights | bf16, 2 bytes a value | 9 | 40 MiB |",
        "| up to 64 tokens | 200 | 2.5 | 1.25 | 12.18 | 3.49 |",
        "| sums | 1 | 0 % | 100 % |",
    ):
        assert line in text
    for absent in ("waiting", "Measured peak of each", "reserved", "Merged into one model"):
        assert absent not in text
    assert text.index("up to 64") < text.index("over 512") < text.index("| all |")


def test_page_of_packed_rows_on_several_gpus_has_each_peak_and_the_idle_time(place):
    packed = {"mode": "packed", "max_batch_length": 1024}
    write_inputs(place, bucket=packed, train={"peak_bytes_measured_by_rank": [125 * MIB, 120 * MIB]})
    _, text = report(place, **{"hardware.num_gpus": 2, "train.sharding": "zero3", "train.context_parallel": 2})
    assert "| hardware.num_gpus | 2 |" in text and "| train.sharding | zero3 |" in text
    assert "| train.context_parallel | 2 |" in text and "train.tensor_parallel" not in text
    assert "| micro-batches | packed; at most 1,024 padded tokens, 25 rows |" in text, "packed rows have no length"
    assert "| waiting | 1.5 % of the GPUs' time, for the GPU with the most tokens |" in text
    assert "Measured peak of each of 2 processes: 0.1221 GiB, 0.1172 GiB." in text


def test_generated_text_cannot_break_the_page(place):
    """A code fence or a pipe in an answer swallows the rest of the page."""
    by_family = {"a|b\n# c": metrics()["evaluate"]["by_family"]["sums"]}
    odd = {**GENERATION, "family": "a|b\n# c", "tuned": "x" * 5000}
    write_inputs(place, [odd], evaluate={"by_family": by_family})
    _, text = report(place)
    assert "| a\\|b # c | 1 | 0 % | 100 % |" in text and "#### a\\|b # c" in text
    assert "    I | do\n    ```\n    not know" in text
    assert "x" * 401 not in text
    assert not any(line.startswith(("```", "# c")) for line in text.splitlines())


def test_page_without_prompts(place):
    """evaluate.generate_rows 0, or plain text rows: figures are null."""
    none = dict.fromkeys(("base_exact_match_percent", "tuned_exact_match_percent"))
    write_inputs(place, [], evaluate={"generated_rows": 0, "compared_rows": 0, "by_family": {}, **none})
    figures, text = report(place)
    assert figures["exact_match_change_points"] is None
    assert "no held-out row has a prompt that can be answered" in text and "None %" not in text


def test_skipped_rows_missing_perplexity_and_merging_are_shown(place):
    """Exact match over short answers only passes for one over all."""
    merged = {"merged_loss": 1.7321, "merged_minus_tuned_loss": 0.0021, "merged_exact_match_percent": None}
    write_inputs(place, evaluate={"unanswerable_rows": 1234, "tuned_perplexity": None, **merged})
    _, text = report(place)
    assert "Skipped: 1,234 held-out rows" in text
    assert "perplexity 12.18 → –" in text
    assert "Merged into one model: loss 1.732, +0.0021 compared with the adapter on its base." in text


def test_answers_that_nothing_can_match_are_shown_without_a_verdict(place):
    """The report said "Answers: None" where every answer was longer than evaluate.max_new_tokens."""
    none = dict.fromkeys(("base_exact_match_percent", "tuned_exact_match_percent"))
    family = {"sums": {"rows": 1, **none}}
    line = {**GENERATION, "base_correct": None, "tuned_correct": None}
    write_inputs(place, [line], evaluate={"compared_rows": 0, "by_family": family, **none})
    text = report(place)[1]
    assert "Not compared: 1 answer to rows whose own answer is longer than 64 tokens (evaluate.max_new_tokens)" in text
    assert "| sums | 1 | – | – |" in text and "None" not in text and "wrong" not in text


def test_free_text_stands_before_and_after_side_by_side_without_a_verdict(place):
    """A good answer in other words was called wrong, and exact match stayed at 0 %."""
    none = dict.fromkeys(("base_exact_match_percent", "tuned_exact_match_percent"))
    line = {**GENERATION, "base_correct": None, "tuned_correct": None, "tuned": "Gladly."}
    nothing = {"compared_rows": 0, "free_text_rows": 1, "by_family": {"sums": {"rows": 1, **none}}, **none}
    write_inputs(place, [line], evaluate=nothing)
    text = report(place)[1]
    assert "Free text, which can be good in many words: 1 answer. Read before and after side by side" in text
    assert "Not compared" not in text and "(wrong)" not in text and "Exact match" not in text
    page = html_page(
        inputs_of(place), dotted_values(load_params(place / "params.yaml")), report_metrics(inputs_of(place))
    )
    beside = page.partition('<dl class="beside">')[2].partition("</dl>")[0]
    assert "<dt>Before</dt>" in beside and "<dt>After</dt>" in beside and "Gladly." in beside


def test_the_line_of_the_stage_says_whether_training_helped(place):
    assert summary(inputs_of(place)).endswith("held-out loss 2.5 → 1.25; exact match 0.0 % → 100.0 %")


def test_pairs_are_shown_before_and_after_training(place):
    wrong = {**PAIR, "became_right": False, "tuned_reward_chosen": -2.0, "prompt": "x" * 5000}
    write_pairs(place, [PAIR, wrong])
    objective = {"train.objective": "dpo"}
    figures, text = report(place, **objective)
    for line in (
        "- **Held-out pairs in the right order**: 50.0 % → 92.5 % (before → after; mean margin 0 → 1.5)",
        "- **Held-out loss of the chosen answers**: 2.5000 → 1.2500",
        "| 40 held-out pairs | before | after |",
        "| mean reward of the rejected answers | 0 | -1 |",
        "| mean log-probability of the chosen answers | -12.5 | -7.5 |",
        "Chosen and rejected answers have 9.25 and 11.5 trained tokens on average. Rewards are changes from the model",
        "### In the right order after training, but not before",
    ):
        assert line in text, line
    right, wrong_table = text.partition("### In the right order")[2].split("### In the wrong order")
    prompt = "| \\<\\|im_start\\|\\>user Best \\| city?\\<\\|im_end\\|\\> "
    assert f"{prompt}| Ghent | \\<b\\>None\\</b\\> | 0 → 0.75 | 0 → -0.5 | 0 → 1.25 |" in right
    assert "| 0 → -2 | 0 → -0.5 | 0 → -1.5 |" in wrong_table and "x" * 151 not in text
    simpo = report(place, **{"train.objective": "simpo"})[1]
    assert "Rewards are those of train.objective=simpo." in simpo and "own are all 0" not in simpo


def test_labelled_answers_and_reward_models_have_the_section_too(place):
    labels = {
        **{name: value for name, value in OF_PAIRS.items() if name != "evaluated_pairs"},
        "base_reward_margin": None,
    }
    write_inputs(place, evaluate={**labels, "evaluated_desirable": 7, "evaluated_undesirable": 5})
    text = report(place, **{"train.objective": "kto"})[1]
    for line in (
        "- **Held-out answers judged right**: 50.0 % → 92.5 % (before → after; mean margin – → 1.5)",
        "- **Held-out loss of the desirable answers**: 2.5000 → 1.2500",
        "## Labelled answers",
        "| 12 held-out answers | before | after |",
        "| mean reward of the undesirable answers | 0 | -1 |",
        "Desirable and undesirable answers have 9.25 and 11.5 trained tokens on average.",
    ):
        assert line in text, line
    of_scores = {**OF_PAIRS, **{name: None for name in OF_PAIRS if "logp" in name}}
    none = dict.fromkeys(("base_loss", "tuned_loss", "base_exact_match_percent", "tuned_exact_match_percent"))
    nothing = {**of_scores, **none, "evaluated_rows": 0, "generated_rows": 0, "compared_rows": 0}
    write_inputs(place, [], evaluate={**nothing, "by_family": {}})
    text = report(place, **{"train.objective": "reward"})[1]
    assert "no rows are held out" not in text and text.count("none: a reward model predicts no tokens") == 2
    assert "| mean log-probability of the chosen answers | – | – |" in text and "Log-probabilities are" not in text


def test_pairs_have_curves_of_their_own(place):
    write_pairs(place, [])
    done = invoke(main)
    assert done.output.startswith("report: ") and "pairs in the right order 50.0 % → 92.5 %" in done.output
    header, *rows = (place / "data/report/rewards.csv").read_text().splitlines()
    assert header == "step,reward_accuracy,heldout_reward_accuracy,reward_margin,heldout_reward_margin"
    assert rows == ["0,0.25,,0.25,0.25", "1,0.25,,0.25,0.25", "2,0.25,0.875,0.25,0.25"]
    page = (place / "data/report/report.html").read_text()
    assert "Share of pairs in the right order" in page and "Loss, mean over the pairs of a step" in page
    (place / "data/evaluate/pairs.jsonl").unlink()
    write_inputs(place)
    assert invoke(main).exit_code == 0
    assert not (place / "data/report/rewards.csv").exists()
    assert "Preference pairs" not in (place / "data/report/report.html").read_text()


def test_scores_of_tasks_are_on_both_pages(place):
    scores = {"version": 3, "base": {"exact_match,none": 0.125}, "tuned": {"exact_match,none": 0.25}}
    write_inputs(place, evaluate={"tasks": {"gsm8k": scores}})
    assert "| gsm8k | exact_match,none | 0.125 | 0.25 |" in report(place)[1]
    assert invoke(main).exit_code == 0
    assert "<td>exact_match,none</td><td>0.125</td><td>0.25</td>" in (place / "data/report/report.html").read_text()


def test_samples_are_of_different_families(place):
    """Six samples of one task show one sixth of the result."""
    names = [f"family{number:02}" for number in range(8)]
    by_family = dict.fromkeys(names, metrics()["evaluate"]["by_family"]["sums"])
    lines = [{**GENERATION, "family": name} for _ in range(5) for name in names]
    write_inputs(place, lines, evaluate={"by_family": by_family})
    titles = [line for line in report(place)[1].splitlines() if line.startswith("#### ")]
    assert len(titles) == len(set(titles)) == 6


def test_reserved_memory_of_a_gpu_is_shown_and_plotted(place):
    write_inputs(place, estimate=GPU)
    verdict = {"enforce": True, "refusal": "predicted peak 9 GiB exceeds 8"}
    write_sealed(place / "data/estimate/verdict.json", verdict)
    _, text = report(place)
    assert "Verdict: predicted peak 9 GiB exceeds 8." in text, "with estimate.enforce false the run continues"
    assert "Reserved over the plan: all 3 steps replayed." in text and "constant after" not in text
    assert "| reserved, expandable segments | 0.127 GiB |" in text
    assert "| process, without margin | 0.2842 GiB |" in text
    rows = "".join(f"{step},0.1,0.{step + 1},0.1,0\n" for step in range(3))
    header = "step,allocated_gib,reserved_gib,reserved_expandable_gib,retries\n"
    (place / "data/estimate/reserved.csv").write_text(header + rows)
    seal(place)
    assert invoke(main).exit_code == 0
    text = (place / "data/report/report.md").read_text()
    assert "It is constant after optimizer step 1 of these." in text and "frees its cache 2 times" in text
    assert "Predicted memory of the plan, step by step" in (place / "data/report/report.html").read_text()


def test_two_processes_write_the_same_bytes(place):
    """A date or a set's order in a file marks the report as changed after every run."""

    def outputs() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in [*(place / "data/report").iterdir(), *place.glob("metrics/*")]}

    assert invoke(main).exit_code == 0
    before = outputs()
    assert run_module("stages.report", cwd=place, env={"PYTHONHASHSEED": "1"}, check=True).stderr == ""
    assert outputs() == before
    assert {"report.html", "report.md", "report.json", "figures.json", "memory.csv"} == set(before)
    assert json.loads(before["report.json"]).keys() == {"predicted_error_percent"}
    assert len(before["memory.csv"].splitlines()) == 3


@pytest.mark.parametrize(
    "missing", ["data/train/figures.json", "data/train/curves.csv", "data/evaluate/generations.jsonl"]
)
def test_missing_input_is_one_line(place, missing):
    (place / missing).unlink()
    line = error(invoke(main))
    assert missing in line and "dvc repro" in line
    assert not (place / "data/report").exists() and not (place / "metrics/report.json").exists()


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("data/evaluate/generations.jsonl", '{"family": "sums"\n', "generations.jsonl:1: not JSON"),
        ("data/train/curves.csv", "step,loss\n", "curves.csv: has no rows"),
    ],
)
def test_a_damaged_input_is_named(place, path, text, message):
    (place / path).write_text(text)
    assert error(invoke(main)).startswith(f"{path}: differs from its hash in tables.json: it was changed")
    seal(place)
    assert message in error(invoke(main))


def test_no_saving_is_negative(place):
    (place / "data/estimate/switches.csv").write_text(
        "switch,peak_gib\ncurrent,0.125\ngrad_ckpt=true,0.0625\nmethod=full,0.25\nloss_chunk=null,0.125\n"
    )
    seal(place)
    _, text = report(place)
    assert "| grad_ckpt=true | 0.0625 GiB | saves 50.0 % |" in text and "| this run | 0.125 GiB |  |" in text
    assert "| method=full | 0.25 GiB | costs 100.0 % more |" in text
    assert "| loss_chunk=null | 0.125 GiB | the same |" in text


def test_a_token_that_repeats_is_counted_and_other_text_stays():
    """An image showed as hundreds of equal tokens."""
    pads = "<|image_pad|>" * 364
    assert shortened(f"<|vision_start|>{pads}<|vision_end|>Hi") == "<|vision_start|><|image_pad|> × 364<|vision_end|>Hi"
    for text in ("<b><b>", "ha ha ha ha ha", "<<<<<<<<", "> > > > >"):
        assert shortened(text) == text
