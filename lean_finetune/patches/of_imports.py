"""What the import of other packages replaces: in processes that only predict, and where torchvision is missing."""

from lean_finetune.patches.patch import Patch

COMPILE = Patch(
    replaces=("torch:compile",),
    why="loads PyTorch's compiler, half of an import's time, for functions that a prediction never compiles",
    until="bitsandbytes and transformers import without the compiler",
)
COMPILER_UNLOADED = Patch(
    replaces=("torch:_dynamo",),
    why="marks functions for the compiler, which loads it",
    until=COMPILE.until,
)
LIST_OF_MODELS = Patch(
    replaces=("transformers.utils.import_utils:define_import_structure",),
    why="reads all files of transformers.models a second time",
    until="transformers keeps what it read",
)
PIXTRAL_WITH_PILLOW = Patch(
    replaces=("transformers.models.pixtral.image_processing_pixtral",),
    why="imports torchvision, which is not installed, though Pillow's class of the same processor is there",
    until="Pixtral's processor imports without torchvision",
)
