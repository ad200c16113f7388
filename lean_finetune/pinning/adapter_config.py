"""What adapter_config.json may say, and what it says of each layer. Strangers may have written it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lean_finetune.pinning.hub import HUB_ID
from lean_finetune.pinning.name_patterns import LITERAL, NamePattern, PatternFault, Steps

T = TypeVar("T")
BASE_ID = re.compile(rf"(?:{HUB_ID.pattern}|\w[\w.-]*)")
"""A hub id; old ones have no organisation."""
REVISION = re.compile(r"\w[\w./-]*")
"""A commit, branch or tag of the hub."""
CHANGED_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Starts of PEFT that change the frozen weights, which the base's files then do not have."""
OTHER_MODELS = ("arrow_config", "kasa_config", "layer_replication", "monteclora_config", "use_bdlora", "use_qalora")
"""Keys with which PEFT builds another model than the base with low-rank changes of its weights."""
ALL_LINEAR = "all-linear"
MOST_RANK = 2**16
MOST_ALPHA = 1e6
MOST_TOKEN_ID = 2**24

Name = Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=500)]
"""Of a layer or a parameter. PEFT makes a regular expression of some."""
Pattern = Annotated[str, Field(min_length=1, max_length=50_000)]
Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]
Alpha = Annotated[int | float, Field(ge=-MOST_ALPHA, le=MOST_ALPHA, allow_inf_nan=False)]
TokenIds = list[Annotated[int, Field(ge=0, le=MOST_TOKEN_ID)]]


class AdapterConfig(BaseModel):
    """What adapter_config.json may say, in PEFT's names; PEFT gets no other key."""

    model_config = ConfigDict(strict=True, extra="ignore")

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] | None = None
    base_model_name_or_path: str = Field(min_length=1, max_length=4096)
    revision: str | None = Field(default=None, pattern=rf"^{REVISION.pattern}$", max_length=255)
    r: Rank
    lora_alpha: Alpha
    lora_dropout: float | int | None = Field(default=0.0, ge=0, lt=1)
    target_modules: Pattern | list[str] | None = None
    target_parameters: list[Name] | None = None
    exclude_modules: Pattern | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Name | list[Name] | Literal[""] | None = None
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Alpha] | None = None
    use_dora: bool | None = False
    use_rslora: bool | None = False
    fan_in_fan_out: bool | None = False
    bias: Literal["none", "all", "lora_only"] | None = "none"
    lora_bias: bool | None = False
    ensure_weight_tying: bool | None = False
    modules_to_save: list[Name] | None = None
    trainable_token_indices: TokenIds | dict[Name, TokenIds] | None = None
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal", "mica"] | None = True
    megatron_config: None = None
    layer_replication: Any = None
    kasa_config: Any = None
    arrow_config: Any = None
    monteclora_config: Any = None
    use_bdlora: Any = None
    use_qalora: Any = None

    @model_validator(mode="after")
    def _is_of_its_base(self) -> "AdapterConfig":
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules: must name the adapted layers")
        for key in OTHER_MODELS:
            if getattr(self, key):
                raise ValueError(f"{key}: makes another model of its base, which is not built here")
        try:
            AdaptedLayers(self.model_dump())
        except PatternFault as fault:
            raise ValueError(str(fault)) from None
        return self


class AdaptedLayers:
    """The layers that adapter_config.json names, and the rank and alpha of each, as PEFT decides them.

    Names in patterns are taken as they are written: their dots match dots alone.
    """

    def __init__(self, adapter: Mapping[str, Any]):
        """`adapter` is its content, checked but for its patterns.

        Raises PatternFault for a pattern that is none.
        """
        self._adapter, steps = adapter, Steps()
        self._targets = _Names("target_modules", adapter.get("target_modules"), steps)
        self._excluded = _Names("exclude_modules", adapter.get("exclude_modules"), steps)
        self._ranks = _ByName("rank_pattern", adapter.get("rank_pattern"), steps)
        self._alphas = _ByName("alpha_pattern", adapter.get("alpha_pattern"), steps)
        self._experts = {
            name.rpartition(".")[0]
            for name in adapter.get("target_parameters") or ()
            if not name.endswith(".weight")
        }  # fmt: skip

    @property
    def are_listed(self) -> bool:
        """Whether the layers are named; else they are all linear ones, which PEFT finds."""
        return self._adapter.get("target_modules") != ALL_LINEAR

    def excludes(self, name: str) -> bool:
        """Whether a layer gets no adapter, whatever else names it. Raises PatternFault."""
        return self._excluded.has(name)

    def has(self, name: str) -> bool:
        """Whether a layer gets an adapter. Raises PatternFault if that takes too many steps."""
        copies = self._adapter.get("modules_to_save") or ()
        if self.excludes(name) or any(f".{copy}." in f".{name}." for copy in copies):
            return False
        return self._targets.has(name) and (name in self._targets.names or self._is_layer(name))

    def has_experts(self, name: str) -> bool:
        """Whether parameters of a module get an adapter."""
        return any(end in self._experts for end in _ends(name))

    def rank(self, name: str) -> int:
        """The rank of a layer or parameter. Raises PatternFault."""
        return self._ranks.get(name, int(self._adapter["r"]))

    def alpha(self, name: str) -> float:
        """What a layer's change is multiplied by, before it is divided by the rank. Raises PatternFault."""
        return self._alphas.get(name, self._adapter["lora_alpha"])

    def _is_layer(self, name: str) -> bool:
        """Whether a name is in one of `layers_to_transform`."""
        wanted = self._adapter.get("layers_to_transform")
        if wanted is None or wanted == [] or isinstance(self._adapter.get("target_modules"), str):
            return True
        lists = self._adapter.get("layers_pattern") or []
        index = _index_in(name, [lists] if isinstance(lists, str) else lists)
        return index is not None and index in (wanted if isinstance(wanted, list) else [wanted])


def _index_in(name: str, lists: Iterable[str]) -> int | None:
    """The first number in a name that is in one of these lists of layers; without lists, in any that is not first."""
    parts = name.split(".")
    numbers = [k for k, part in enumerate(parts[:-1]) if part.isdecimal() and k > 0]
    if not lists:
        return next((int(parts[k]) for k in numbers if k > 1), None)
    for each in lists:
        for k in numbers:
            if f".{'.'.join(parts[:k])}".endswith(f".{each}"):
                return int(parts[k])
    return None


def _ends(name: str) -> Iterator[str]:
    """A name and its ends, each after a dot."""
    while name:
        yield name
        name = name.partition(".")[2]


class _Names:
    """Names of layers in a list, or a pattern of them."""

    def __init__(self, key: str, given: str | list[str] | None, steps: Steps):
        self._key = key
        self.names = frozenset(given if isinstance(given, list) else ())
        self._pattern = _pattern(key, given, steps) if isinstance(given, str) and given != ALL_LINEAR else None
        self._is_all = given == ALL_LINEAR

    def has(self, name: str) -> bool:
        """Whether a layer is named."""
        if self._pattern is None:
            return self._is_all or any(end in self.names for end in _ends(name))
        return _matches(self._key, self._pattern, name)


class _ByName:
    """Values by names or patterns; the first that a layer matches counts."""

    def __init__(self, key: str, given: Mapping[str, Any] | None, steps: Steps):
        self._key, self._values = key, list((given or {}).values())
        self._literal = {one: order for order, one in enumerate(given or {}) if LITERAL.fullmatch(one)}
        self._patterns = [
            (order, _pattern(key, rf"(.*\.)?({one})$", steps))
            for order, one in enumerate(given or {})
            if one not in self._literal
        ]

    def get(self, name: str, usual: Any) -> Any:
        """The value of a layer, or the usual one."""
        orders = [self._literal[end] for end in (*_ends(name), f"^{name}") if end in self._literal]
        first = min(orders, default=len(self._values))
        for order, pattern in self._patterns:
            if order > first:
                break
            if _matches(self._key, pattern, name):
                return self._values[order]
        return self._values[first] if orders else usual


def _pattern(key: str, pattern: str, steps: Steps) -> NamePattern:
    try:
        return NamePattern(pattern, steps)
    except PatternFault as fault:
        raise PatternFault(f"{key}: {fault}") from None


def _matches(key: str, pattern: NamePattern, name: str) -> bool:
    try:
        return pattern.matches(name)
    except PatternFault as fault:
        raise PatternFault(f"{key}: {fault}") from None
