"""What the tests of the bucket room share."""

import numpy as np

from stages.bucket.plan import MicroBatch, Plan


def all_batches(plan: Plan) -> list[MicroBatch]:
    return [batch for step in plan.steps for batch in step]


def rows_by_step(plan: Plan) -> list[list[int]]:
    return [sorted(np.concatenate([batch.rows for batch in step]).tolist()) for step in plan.steps]


def log_normal_lengths(rows: int) -> np.ndarray:
    drawn = np.exp(np.random.default_rng(5).normal(4.5, 0.8, rows)).astype(np.int32)
    return np.clip(drawn, 4, 1024)
