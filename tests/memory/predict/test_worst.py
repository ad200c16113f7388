"""Which micro-batches are traced and which steps are measured: the worst must be among them."""

import numpy as np
import pytest
from transformers import MistralConfig

from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, halved, traced_steps
from lean_finetune.model.model_config import read_config
from lean_finetune.plan.batch_plan import (
    MicroBatch,
    Plan,
    longest_row,
    memory_figures,
    worst_micro_batches,
    worst_steps,
)
from lean_finetune.plan.row_checks import refuse_other_tokens
from lean_finetune.step.batches import BatchShape
from tests.kit.tiny_config import tiny_config
from tests.memory.common import CPU_TARGET, joined, micro_batch, plan_of, setting_of, shape

PLAN = plan_of(
    [
        [(2, 128, 60), (3, 80, 40)],
        [(4, 64, 90), (1, 16, 10)],
        [(30, 8, 20)],
        [(5, 48, 30), (8, 24, 120), (16, 8, 16)],
    ]
)

LENGTHS = np.full(30, 8, np.int32)
"""Tokens of the training rows, of which plans of padded rows need none."""


def shape_of(micro_batch: MicroBatch) -> BatchShape:
    return BatchShape.of(micro_batch, LENGTHS)


def test_the_plans_first_micro_batch_always_stands_first():
    """The longest row, with which memory is planned to peak, left out."""
    first, later = worst_micro_batches(PLAN, LENGTHS, tiled=False, windowed=False)
    assert shape_of(first[0]) == shape_of(PLAN.steps[0][0])
    assert shape_of(later[0]) == shape_of(PLAN.steps[0][1])


def test_whatever_no_other_surpasses_is_found_by_position():
    """Overlooked: many supervised tokens in a smaller micro-batch, many short rows on a GPU, second in everything."""
    first, later = worst_micro_batches(PLAN, LENGTHS, tiled=True, windowed=False)
    assert [(len(m.rows), m.length) for m in first] == [(2, 128), (4, 64), (5, 48), (30, 8)]
    assert [(len(m.rows), m.length) for m in later] == [(3, 80), (8, 24), (16, 8)]
    assert memory_figures(PLAN, LENGTHS, tiled=True, windowed=False)[4].tolist() == [240, 20, 30 * 128]
    assert worst_steps(PLAN, LENGTHS) == [0, 1, 2, 3]


def test_positions_of_the_plan_are_kept_in_the_trace():
    """A first micro-batch traced with gradients that do not exist yet, or a later one without."""
    steps = traced_steps(PLAN, LENGTHS, tiled=False, windowed=False)
    assert steps == ((shape(2, 128, 60), shape(3, 80, 40), shape(8, 24, 120)), (shape(4, 64, 90),))


def test_halving_keeps_the_longest_row_and_never_predicts_too_little():
    """A remedy promised for shapes smaller than the plan could give."""
    assert halved(((shape(1, 128, 60),),)) is None
    assert halved(((shape(5, 128, 600),),)) == ((shape(3, 128, 384),),)
    assert halved(((joined((128,), 60),),)) is None
    assert halved(((joined((10, 40, 30, 20, 9), 100),),)) == ((joined((40, 20, 9), 69),),)


def test_second_in_every_figure_can_be_the_worst():
    """Leaders alone are not enough: this middle one needed 5% more than either of them under QLoRA."""
    plan = plan_of([[(1, 4096, 40)], [(16, 128, 1200)], [(8, 496, 1100)]])
    assert worst_steps(plan, LENGTHS) == [0, 1, 2]


@pytest.mark.parametrize(
    "setting", [{}, pytest.param({"grad_ckpt": True}, marks=pytest.mark.slow), {"method": "full", "loss_chunk": None}]
)
def test_no_other_micro_batch_needs_more_than_the_traced_ones(small_llama, setting):
    """A run that is predicted to fit and fails: every micro-batch of a plan, in its position, is traced."""
    everything = tuple(tuple(map(shape_of, step)) for step in PLAN.steps)
    worst, traced = (
        predict(TracedModel(read_config(small_llama), setting_of(**setting), CPU_TARGET), steps).peak.bytes
        for steps in (everything, traced_steps(PLAN, LENGTHS, tiled=False, windowed=False))
    )
    assert traced == pytest.approx(worst, rel=1e-3)


def flat_plan(*steps: list[tuple[list[int], int, int]]) -> Plan:
    """A plan of packed rows from (row numbers, length, supervised) of each step's micro-batches."""
    return Plan.of([micro_batch(number, *one, flat=True) for number, step in enumerate(steps) for one in step])


def test_joined_rows_are_traced_with_the_rows_of_the_plan():
    """Attention over one long row instead of many short ones."""
    lengths = np.array([90, 30, 20, 8, 8], np.int32)
    plan = flat_plan([([0, 2], 112, 40), ([3, 1, 4], 48, 20)])
    steps = traced_steps(plan, lengths, tiled=False, windowed=False)
    assert steps == ((joined((90, 20, 2), 40), joined((8, 30, 8, 2), 20)),)
    assert longest_row(plan, lengths) == 90
    assert longest_row(PLAN, LENGTHS) == 128


@pytest.mark.parametrize("lengths", [[90, 30], [90, 30, 23, 8, 8]], ids=["fewer rows", "a longer row"])
def test_a_plan_made_for_other_tokens_is_refused(lengths):
    """Hours into a run, or in an index error."""
    flat = flat_plan([([0, 2], 112, 40), ([3, 1, 4], 48, 20)])
    padded = plan_of([[(3, 22, 30)]])
    for plan in (flat, padded):
        refuse_other_tokens(plan, np.array([22, 22, 20, 8, 8], np.int32))
        with pytest.raises(UserError, match="made for other tokens; run `dvc repro bucket`"):
            refuse_other_tokens(plan, np.array(lengths, np.int32))


def test_padding_that_is_rows_of_its_own_counts_in_the_tiles():
    """With bucket.constant_shape the micro-batch of fewest rows can have the most, all of padding."""
    lengths = np.array([4096, 4080, 8, 8], np.int32)
    plan = flat_plan([([0], 4096, 40), ([1, 2, 3], 4096, 40), ([2], 4096, 40)])
    figures = memory_figures(plan, lengths, tiled=True, windowed=False)
    parts = [len(BatchShape.of(plan.micro_batch(number), lengths).packed_lengths or ()) for number in range(3)]
    assert parts == [1, 3, 5]
    assert figures[:, 2].tolist() == [4096 + 128 * number for number in parts]
    first, later = worst_micro_batches(plan, lengths, tiled=True, windowed=True)
    assert [one.padded_tokens for one in first] == [4096]
    assert [one.rows.tolist() for one in later] == [[2]]


def test_under_a_sliding_window_a_longer_micro_batch_can_be_the_worst(tmp_path):
    """In mode fixed the longest row may be in a micro-batch of few rows: its mask was overlooked."""
    config = MistralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        max_position_embeddings=4096,
        sliding_window=16,
        pad_token_id=0,
    )
    config.save_pretrained(tmp_path)
    plan = plan_of([[(8, 32, 9), (8, 280, 9), (2, 1000, 9)]])
    everything = (tuple(shape_of(micro_batch) for micro_batch in plan.steps[0]),)
    traced = traced_steps(plan, LENGTHS, tiled=False, windowed=True)
    blind = traced_steps(plan, LENGTHS, tiled=False, windowed=False)
    worst, seen, missed = (
        predict(TracedModel(read_config(tmp_path), setting_of(method="full"), CPU_TARGET), steps).peak.bytes
        for steps in (everything, traced, blind)
    )
    assert seen == worst > missed


def test_with_layers_in_chunks_more_rows_of_fewer_tokens_can_be_the_worst():
    """Mamba 2 pads rows to full chunks: five of 12 tokens need more than four of 16. A run was predicted 25 % low."""
    config = tiny_config("granitemoehybrid", mamba_chunk_size=16)
    plan = plan_of([[(1, 16, 9), (4, 16, 9), (5, 12, 9)]])
    traced = traced_steps(plan, LENGTHS, tiled=False, windowed=False, chunk=16)
    blind = traced_steps(plan, LENGTHS, tiled=False, windowed=False)
    seen, missed = (
        predict(TracedModel(config, setting_of(method="lora"), CPU_TARGET), steps).peak.bytes
        for steps in (traced, blind)
    )
    assert seen > missed


def test_with_layers_in_chunks_the_packed_rows_of_most_chunks_can_be_the_worst():
    """Packed rows are padded to full chunks too: four of 17 tokens need more than one of 80."""
    config, lengths = tiny_config("granitemoehybrid", mamba_chunk_size=16), np.array([80, 17, 17, 17, 17])
    plan = flat_plan([([0], 80, 9), ([0], 80, 9), ([1, 2, 3, 4], 68, 8)])
    assert memory_figures(plan, lengths, tiled=False, windowed=False, chunk=16)[:, -1].tolist() == [80, 80, 128]
    seen, missed = (
        predict(TracedModel(config, setting_of(method="lora"), CPU_TARGET), steps).peak.bytes
        for steps in (
            traced_steps(plan, lengths, tiled=False, windowed=False, chunk=16),
            traced_steps(plan, lengths, tiled=False, windowed=False),
        )
    )
    assert seen > missed
