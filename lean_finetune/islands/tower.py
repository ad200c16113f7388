"""The parts of models beside decoder and head: those for images alone. The text case: a model built without them."""

from lean_finetune.images.tower import ImageTower

TOWER = ImageTower()
