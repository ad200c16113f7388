"""Schema of params.yaml: types, units, limits and meaning. Sections `data` and `train` have their own modules."""

from typing import Annotated, Literal

from pydantic import Field

from lean_finetune.config.data_schema import Data
from lean_finetune.config.field_types import DeviceChoice, MemorySnapshot, Resume, TrackerName
from lean_finetune.config.section import PositiveFloat, PositiveInt, Section, Text
from lean_finetune.config.train_schema import Train


class Model(Section):
    """The model to fine-tune."""

    name: Text
    """`tiny`, a directory, or a Hugging Face Hub id."""
    revision: Text | None
    """Hub branch, tag or commit. None means main."""


class Bucket(Section):
    """How to divide an optimizer step into micro-batches. Changes memory and speed, never the training result."""

    mode: Literal["bucketed", "packed", "fixed"]
    """Pad rows of similar length to each other | pack rows without padding | a fixed number of unsorted rows."""
    max_tokens: PositiveInt
    """Tokens in one micro-batch, with padding. Activations and logits grow in proportion to it."""
    pad_multiple: PositiveInt
    """Round padded lengths (packed: packed lengths) up to a multiple of this many tokens."""
    constant_shape: bool
    """Mode packed: pad every micro-batch to max_tokens, so that all tensors have one shape."""
    fixed_rows: PositiveInt
    """Mode fixed: rows in a micro-batch. max_tokens is not a limit there."""


class Hardware(Section):
    """The device that the run has to fit."""

    gpu: Text
    """`auto`, the name of a known GPU, or a size such as `24GiB`."""
    num_gpus: Annotated[int, Field(ge=1, le=2**16)]
    """GPUs that share every optimizer step. Each gets an equal share of its micro-batches."""
    disk_gb_per_second: PositiveFloat
    """Rate at which scratch/ is read and written (GB = 1e9 bytes), for the predicted time of what is on disk."""
    host_ram_gib: Annotated[float, Field(gt=0.0, le=2**20)] | None
    """RAM of each host, which a run on GPUs has to fit too. None: any amount."""


class Estimate(Section):
    """How to use the prediction."""

    enforce: bool
    """True: train refuses a run that is predicted not to fit."""
    headroom_percent: Annotated[float, Field(ge=0.0, lt=90.0)]
    """Percent of the device to leave free for memory that the prediction does not count."""


class Evaluate(Section):
    """How to compare the base and the tuned model on held-out rows."""

    loss_rows: PositiveInt | None
    """Held-out rows for the loss. None means all."""
    max_tokens: PositiveInt | None
    """Padded tokens in one evaluation batch; prompts count with their answers. None means bucket.max_tokens."""
    logits_chunk: PositiveInt | None
    """Tokens whose logits exist at once. None means train.loss_chunk, or max_tokens if that is None."""
    generate_rows: Annotated[int, Field(ge=0)]
    """Held-out prompts to answer by greedy decoding."""
    max_new_tokens: PositiveInt
    """Longest generated answer in tokens."""
    generate_batch_rows: PositiveInt
    """Most prompts decoded together."""
    merged: bool
    """Score the merged model as well."""
    tasks: list[Text]
    """Tasks of lm-evaluation-harness: its names, or paths of YAML files."""
    task_rows: PositiveInt | None
    """First rows of each task to score. None means all."""
    apply_chat_template: Literal["auto"] | bool
    """Render the prompts of tasks with the chat template. `auto` does so if the training rows were."""


class Run(Section):
    """Speed and safety. No stage tracks these parameters, because they never change a result."""

    device: DeviceChoice
    """Where train and evaluate compute. `auto`: on the CUDA device, or on the CPU unless hardware.gpu names a GPU."""
    progress: bool
    """Show progress bars on standard error."""
    cpu_threads: PositiveInt | None
    """CPU threads of torch. None means all cores."""
    data_workers: PositiveInt | None
    """Workers of stage tokenize. None means one per core. The output bytes do not depend on it."""
    data_pool: Literal["processes", "threads"]
    """Whether these workers are processes or threads."""
    tokenizer_engine: Literal["auto", "tokenizers", "tiktoken"]
    """Library that encodes text. `auto` uses tiktoken where it gives the same ids, which every run checks."""
    oom_recovery: Literal["none", "split"]
    """What train does when a step runs out of memory: stop, or split the step's micro-batches and repeat it."""
    memory_snapshot: MemorySnapshot
    """When train writes the history of CUDA's allocator: never | when memory runs out | also after the first steps."""
    offload_buffer_mib: Annotated[int, Field(ge=64)]
    """Host memory that optimizer state on disk passes through (train.offload_to=disk), for each GPU."""
    loader_threads: Annotated[int, Field(ge=0)]
    """Threads that read batches ahead of training. 0 reads them in the training thread. The batches are the same."""
    checkpoint_seconds: PositiveFloat | None
    """Seconds of training between two checkpoints. None writes one only when training is interrupted."""
    keep_checkpoints: PositiveInt
    """Checkpoints of an unfinished run to keep."""
    resume: Resume
    """Which unfinished run to resume: only an equal one | also one with other versions of code or libraries."""
    rank_timeout_seconds: Annotated[float, Field(gt=0.0, le=365 * 86_400)]
    """Seconds that the process of one GPU waits for others without progress before it ends the run."""
    nodes: PositiveInt
    """Machines that train together; each has hardware.num_gpus / nodes GPUs."""
    node_rank: Annotated[int, Field(ge=0)] | None
    """Number of this machine, from 0. None: read it from the environment of torchrun (PET_NODE_RANK) or SLURM."""
    rendezvous: Text | None
    """HOST or HOST:PORT of node 0. None: this machine, unless the environment of torchrun or SLURM names one."""
    join_timeout_seconds: PositiveFloat
    """Seconds that the other nodes wait for node 0, which may still tokenize."""
    max_restarts: Annotated[int, Field(ge=0)]
    """How often torchrun starts crashed processes again, which then resume from the last checkpoint."""
    trackers: list[TrackerName]
    """Libraries for experiment tracking that receive the figures of each optimizer step."""


class Params(Section):
    """All of params.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seeds the row order, the initial adapters and dropout."""
    model: Model
    data: Data
    bucket: Bucket
    hardware: Hardware
    estimate: Estimate
    train: Train
    evaluate: Evaluate
    run: Run
