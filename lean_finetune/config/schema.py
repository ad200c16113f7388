"""Schema of params.yaml: types, units, limits, meaning."""

from typing import Annotated, Literal

from pydantic import Field

from lean_finetune.config.data_schema import Data
from lean_finetune.config.field_types import (
    AnyPrecision,
    AttentionName,
    GradCkptPolicy,
    LoraInit,
    Method,
    NonNegativeFloat,
    OffloadActivations,
    OffloadState,
    OomRecovery,
    OptimizerName,
    PositiveFloat,
    PositiveInt,
    QuantType,
    Resume,
    Section,
    Sharding,
    Share,
    Text,
)

ALL_LINEAR = "all-linear"


class Model(Section):
    """Which model is fine-tuned."""

    name: Text
    """`tiny`, a directory, or a hub id."""
    revision: Text | None
    """Hub branch, tag or commit; None means main."""


class Bucket(Section):
    """How an optimizer step is cut into micro-batches. Changes memory and speed, never what is learnt."""

    mode: Literal["bucketed", "packed", "fixed"]
    """Rows of like length padded to each other | rows joined without padding | a fixed number of rows, unsorted."""
    max_tokens: PositiveInt
    """Tokens in one micro-batch, padding counted: activations and logits grow in step with it."""
    pad_multiple: PositiveInt
    """Padded lengths (packed: joined lengths) are rounded up to a multiple of this many tokens."""
    constant_shape: bool
    """Mode packed: pad every micro-batch to max_tokens, so that one tensor shape exists."""
    fixed_rows: PositiveInt
    """Mode fixed: rows in a micro-batch; max_tokens does not bound it."""


class Hardware(Section):
    """The device a run has to fit."""

    gpu: Text
    """`auto`, a known name, or a size such as `24GiB`."""
    num_gpus: PositiveInt
    """Devices that share a step: its micro-batches are dealt to them evenly."""


class Estimate(Section):
    """What is done with the prediction."""

    enforce: bool
    """True: train refuses a run predicted not to fit."""
    headroom_percent: Annotated[float, Field(ge=0.0, lt=90.0)]
    """Percent of the device kept free for what the prediction does not count."""


class Quant(Section):
    """4-bit weights of method qlora (Dettmers et al. 2023)."""

    type: QuantType
    """What the 16 levels are: quantiles of a normal distribution, or floating point."""
    double: bool
    """Quantise the scales too: 0.37 bits a weight fewer."""


class Lora(Section):
    """Adapters of all methods but full (Hu et al. 2021)."""

    rank: PositiveInt
    """Rank of the adapter matrices: trained parameters grow in step with it."""
    alpha: PositiveInt
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Share
    """Dropout on the adapter's input."""
    targets: Annotated[list[Text], Field(min_length=1)]
    """Names of linear layers, or `all-linear` alone."""
    rslora: bool
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023)."""
    dora: bool
    """Train the length of each weight row apart from its direction (Liu et al. 2024)."""
    init: LoraInit
    """Start: zero, the weight's largest singular vectors, or those of what 4 bits lost."""


class Train(Section):
    """The training step and its schedule."""

    method: Method
    """What is trained: all weights, or adapters on plain, 4-bit or 8-bit weights."""
    quant: Quant
    """4-bit weights, read when method is qlora."""
    precision: AnyPrecision
    """Type of frozen and full weights, and of the arithmetic; trained adapters are fp32 but with pure_bf16."""
    master_weights: bool
    """Method full in bf16: update an fp32 copy of the weights."""
    grad_ckpt: bool
    """Recompute activations layer by layer in backward."""
    grad_ckpt_policy: GradCkptPolicy
    """What is recomputed: every layer | one in grad_ckpt_every | all but outputs of products and attention."""
    grad_ckpt_every: Annotated[int, Field(ge=2)]
    """Read when grad_ckpt_policy is every_n: one layer in so many is recomputed, the others keep what they made."""
    offload_activations: OffloadActivations
    """Where what backward needs of the layers waits: on the device, in pinned host memory, in a file in scratch/."""
    expandable_segments: bool
    """A GPU's memory is reserved in segments that grow, in place of segments of fixed sizes."""
    attention: AttentionName
    """Kernels of attention; `auto` is sdpa, or eager where a model caps its scores."""
    optimizer: OptimizerName
    """How gradients become updates; decides the bytes of state kept for each trained value."""
    offload: OffloadState
    """What of training is in the host's memory: nothing, the optimizer with its update, or all but what computes."""
    optimizer_in_backward: bool
    """Method full, steps of one micro-batch: update each weight as soon as its gradient is whole, and free that."""
    sharding: Sharding
    """How GPUs share a run: what each holds of weights, gradients and optimizer state."""
    shard_group_gpus: PositiveInt | None
    """Read when sharding is hsdp: GPUs that hold one copy of the weights together; None = those of a node."""
    lr: PositiveFloat
    """Peak learning rate."""
    weight_decay: NonNegativeFloat
    """Decoupled decay; never on norms and biases."""
    schedule: Literal["cosine", "constant"]
    """Learning rate after warm-up."""
    warmup_fraction: Share
    """Share of all optimizer steps that warm up linearly."""
    epochs: PositiveInt
    """Passes over the training rows."""
    tokens_per_step: PositiveInt
    """Unpadded tokens per optimizer step; with seed and epoch it alone decides a step's rows."""
    max_grad_norm: PositiveFloat | None
    """Global L2 norm to which gradients are scaled down; None means never."""
    loss_chunk: PositiveInt | None
    """Supervised tokens whose logits exist at once; None means the whole micro-batch."""
    heldout_every_steps: PositiveInt | None
    """Optimizer steps between held-out losses; None means never during training."""
    heldout_rows: PositiveInt
    """Held-out rows of that periodic loss."""
    lora: Lora
    """Adapters, read by all methods but full."""
    merge: bool
    """Also write the whole model with its adapters merged, to data/tuned/merged."""


class Evaluate(Section):
    """How the base and the tuned model are compared on held-out rows."""

    loss_rows: PositiveInt | None
    """Held-out rows for loss; None means all."""
    max_tokens: PositiveInt | None
    """Padded tokens in one evaluation batch, of prompts those of their answers too; None means bucket.max_tokens."""
    logits_chunk: PositiveInt | None
    """Tokens whose logits exist at once; None means train.loss_chunk, or max_tokens where that is None."""
    generate_rows: Annotated[int, Field(ge=0)]
    """Held-out prompts answered by greedy decoding."""
    max_new_tokens: PositiveInt
    """Longest generated answer in tokens."""
    generate_batch_rows: PositiveInt
    """Most prompts decoded together."""
    merged: bool
    """Score the merged model as well."""


class Run(Section):
    """Speed and safety only; tracked by no stage."""

    progress: bool
    """Progress bars on standard error."""
    cpu_threads: PositiveInt | None
    """Threads of torch on the CPU; None means all cores."""
    data_workers: PositiveInt | None
    """Workers of tokenize; None means one per core. The bytes written do not depend on it."""
    data_pool: Literal["processes", "threads"]
    """What those workers are."""
    tokenizer_engine: Literal["auto", "tokenizers", "tiktoken"]
    """What encodes text; `auto` takes tiktoken where it gives the same ids, checked in each run."""
    oom_recovery: OomRecovery
    """What train does when memory ends in a step: tell it, or cut the step's micro-batches smaller and go on."""
    loader_threads: Annotated[int, Field(ge=0)]
    """Threads that read batches ahead of training; 0 reads them in turn. The batches do not depend on it."""
    checkpoint_seconds: PositiveFloat | None
    """Seconds of training between two checkpoints; None makes one only when training is asked to stop."""
    keep_checkpoints: PositiveInt
    """Checkpoints kept of an unfinished run."""
    resume: Resume
    """Which unfinished run is resumed: one that is equal in all | also one that had other code or library versions."""
    rank_timeout_seconds: PositiveFloat
    """Longest wait of one GPU's process for others that make no progress, after which the run ends."""


class Params(Section):
    """All of params.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seeds row order, adapter start and dropout."""
    model: Model
    data: Data
    bucket: Bucket
    hardware: Hardware
    estimate: Estimate
    train: Train
    evaluate: Evaluate
    run: Run


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
