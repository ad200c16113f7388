"""The tokens of a kind of unit as a program: a sequence, and the blocks that every more layer and chunk inserts.

The first and the last chunk of a loss are not like those between: with two chunks both are there, every more one is
like the others, and a loss of one chunk has a stretch of its own in their place. Where the head is trained, the chunk
after the first makes the sum of its gradients that all later ones write into, so that two are another exception.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lean_finetune.memory.allocator.cut import MAKE, NotAffine, Token

LAYERS: Final = "layers"
CHUNKS: Final = "chunks"
Loop = Literal["layers", "chunks"]
TRACED_TURNS = 3
"""Different counts of a loop that are compared."""
FEWEST_CHUNKS = 2
"""From so many on, one more chunk inserts the same blocks;"""
FEWEST_CHUNKS_SUMMED = 3
"""where gradients of the head are summed, from so many on."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How often the loops run."""

    layers: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a loop inserts with every turn more than the base has."""

    place: int
    """Before this token of the base."""
    loop: Loop
    tokens: tuple[Token, ...]
    sites: tuple[int, ...]
    """Of its births: births of one site are alike in size."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What a loss of fewer chunks has in place of a stretch of the base."""

    start: int
    end: int
    """Tokens of the base that are left out."""
    tokens: tuple[Token, ...]
    sites: tuple[int, ...]

    @property
    def grown(self) -> int:
        """Tokens more than it stands for."""
        return len(self.tokens) - (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A stretch of tokens that is the same block again and again."""

    start: int
    size: int
    """Tokens of a turn."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """The tokens of units of one kind for any number of layers and chunks."""

    base: tuple[Token, ...]
    sites: tuple[int, ...]
    """Of the base's births."""
    counts: Counts
    """Of the base."""
    step_layers: int
    """Layers that one turn of the loop over layers adds; 0 where only one depth was traced."""
    blocks: tuple[Block, ...]
    """In order."""
    few: Mapping[int, tuple[Stretch, ...]]
    """Of losses with fewer chunks than the base, by their number; in order."""

    @property
    def all_sites(self) -> list[int]:
        """Of all births there are, some more than once."""
        blocks = (site for block in self.blocks for site in block.sites)
        stretches = (stretch for few in self.few.values() for stretch in few)
        return [*self.sites, *blocks, *(site for stretch in stretches for site in stretch.sites)]

    def unroll(self, counts: Counts) -> tuple[list[Token], list[int]]:
        """Tokens, and the site of every birth.

        Raises:
            NotAffine: no loop was found that could run so often.
        """
        if counts.chunks in self.few:
            return self._of_few(counts.chunks).unroll(counts)
        turns = {LAYERS: self._turns_of_layers(counts.layers), CHUNKS: self._turns_of_chunks(counts.chunks)}
        tokens: list[Token] = []
        sites: list[int] = []
        place = birth = 0
        for block in self.blocks:
            piece = self.base[place : block.place]
            births = count_births(piece)
            tokens += [*piece, *block.tokens * turns[block.loop]]
            sites += [*self.sites[birth : birth + births], *block.sites * turns[block.loop]]
            place, birth = block.place, birth + births
        return [*tokens, *self.base[place:]], [*sites, *self.sites[birth:]]

    def turns(self, counts: Counts) -> tuple[Turns, ...]:
        """Where the tokens of `unroll` repeat: what a block inserts, and the block before it that it is like.

        Raises:
            NotAffine: see `unroll`.
        """
        if counts.chunks in self.few:
            return self._of_few(counts.chunks).turns(counts)
        turns = {LAYERS: self._turns_of_layers(counts.layers), CHUNKS: self._turns_of_chunks(counts.chunks)}
        found = []
        grown = 0
        for block in self.blocks:
            size, count = len(block.tokens), turns[block.loop]
            before = int(block.loop == LAYERS)
            found.append(Turns(start=block.place + grown - before * size, size=size, count=count + before))
            grown += size * count
        return tuple(found)

    def _of_few(self, chunks: int) -> "Program":
        """The program of a loss of so few chunks."""
        stretches = self.few[chunks]
        base: list[Token] = []
        sites: list[int] = []
        place = birth = 0
        for stretch in stretches:
            births = count_births(self.base[place : stretch.start])
            base += [*self.base[place : stretch.start], *stretch.tokens]
            sites += [*self.sites[birth : birth + births], *stretch.sites]
            place, birth = stretch.end, birth + births + count_births(self.base[stretch.start : stretch.end])
        blocks = []
        for block in self.blocks:
            if block.loop == LAYERS:
                grown = sum(stretch.grown for stretch in stretches if stretch.end <= block.place)
                blocks.append(replace(block, place=block.place + grown))
        return replace(
            self,
            base=(*base, *self.base[place:]),
            sites=(*sites, *self.sites[birth:]),
            counts=replace(self.counts, chunks=chunks),
            blocks=tuple(blocks),
            few={},
        )

    def _turns_of_layers(self, layers: int) -> int:
        more = layers - self.counts.layers
        if more and (not self.step_layers or more < 0 or more % self.step_layers):
            raise NotAffine(f"{layers} layers do not follow from those traced")
        return more // self.step_layers if more else 0

    def _turns_of_chunks(self, chunks: int) -> int:
        more = chunks - self.counts.chunks
        if more < 0 or (more and not any(block.loop == CHUNKS for block in self.blocks)):
            raise NotAffine(f"{chunks} chunks of the loss do not follow from those traced")
        return more


def count_births(tokens: Sequence[Token]) -> int:
    """How many of them make a tensor."""
    return sum(token[0] == MAKE for token in tokens)
