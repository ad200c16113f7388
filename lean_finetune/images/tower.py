"""The parts of models for images, beside decoder and head: a vision tower, and the projector of its output."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lean_finetune.config.rule import OFF, turn_off
from lean_finetune.core.errors import UserError
from lean_finetune.images.families import MODELS, family_of_images, not_offered

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lean_finetune.config.schema import Train

PROJECTOR = re.compile(
    r"(^|[._])(merger|projectors?|connector|newline|deepstack_merger_list|embed_vision|visual_embeddings_table)([._]|$)"
)
"""Names of what turns the output of a vision tower into the decoder's inputs."""
NOT_TRIED = "was not tried with a vision tower"


class ImageTower:
    """What other code of models asks of the parts, by way of `lean_finetune/islands/tower.py`."""

    rows_text = "rows with images"
    """How messages call rows that reach the parts."""
    name = "images"
    """What passes through them, and the name of the memory switch that freezes them."""
    task = "image-text-to-text"
    """What hubs call models with them."""
    kinds = ("vision", "projector")
    """Keys of section train that say how each kind of part is trained."""
    smaller = "larger images are made smaller"
    """What a lower limit of what rows carry does to the data."""
    parts = tuple(
        f"model.{name}"
        for name in (
            *("visual", "vision_tower", "vision_model", "multi_modal_projector", "projector", "connector", "merger"),
            *("image_newline", "embed_vision", "visual_embeddings_table"),
            *("layerwise_projectors", "spatial_projectors"),
        )
    )
    """Names of the parts in transformers' classes."""
    left_out = ("model.audio_tower", "model.embed_audio")
    """Names of the audio parts. No row has audio, so a model with images is built without them."""
    unpackable = "vision towers do not know packed rows"
    """Why rows cannot be packed."""
    masks = "takes no mask, with which the tokens of an image see each other"
    """Why kernels without masks cannot run where `mask_argument` is not None."""
    behind_layers = (".post_layernorm", ".head")
    """Ends of the names of what follows a tower's layers, unread where `layers_read` is not None."""

    def is_beside(self, name: str) -> bool:
        """Whether a module or a tensor is in one of the parts."""
        return any(f".{part}." in f".{name}." for part in self.parts)

    def kind_of(self, name: str) -> str:
        """The kind of what is in one of the parts, by its name."""
        return "projector" if PROJECTOR.search(name) else "vision"

    def kind_of_modules(self, name: str, paths: Iterable[str]) -> str | None:
        """The kind of modules with a name, at some paths; None for those of the decoder."""
        return self.kind_of(name) if PROJECTOR.search(name) or any(map(self.is_beside, paths)) else None

    def modes(self, train: "Train") -> dict[str, str]:
        """By kind, how the parts are trained: frozen, lora or full."""
        return {kind: getattr(train, kind) for kind in self.kinds}

    def is_frozen(self, train: "Train") -> bool:
        """Whether the tower is, so that nothing of it is kept for backward."""
        return train.vision == "frozen"

    def layers_read(self, config: "PretrainedConfig") -> tuple[int, int] | None:
        """The number of a tower's layers, and of the first ones that the projector reads; None if it reads the last.

        LLaVA reads the layer before the last.
        """
        family = family_of_images(config.model_type)
        layers = None if family is None else family.layers_read(config)
        if layers is None:
            return None
        count: int = config.vision_config.num_hidden_layers
        return count, max(layer if layer >= 0 else count + 1 + layer for layer in layers)

    def mask_argument(self, config: "PretrainedConfig") -> str | None:
        """The argument that says which tokens images fill; None where the tokens of images see those before them."""
        family = family_of_images(config.model_type)
        return None if family is None else family.mask_argument(config)

    def has_family(self, model_type: str) -> bool:
        """Whether a family is trained with images; others may have the same processor."""
        return model_type in MODELS

    def refuse_family(self, model_type: str) -> None:
        """Raise UserError if a family is not trained with images."""
        if not self.has_family(model_type):
            raise UserError(
                f"{not_offered(model_type)}, or name their column in data.ignore_columns to train the text alone"
            )

    def refuse_trained_parts(self, train: "Train") -> None:
        """Raise UserError if parts are trained that rows of text leave out."""
        for name, mode in self.modes(train).items():
            if mode != "frozen":
                raise UserError(f"train.{name}: has an effect only on {self.rows_text}; got {mode}; set it to frozen")

    def refuse_switches(self, train: "Train") -> None:
        """Raise UserError if a switch is on that does not know the parts."""
        reasons = {
            "context_parallel": "would divide an image's tokens among GPUs",
            "tensor_parallel": "divides the products of the language model alone",
            "pipeline_stages": "has no stage for a vision tower",
            "offload": NOT_TRIED,
            "sequence_tiles": NOT_TRIED,
        }
        for name, reason in reasons.items():
            key, value = f"train.{name}", getattr(train, name)
            if value not in (OFF[key], "optimizer"):  # The optimizer alone may be on the host.
                raise UserError(f"{key}: {reason}; got {value} and {self.rows_text}; {turn_off(key)}")

    def lighter(self, train: "Train") -> Iterator[Mapping[str, Any]]:
        """Adapters of a tower trained in full; a frozen one, which saves no activations; a frozen projector too."""
        if train.vision == "full":
            yield {"train.vision": "lora"}
        yield {"train.vision": "frozen"}
        if train.projector != "frozen":
            yield {"train.vision": "frozen", "train.projector": "frozen"}
