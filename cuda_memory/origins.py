"""Where an allocation of a recording comes from, as its stack shows: category, line of code, operation.

The innermost frame that a rule of `RULES` knows decides the category. What no rule knows is `unknown`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from cuda_memory.recording import Frame

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
class Origin:
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


EARLIER = Origin(category="earlier", place="live before the recording, without a stack")
NO_HISTORY = Origin(category="unknown", place="no stack (recorded without history)")
NO_STACKS = Origin(category="unknown", place="no stacks were recorded")
AUTOGRAD_THREAD = Origin(
    category="backward", place="backward, in autograd's threads, without a stack", in_backward=True
)
"""Of an allocation without frames in a recording that has Python's frames: autograd's threads run no Python."""


def origin_of(stack: Stack) -> Origin:
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
        return Origin(category=category, place=innermost, in_backward=_in_backward(stack))
    inner = stack[number - 1] if number else None
    return Origin(
        category=category,
        place=_label(stack[number]),
        operation=_operation(stack[:number]) if inner is not None else "",
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


def _label(frame: Frame) -> str:
    return f"{'/'.join(frame.file.split('/')[-PATH_PARTS:])}:{frame.line} {frame.function}"


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
