"""The few shapes from which the events of a whole plan follow: which are traced, and the model fitted to them."""

from collections.abc import Iterable, Sequence
from itertools import chain, product

from transformers import PretrainedConfig

from lean_finetune.memory.allocator.cut import FIRST, LATER, Role, Timeline
from lean_finetune.memory.allocator.program import FEWEST_CHUNKS, FEWEST_CHUNKS_SUMMED, TRACED_TURNS
from lean_finetune.memory.allocator.runs import timeline_of
from lean_finetune.memory.allocator.step_units import StepKind, unit_kind
from lean_finetune.memory.allocator.templates import RunModel, fit
from lean_finetune.memory.predict.layer_structure import with_layers
from lean_finetune.memory.predict.peak import Setting
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.allocation_origins import OriginTrace
from lean_finetune.memory.trace.cuda_kernels import EMBEDDING_SORT_TOKENS, FUSED_GEMM_MAX_ROWS, Target
from lean_finetune.step.batches import BatchShape

LENGTHS = (200, 333, 136, 72)
"""Of the traced shapes: no two alike in any figure that a tensor grows with, and all short."""
LONGEST_TRACED = max(LENGTHS)
TOKENS_ABOVE_MOST = (300, 600, 900, 1200)
"""By which the traced shapes of many tokens exceed the embedding's threshold, at least."""
TOKENS_OF_SOME = (2200, 2331, 2584, 2664)
"""Of the traced shapes below it, at least."""
LAST_CHUNK_SHARES = (3, 5, 7, 11)
"""The last chunk of each shape is the chunk divided by this: hardly ever as large as a vocabulary."""
SUPERVISED = (100, 77, 181, 53)
"""Where the loss is not in chunks."""
TracedKind = tuple[Role, str]


def kind_of(setting: Setting) -> StepKind:
    """What decides the units of a setting's steps."""
    return StepKind(loss_chunk=setting.loss_chunk, embedding_trained=setting.model.method == "full")


def fit_run(
    config: PretrainedConfig,
    setting: Setting,
    target: Target,
    shallow: Sequence[tuple[int, OriginTrace]],
    wanted: Iterable[BatchShape],
) -> RunModel:
    """Find the events of any run of the shapes' kinds.

    Shallow traces tell how layers repeat; a few more at the least depth how sizes grow.

    Args:
        config: of the model.
        setting: what is trained, and how.
        target: the device.
        shallow: traces of steps in models of three depths, by number of layers; none where all layers are to be traced.
        wanted: a micro-batch of every kind there is.

    Raises:
        NotAffine: they do not tell.
    """
    kind = kind_of(setting)
    depth = config.get_text_config().num_hidden_layers
    depths = [layers for layers, _ in shallow] or [depth]
    period = depths[1] - depths[0] if len(depths) > 1 else 1
    vocab_size = config.get_text_config().vocab_size

    def traced(layers: int, steps: TracedSteps) -> Timeline:
        model = with_layers(config, layers) if layers < depth else config
        trace = trace_origins(model, setting, steps, target)
        return timeline_of(trace, kind, layers=layers, vocab_size=vocab_size, period=period)

    timelines = [
        timeline_of(trace, kind, layers=layers, vocab_size=vocab_size, period=period) for layers, trace in shallow
    ]
    known = {(unit.role, unit.kind) for timeline in timelines for _, unit in timeline.units}
    for example in {unit_kind(shape, kind): shape for shape in wanted}.values():
        steps = _traced_steps(example, kind)
        roles: tuple[Role, ...] = (FIRST, LATER)
        if setting.optimizer_in_backward:  # No step has a later micro-batch, and none could be traced.
            steps, roles = tuple((shape,) for shape in dict.fromkeys(chain.from_iterable(steps))), (FIRST,)
        timelines.append(traced(depths[0], steps))
        needed: set[TracedKind] = set(product(roles, (unit_kind(example, kind),)))
        if needed - known:
            timelines += [traced(layers, steps[:1]) for layers in depths[1:]]
    return fit(timelines, depth)


def _traced_steps(example: BatchShape, kind: StepKind) -> TracedSteps:
    """Steps of an example's kind: every number of chunks, as first and as later micro-batch, and other shapes.

    As few as tell: their trace is the larger part of the time that the replay of a plan takes.
    """
    base, *others = _shapes(example, kind)
    if kind.loss_chunk is None:
        return ((base, base), (others[0], others[1], others[2]), (others[1], others[2], base, others[0]))
    fewest = FEWEST_CHUNKS_SUMMED if kind.embedding_trained else FEWEST_CHUNKS
    one, two, three, four, *more = (
        _with_chunks(base, count, kind.loss_chunk) for count in range(1, fewest + TRACED_TURNS)
    )
    several = _with_chunks(others[0], fewest + 1, kind.loss_chunk)
    steps = ((one, one), (two, two, several), (three, three, four, others[1], *more), (four,))
    # Where the head is trained, a step's first micro-batch makes its gradient and later ones do not: each by itself.
    return (*steps, *((shape,) for shape in (*more, several, others[1]))) if kind.embedding_trained else steps


def _shapes(example: BatchShape, kind: StepKind) -> list[BatchShape]:
    """Shapes of an example's kind that differ in every figure, with one chunk of loss."""
    tokens = example.rows * example.length
    many = kind.embedding_trained and tokens > EMBEDDING_SORT_TOKENS
    shapes = []
    for place, length in enumerate(LENGTHS):
        least = EMBEDDING_SORT_TOKENS + TOKENS_ABOVE_MOST[place] if many else TOKENS_OF_SOME[place]
        if tokens <= FUSED_GEMM_MAX_ROWS:
            least = 1
        rows = -(-least // length)
        supervised = SUPERVISED[place]
        if kind.loss_chunk is not None:
            supervised = max(1, kind.loss_chunk // LAST_CHUNK_SHARES[place])
        joined = None if example.joined_lengths is None else (length,) * rows
        shapes.append(
            BatchShape(
                rows=rows if joined is None else 1,
                length=length if joined is None else rows * length,
                supervised=supervised,
                joined_lengths=joined,
            )
        )
    return shapes


def _with_chunks(shape: BatchShape, count: int, chunk: int) -> BatchShape:
    """The same shape with so many chunks of loss, the last one as it was."""
    return BatchShape(
        rows=shape.rows,
        length=shape.length,
        supervised=shape.supervised + (count - 1) * chunk,
        joined_lengths=shape.joined_lengths,
    )
