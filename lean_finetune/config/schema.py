"""Schema of params.yaml: types, units, limits and meaning. Section `data` has its own module."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.data_schema import Data
from lean_finetune.config.field_types import (
    ALL_LINEAR,
    SPLIT_WEIGHTS,
    AnyPrecision,
    AttentionName,
    CompressActivations,
    DeviceChoice,
    FusedKernels,
    FusedNorms,
    GradCkptPolicy,
    LoraExperts,
    LoraJoined,
    MemorySnapshot,
    Method,
    OffloadActivations,
    OffloadState,
    OffloadTo,
    PartMode,
    QuantType,
    Resume,
    Router,
    Sharding,
    TrackerName,
)
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.section import (
    MOST,
    MOST_THREADS,
    LoraStart,
    NonNegativeFloat,
    ObjectiveKey,
    Optimizer,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Text,
    Threads,
    Token,
)
from lean_finetune.islands.objectives.registry import LOSS_PARAMETERS, OBJECTIVES
from lean_finetune.objectives.objective import LossParameter, Objective
from lean_finetune.objectives.row_kind import RowKind

# Section `train`; `train_rules` has the rules between its parameters.


class Quant(Section):
    """4-bit weights of method qlora (Dettmers et al. 2023)."""

    type: QuantType
    """The 16 levels: quantiles of a normal distribution, or floating point."""
    double: bool
    """Quantize the scales too, which saves 0.37 bits per weight."""


class BaseWeights(Section):
    """How the base is stored: what the user of a saved adapter must know about its training."""

    method: Method
    """Train all weights, or adapters on 16-bit or 32-bit, 4-bit or 8-bit weights."""
    quant: Quant
    """4-bit weights, for method qlora."""
    precision: AnyPrecision
    """Data type of weights and arithmetic. Adapters are fp32 except with pure_bf16."""

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained and the base is frozen."""
        return self.method != "full"

    @property
    def scales_loss(self) -> bool:
        """Whether fp16 gradients need loss scaling."""
        return self.precision == "fp16"

    @property
    def needs_native_bf16(self) -> bool:
        """Whether the device must compute in bf16."""
        return self.precision in ("bf16", "pure_bf16")


class Lora(Section):
    """Adapters of every method but full (Hu et al. 2021)."""

    rank: PositiveInt
    """Rank of the adapter matrices. Trained parameters grow in proportion to it."""
    alpha: PositiveInt
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Share
    """Dropout on the adapter's input."""
    targets: Annotated[list[Text], Field(min_length=1)]
    """Names of linear layers, or only `all-linear`."""
    rslora: bool
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023)."""
    dora: bool
    """Train the magnitude of each weight row separately from its direction (Liu et al. 2024)."""
    init: LoraStart
    """Initial adapters: zero output, the weight's largest singular vectors, or those of the 4-bit error."""
    experts: LoraExperts
    """Mixtures of experts: adapters of no expert, or of both projections of every expert."""
    expert_rank: PositiveInt
    """Rank of the experts' adapters, with experts=all. Their scale is that of the other adapters."""
    modules_to_save: list[Text]
    """Names of the embedding and of the head, of which copies are trained and saved with the adapters."""
    trainable_tokens: list[Token]
    """Tokens, or their ids, whose rows of the embedding and of the head are trained. New ones get rows."""
    joined: LoraJoined
    """Compute the adapters of layers that read the same input together, where their code allows it, or by peft."""

    def __hash__(self) -> int:
        """That of the rank: the list of targets has none."""
        return hash(vars(self).get("rank"))

    @property
    def all_linear(self) -> bool:
        """Whether every linear layer gets an adapter."""
        return self.targets == [ALL_LINEAR]

    @property
    def changes_frozen_weights(self) -> bool:
        """Whether adapters start from the base's weights, and change these; the first adapters are then kept."""
        return ADAPTER_STARTS[self.init].changes_frozen_weights


def _field(one: LossParameter) -> Any:
    """The type of a parameter of objectives."""
    ranged = Field(ge=one.least, gt=one.above, lt=one.below, allow_inf_nan=False, description=one.text)
    return Annotated[float, ranged] | None


if TYPE_CHECKING:

    class Preference(Section):
        """Objectives of preferences. A blank parameter has the objective's usual value."""

else:  # Its fields are what objectives declare.
    Preference = create_model(
        "Preference",
        __base__=Section,
        __doc__="Objectives of preferences. A blank parameter has the objective's usual value.",
        __module__=__name__,
        **{name: (_field(one), ...) for name, one in LOSS_PARAMETERS.items()},
    )


class Train(BaseWeights):
    """The training step and its schedule."""

    objective: ObjectiveKey
    """What is learnt: trained tokens (sft), or preferences: the order of two answers, or labels of single ones."""
    preference: Preference
    """Parameters of the objectives of preferences."""

    master_weights: bool
    """Method full in bf16: update an fp32 copy of the weights."""
    vision: PartMode
    """Rows with images: leave the vision tower as it is, give it adapters, or train all of its weights."""
    projector: PartMode
    """The same for what turns the tower's output into the decoder's inputs."""
    router: Router
    """Method full: train the routers of a mixture of experts, or leave them as they are."""
    router_aux_loss: NonNegativeFloat
    """Mixtures of experts: weight of the loss that balances how many tokens each expert gets. 0 disables it."""
    grad_ckpt: bool
    """Recompute activations layer by layer in the backward pass."""
    grad_ckpt_policy: GradCkptPolicy
    """What to recompute: every layer | the first grad_ckpt_layers | one layer in grad_ckpt_every | all but the outputs
    of matmuls and attention."""
    grad_ckpt_layers: PositiveInt | None
    """Policy first_n: recompute so many decoder layers, the first ones. The others store their activations."""
    grad_ckpt_every: Annotated[int, Field(ge=2, le=MOST)]
    """Policy every_n: recompute one layer in this many. The other layers store their activations."""
    offload_activations: OffloadActivations
    """Where to store layers' activations until the backward pass: on the device, in pinned host memory or in a file."""
    compress_activations: CompressActivations
    """Store what layers save for backward in 8 bits: floating-point or integer codes, with a scale per block."""
    sequence_tiles: Annotated[int, Field(ge=2, le=MOST)] | None
    """Run dense MLPs and norms in this many tiles along the sequence, recomputed in backward. None: in one."""
    expandable_segments: bool
    """Let the CUDA allocator grow its segments instead of reserving segments of fixed sizes."""
    attention: AttentionName
    """Attention kernels. `auto` is sdpa, or eager for models with capped attention scores."""
    fused_kernels: FusedKernels
    """Code of rotary embedding and SwiGLU: the model's, or kernels of this project on a GPU (auto). Packages for GPUs:
    liger, with RMSNorm too, and fla, for the gated delta rule."""
    fused_norms: FusedNorms
    """On a GPU, compute frozen norms with Llama's code in one kernel of PyTorch, or by the model's code."""
    optimizer: Optimizer
    """Update rule. It decides the bytes of optimizer state per trained value."""
    offload: OffloadState
    """Move to host memory: nothing, the optimizer and its update, or also weights and gradients."""
    offload_to: OffloadTo
    """Where offloaded master weights and optimizer state are stored: host memory, or a file in scratch/."""
    optimizer_in_backward: bool
    """Method full, steps of one micro-batch: update each weight in the backward pass and free its gradient."""
    sharding: Sharding
    """Which of weights, gradients and optimizer state are sharded across GPUs."""
    shard_group_gpus: PositiveInt | None
    """Sharding hsdp: GPUs that store one copy of the weights. None means the GPUs of a node."""
    context_parallel: PositiveInt
    """GPUs that share every row's tokens: context parallelism."""
    tensor_parallel: PositiveInt
    """GPUs of a node that share each matmul, each with a shard of the weights: tensor parallelism."""
    pipeline_stages: PositiveInt
    """Pipeline stages, one per GPU: each has some of the layers and sends hidden states to the next."""
    lr: PositiveFloat | Literal["auto"]
    """Peak learning rate; auto: by the method and the size of the model."""
    weight_decay: NonNegativeFloat
    """Decoupled weight decay. Never applied to norms and biases."""
    schedule: Literal["cosine", "linear", "constant"]
    """Learning rate after warm-up."""
    warmup_fraction: Share
    """Share of all optimizer steps with linear warm-up."""
    epochs: PositiveInt
    """Passes over the training rows."""
    tokens_per_step: PositiveInt | Literal["auto"]
    """Tokens without padding per optimizer step. With seed and epoch it alone decides the rows of a step. auto: from
    the training rows (`plan.step_tokens`)."""
    max_grad_norm: PositiveFloat | None
    """Clip gradients to this global L2 norm. None disables clipping."""
    loss_chunk: PositiveInt | None
    """Supervised tokens per chunk of the loss: one chunk's logits exist at a time. None: those of all positions."""
    heldout_every_steps: PositiveInt | Literal["auto"] | None
    """Optimizer steps between held-out losses; auto: a tenth of the run. None disables them during training."""
    heldout_rows: PositiveInt
    """Held-out rows, or pairs, in each of these losses."""
    keep: Literal["last", "best"]
    """Whose weights are written: those of the last step, or of the best held-out figure."""
    best_by: Literal["loss", "accuracy"]
    """That figure: the lowest loss, or of preference pairs the largest share in the right order."""
    stop_after_no_gain: PositiveInt | None
    """Held-out figures in a row that are no better than the best before them, after which a run ends. None: never."""
    lora: Lora
    """Adapters, for every method but full."""
    merge: bool
    """Also write the full model with merged adapters to data/tuned/merged."""

    @property
    def step_tokens(self) -> int:
        """tokens_per_step, which must not be `auto` any more."""
        assert self.tokens_per_step != "auto", "train.tokens_per_step is still auto"
        return self.tokens_per_step

    @property
    def goal(self) -> Objective:
        """The objective by its name."""
        return OBJECTIVES[self.objective]

    @property
    def scores(self) -> bool:
        """Whether the model is a reward model, with a head of one output."""
        return self.goal.scored

    @property
    def row_kind(self) -> RowKind:
        """What a row of the data is for the objective."""
        return self.goal.kind

    @property
    def preference_values(self) -> dict[str, float]:
        """The values of section `preference` that the objective reads, its usual ones where they are blank."""
        usual = self.goal.defaults
        given = {name: getattr(self.preference, name) for name in usual}
        return {name: usual[name] if value is None else value for name, value in given.items()}

    @property
    def recomputed_every(self) -> int:
        """With `grad_ckpt`, every how many layers one is recomputed; with policy first_n, of the first ones."""
        return self.grad_ckpt_every if self.grad_ckpt_policy == "every_n" else 1

    def recomputed_share(self, layers: int) -> float:
        """The share of a decoder's layers that are recomputed, whole or in part."""
        if not self.grad_ckpt:
            return 0.0
        return min(1.0, (self.grad_ckpt_layers or layers) / layers) / self.recomputed_every

    def layout(self, gpus: int) -> ParallelLayout:
        """The mesh of so many GPUs; dimension `data` is what the others leave."""
        return ParallelLayout.of(gpus, self.context_parallel, self.tensor_parallel, self.pipeline_stages)

    @property
    def runs_towers_together(self) -> bool:
        """Whether processes must run a model's parts for images together: they share its weights or gradients."""
        return self.sharding in SPLIT_WEIGHTS or (self.vision, self.projector) != ("frozen", "frozen")

    def sharding_on(self, gpus: int) -> Sharding:
        """How so many GPUs share weights. One that fetches its layers from the host does so as zero3."""
        return "zero3" if self.offload == "parameters" and gpus == 1 else self.sharding


class Model(Section):
    """The model to fine-tune."""

    name: Text
    """`tiny`, a directory, or a Hugging Face Hub id."""
    revision: Text | None
    """Hub branch, tag or commit. None means main."""
    adapter: Text | None
    """LoRA adapter from which training goes on: a directory, or a Hugging Face Hub id. None: a new one."""
    adapter_revision: Text | None
    """Its hub branch, tag or commit. None means main."""


class Bucket(Section):
    """How to split an optimizer step into micro-batches. Changes memory and speed, never the training result."""

    mode: Literal["bucketed", "packed", "fixed"]
    """Pad rows of similar length to each other | pack rows without padding | a fixed number of unsorted rows."""
    max_tokens: PositiveInt
    """Tokens in one micro-batch, with padding. Activations and logits grow in proportion to it."""
    max_patches: PositiveInt | None
    """Patches of images in one micro-batch; a vision tower's activations grow with them. None: no limit."""
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
    generate_rows: Annotated[int, Field(ge=0, le=MOST)]
    """Held-out prompts to answer by greedy decoding."""
    max_new_tokens: PositiveInt | None
    """Longest generated answer in tokens. Answers to rows whose own answer is longer are shown, but not compared. None:
    the longest of held-out rows, up to 256."""
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
    """Speed and safety. No stage tracks these parameters, because they never change what is trained."""

    device: DeviceChoice
    """Where train and evaluate compute. `auto`: on the CUDA device, or on the CPU unless hardware.gpu names a GPU."""
    progress: bool
    """Show progress bars on standard error."""
    cpu_threads: Threads | None
    """CPU threads of torch. None means all cores."""
    data_workers: Threads | None
    """Workers of stage tokenize. None means one per core. The output bytes do not depend on it."""
    data_pool: Literal["processes", "threads"]
    """Whether these workers are processes or threads."""
    tokenizer_engine: Literal["auto", "tokenizers", "tiktoken"]
    """Library that encodes text. `auto` uses tiktoken where it gives the same ids, which every run checks."""
    memory_snapshot: MemorySnapshot
    """When train writes the history of CUDA's allocator: never | when memory runs out | also after the first steps."""
    offload_buffer_mib: Annotated[int, Field(ge=64, le=MOST)]
    """Host memory that optimizer state on disk passes through (train.offload_to=disk), for each GPU."""
    loader_threads: Annotated[int, Field(ge=0, le=MOST_THREADS)]
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
    node_rank: Annotated[int, Field(ge=0, le=MOST)] | None
    """Number of this machine, from 0. None: read it from the environment of torchrun (PET_NODE_RANK) or SLURM."""
    rendezvous: Text | None
    """HOST or HOST:PORT of node 0. None: this machine, unless the environment of torchrun or SLURM names one."""
    join_timeout_seconds: PositiveFloat
    """Seconds that the other nodes wait for node 0, which may still tokenize."""
    max_restarts: Annotated[int, Field(ge=0, le=MOST)]
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

    @property
    def layout(self) -> ParallelLayout:
        """The mesh of the run's GPUs."""
        return self.train.layout(self.hardware.num_gpus)
