"""Where each allocation of a recording comes from, and what is live and reserved after each event.

The innermost frame of a stack that a rule of `RULES` knows decides the category. What no rule knows is `unknown`.

Shape legend: E events, B blocks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

import numpy as np

from cuda_memory.recording import Frame, Recording

Category = Literal[
    "weights",
    "autocast",  # Copies of weights in 16 bits that autocast makes.
    "gradients",  # Of weights: they live on after backward.
    "optimizer",  # State, and temporaries of its step.
    "activations",  # Allocated in a forward, also one that a checkpoint repeats.
    "scores",  # Of attention without a fused kernel: rows x heads x length x length.
    "logits",  # Of the loss: logits, log-softmax, and their gradients where the stack shows it.
    "backward",  # Activations' gradients and temporaries of backward.
    "earlier",  # Live before the recording and without a stack: usually weights and optimizer state.
    "unknown",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
RULES: tuple[tuple[Category, str, str], ...] = (
    # category, pattern of the file, pattern of the function: both are searched
    ("autocast", "", r"\bautocast::cached_cast\b"),
    ("logits", "", r"cross_entropy|log_softmax|nll_loss|CausalLMLoss"),
    ("logits", r"lean_finetune/step/\w*loss\.py$", ""),
    ("optimizer", r"(^|/)optim/|optimizers?\.py$", ""),
    ("gradients", r"nn/parallel/distributed\.py$", r"^_ddp_init_helper$"),
    ("gradients", "", r"autograd::AccumulateGrad::"),
    ("weights", r"nn/modules/module\.py$", r"^(_apply|convert|load_state_dict|_load_from_state_dict)$"),
    ("weights", r"nn/modules/\w+\.py$", r"^(__init__|reset_parameters)$"),
    ("weights", r"nn/init\.py$", ""),
    ("weights", "", r"^(from_pretrained|from_config|get_peft_model|load_checkpoint_in_model|load_state_dict)$"),
    ("activations", "", r"^forward$"),
    ("backward", "", r"^backward$|autograd::Engine::|autograd::generated::\w+Backward"),
)
BACKWARD = re.compile(r"^(backward|recompute_fn|unpack_hook)$|autograd::Engine::")
"""A function in the stack of everything that backward allocates, recomputed activations too."""
INTERNAL = re.compile(
    r"(^|-packages/)(torch|einops)/|(^|/)accelerate/hooks\.py$|(^|/)(contextlib|functools)\.py$|^<|^\?"
)
"""Files of PyTorch, and wrappers around it."""
GENERATED = re.compile(r"/([a-z0-9]{2})/c\1[a-z0-9]{20,}\.py$|/torchinductor_[^/]+/")
"""Files that torch.compile generates: their lines say nothing to a user."""
COMPILED = "code of torch.compile"
NODE = re.compile(r"autograd::generated::(\w+?)Backward\d*::apply")
OPERATION = re.compile(r"^at::_ops::(\w+?)::call")
PATH_PARTS = 2
Stack = Sequence[Frame]


@dataclass(frozen=True, kw_only=True)
class BlockOrigin:
    """What a stack says about an allocation."""

    category: Category
    place: str
    """The innermost line that is not PyTorch's: `modeling_llama.py:89 forward`; else what the stack has instead."""
    operation: str = ""
    """PyTorch's operation or module there, if the stack shows one."""
    in_backward: bool = False

    @property
    def label(self) -> str:
        """Line and operation."""
        return f"{self.place} ({self.operation})" if self.operation else self.place


EARLIER = BlockOrigin(category="earlier", place="live before the recording, without a stack")
NO_HISTORY = BlockOrigin(category="unknown", place="no stack (recorded without history)")
NO_STACKS = BlockOrigin(category="unknown", place="no stacks were recorded")
AUTOGRAD_THREAD = BlockOrigin(
    category="backward", place="backward, in autograd's threads, without a stack", in_backward=True
)
"""Of an allocation without frames in a recording that has Python's frames: autograd's threads run no Python."""


def origin_of(stack: Stack) -> BlockOrigin:
    """Where the allocation with this stack comes from."""
    if not stack:
        return NO_STACKS
    rules = (_rules_of_file(frame.file) & _rules_of_function(frame.function) for frame in stack)
    first = next(filter(None, rules), None)
    category: Category = "unknown" if first is None else RULES[min(first)][0]
    number = _place_number(stack)
    if number is None:
        node = next((found[1] for frame in stack if (found := _search(NODE, frame.function))), None)
        innermost = f"backward of {node}" if node else "code without Python"
        if any(_search(GENERATED, frame.file) for frame in stack):
            innermost = f"backward of {COMPILED}" if _in_backward(stack) else COMPILED
        return BlockOrigin(category=category, place=innermost, in_backward=_in_backward(stack))
    frame = stack[number]
    return BlockOrigin(
        category=category,
        place=f"{'/'.join(frame.file.split('/')[-PATH_PARTS:])}:{frame.line} {frame.function}",
        operation=_operation(stack[:number]),
        in_backward=_in_backward(stack),
    )


@cache
def _search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """A search that is done once for each text: a recording has millions of frames and thousands of names."""
    return pattern.search(text)


@cache
def _rules_of_file(file: str) -> frozenset[int]:
    """Numbers of the rules that a file fits."""
    return frozenset(number for number, (_, files, _) in enumerate(RULES) if re.search(files, file))


@cache
def _rules_of_function(function: str) -> frozenset[int]:
    """Numbers of the rules that a function fits."""
    return frozenset(number for number, (_, _, names) in enumerate(RULES) if re.search(names, function))


def is_python(frame: Frame) -> bool:
    """Whether a frame is Python's, not one of C++ or of the interpreter."""
    return frame.file.endswith(".py") or (frame.file.startswith("<") and frame.line > 0)


def _place_number(stack: Stack) -> int | None:
    """The innermost Python frame that is not PyTorch's, else the innermost one of Python.

    None without Python, or if all of it is PyTorch's and generated by torch.compile.
    """
    python = [number for number, frame in enumerate(stack) if is_python(frame)]
    generated = {number for number in python if _search(GENERATED, stack[number].file)}
    own = (number for number in python if number not in generated and not _search(INTERNAL, stack[number].file))
    return next(own, python[0] if python and not generated else None)


def _operation(inner: Stack) -> str:
    """The operation that a line calls, from the frames inside it, outermost last."""
    for frame in reversed(inner):
        if is_python(frame) and frame.file.endswith("nn/functional.py"):
            return frame.function
        if found := _search(OPERATION, frame.function):
            return found[1]
    return ""


def _in_backward(stack: Stack) -> bool:
    return any(_search(BACKWARD, frame.function) for frame in stack)


SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""What an event does to reserved memory: adds its bytes, or takes them away."""
LOGITS_SHARES = (1.0, 0.5)
"""Sizes of logits, as shares of the loss's largest tensor: the same type, or half as wide."""
LOGITS_TOLERANCE = 0.02
"""Losses drop the last position of each row."""
LOGITS_EVENTS = 40
"""Logits are allocated at most so many events before the loss."""
LEAST_LOGITS_BYTES = 2**20
SCORES_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Sizes of a layer's other scores, as shares of its softmax: another type, or the mask of dropout."""
SCORES_BLOCKS = 10
"""Blocks before and after a softmax among which its other scores are."""
LEAST_SCORES_BYTES = 2**20
ROUTERS = re.compile("router|gate|moe|expert", re.IGNORECASE)
"""Places whose softmax is no attention."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """The blocks of a recording with their origins. Sizes are what the program requested."""

    recording: Recording
    bytes_B: np.ndarray
    start_B: np.ndarray
    """The event that allocated the block, ascending; -1 for one that was live before."""
    end_B: np.ndarray
    """The event that freed it; the number of events if none did."""
    origins_B: tuple[BlockOrigin, ...]
    category_B: np.ndarray
    """Indices into `CATEGORIES`: the origin's, except what the functions `_find_…` below find."""

    @cached_property
    def allocated_E(self) -> np.ndarray:
        """Live bytes after each event; at [0] before the first."""
        return self._live(np.ones(len(self.bytes_B), dtype=bool))

    @cached_property
    def reserved_E(self) -> np.ndarray:
        """Reserved bytes after each event; at [0] before the first."""
        initial = sum(segment.bytes for segment in self.recording.segments)
        changes = [SIGNS.get(event.action, 0) * event.bytes for event in self.recording.events]
        return np.cumsum([initial, *changes])

    def by_category(self) -> Mapping[Category, np.ndarray]:
        """Live bytes after each event, as `allocated_E`, of the categories that occur."""
        present = set(self.category_B.tolist())
        return {name: self._live(self.category_B == n) for n, name in enumerate(CATEGORIES) if n in present}

    def _live(self, chosen_B: np.ndarray) -> np.ndarray:
        changes = np.zeros(len(self.recording.events) + 2, dtype=np.int64)
        np.add.at(changes, self.start_B[chosen_B] + 1, self.bytes_B[chosen_B])
        np.subtract.at(changes, self.end_B[chosen_B] + 1, self.bytes_B[chosen_B])
        return np.cumsum(changes)[:-1]

    def live_at(self, instant: int) -> np.ndarray:
        """Numbers of the blocks that are live after `instant` events, largest first."""
        live = np.flatnonzero((self.start_B < instant) & (self.end_B >= instant))
        return live[np.argsort(-self.bytes_B[live], kind="stable")]

    @cached_property
    def peak(self) -> int:
        """The number of events after which most is live."""
        return int(np.argmax(self.allocated_E))


def timeline_of(recording: Recording) -> Timeline:
    """Find the blocks of a recording and where they come from."""
    sizes: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    stacks: list[int | None] = []
    live: dict[int, int] = {}
    end = len(recording.events)

    def add(address: int, size: int, start: int, stack: int | None) -> None:
        live[address] = len(sizes)
        sizes.append(size)
        starts.append(start)
        ends.append(end)
        stacks.append(stack)

    for segment in recording.segments:
        for block in segment.blocks:
            add(block.address, block.requested_bytes, -1, block.stack)
    for number, event in enumerate(recording.events):
        if event.action == "alloc":
            add(event.address, event.bytes, number, event.stack)
        elif event.action == "free_completed" and event.address in live:
            ends[live.pop(event.address)] = number
    known = {number: origin_of(recording.stacks[number]) for number in set(stacks) if number is not None}
    without = AUTOGRAD_THREAD if any(is_python(frame) for stack in recording.stacks for frame in stack) else NO_STACKS
    before = EARLIER if recording.events else NO_HISTORY
    origins = tuple(
        known[stack] if stack is not None else before if start < 0 else without
        for stack, start in zip(stacks, starts, strict=True)
    )
    found = Timeline(
        recording,
        np.array(sizes, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        origins,
        np.array([CATEGORIES.index(origin.category) for origin in origins], dtype=np.int64),
    )
    _find_gradients(found)
    _find_logits(found)
    _find_scores(found)
    _find_cast_inputs(found)
    return found


def _find_gradients(timeline: Timeline) -> None:
    """Count what outlives the backward that allocated it as gradients: it is live when forward or an update goes on."""
    allocated = timeline.start_B >= 0
    outside = np.array([not origin.in_backward for origin in timeline.origins_B], dtype=bool) & allocated
    resumed = np.sort(timeline.start_B[outside])
    backward = np.flatnonzero((timeline.category_B == CATEGORIES.index("backward")) & allocated)
    after = np.searchsorted(resumed, timeline.start_B[backward])
    known = after < len(resumed)
    backward, after = backward[known], after[known]
    outlives = timeline.end_B[backward] > resumed[after]
    timeline.category_B[backward[outlives]] = CATEGORIES.index("gradients")


def _find_logits(timeline: Timeline) -> None:
    """Count activations as logits that are as large as the loss's largest tensor and allocated shortly before it."""
    logits, activations = CATEGORIES.index("logits"), CATEGORIES.index("activations")
    for loss in np.flatnonzero((timeline.category_B == logits) & (timeline.bytes_B >= LEAST_LOGITS_BYTES)):
        first = int(np.searchsorted(timeline.start_B, max(timeline.start_B[loss] - LOGITS_EVENTS, 0)))
        sizes, categories = timeline.bytes_B[first:loss], timeline.category_B[first:loss]
        alike = np.zeros(len(sizes), dtype=bool)
        for share in LOGITS_SHARES:
            size = share * timeline.bytes_B[loss]
            alike |= np.abs(sizes - size) <= LOGITS_TOLERANCE * size
        categories[alike & (categories == activations)] = logits


def _find_scores(timeline: Timeline) -> None:
    """Count a softmax among the activations, and tensors of its size from the same function, as attention's scores."""
    scores, activations = CATEGORIES.index("scores"), CATEGORIES.index("activations")
    large = (timeline.category_B == activations) & (timeline.bytes_B >= LEAST_SCORES_BYTES)
    for softmax in np.flatnonzero(large).tolist():
        origin = timeline.origins_B[softmax]
        if "softmax" not in origin.operation or ROUTERS.search(origin.place):
            continue
        function, size = _function_of(origin), timeline.bytes_B[softmax]
        for block in range(max(softmax - SCORES_BLOCKS, 0), min(softmax + SCORES_BLOCKS + 1, len(timeline.bytes_B))):
            alike = any(timeline.bytes_B[block] == share * size for share in SCORES_SHARES)
            if alike and large[block] and _function_of(timeline.origins_B[block]) == function:
                timeline.category_B[block] = scores


def _function_of(origin: BlockOrigin) -> str:
    """File and function of a place, without its line."""
    return re.sub(r":[0-9]+ ", " ", origin.place)


def _find_cast_inputs(timeline: Timeline) -> None:
    """Count what autocast copies as activations if it is half as large as no weight: it casts inputs too."""
    autocast, activations = CATEGORIES.index("autocast"), CATEGORIES.index("activations")
    stored = [CATEGORIES.index("weights"), CATEGORIES.index("earlier")]
    weights = np.unique(timeline.bytes_B[np.isin(timeline.category_B, stored)])
    if len(weights):
        inputs = (timeline.category_B == autocast) & ~np.isin(2 * timeline.bytes_B, weights)
        timeline.category_B[inputs] = activations
