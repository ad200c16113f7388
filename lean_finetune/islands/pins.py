"""What stage pin reads for what rows may carry: files that rows name, and facts of a model's config.json."""

from lean_finetune.images.image_family import config_facts
from lean_finetune.images.named_images import named_files

__all__ = ["config_facts", "named_files"]
