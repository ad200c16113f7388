"""The tokens of a kind of unit as a program: a sequence, and the blocks that every more layer and chunk inserts.

The first and the last chunk of a loss are not like those between: with two chunks both are there, every more one is
like the others, and a loss of one chunk has a stretch of its own in their place.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from stages.estimate.cut import MAKE, NotAffine, Piece, Token
from stages.estimate.loops import Insertion, find_loops

LAYERS: Final = "layers"
CHUNKS: Final = "chunks"
Loop = Literal["layers", "chunks"]
TRACED_TURNS = 3
"""Different counts of a loop that are compared."""
FEWEST_CHUNKS = 2
"""From so many on, one more chunk inserts the same blocks."""
Sized = tuple[Token, int | None]


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
    """What a loss of one chunk has in place of a stretch of the base."""

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
    single: tuple[Stretch, ...]
    """In order; none but where the base has FEWEST_CHUNKS."""

    @property
    def all_sites(self) -> list[int]:
        """Of all births there are, some more than once."""
        blocks = (site for block in self.blocks for site in block.sites)
        return [*self.sites, *blocks, *(site for stretch in self.single for site in stretch.sites)]

    def unroll(self, counts: Counts) -> tuple[list[Token], list[int]]:
        """Tokens, and the site of every birth.

        Raises:
            NotAffine: no loop was found that could run so often.
        """
        if self.single and counts.chunks == 1:
            return self._of_one_chunk().unroll(counts)
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

    def _of_one_chunk(self) -> "Program":
        """The program of a loss of one chunk."""
        base: list[Token] = []
        sites: list[int] = []
        place = birth = 0
        for stretch in self.single:
            births = count_births(self.base[place : stretch.start])
            base += [*self.base[place : stretch.start], *stretch.tokens]
            sites += [*self.sites[birth : birth + births], *stretch.sites]
            place, birth = stretch.end, birth + births + count_births(self.base[stretch.start : stretch.end])
        blocks = []
        for block in self.blocks:
            if block.loop == LAYERS:
                grown = sum(stretch.grown for stretch in self.single if stretch.end <= block.place)
                blocks.append(replace(block, place=block.place + grown))
        return replace(
            self,
            base=(*base, *self.base[place:]),
            sites=(*sites, *self.sites[birth:]),
            counts=replace(self.counts, chunks=1),
            blocks=tuple(blocks),
            single=(),
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


def find_program(pieces: Sequence[Piece], what: str) -> Program:
    """The program of traced units of one kind: it gives the tokens of each of them.

    Raises:
        NotAffine: there is none.
    """
    depths = sorted({piece.layers for piece in pieces})
    chunks = _alike_but_for_chunks([piece for piece in pieces if piece.layers == depths[0]])
    program = _plain(chunks[1] if chunks else next(piece for piece in pieces if piece.layers == depths[0]))
    if chunks:
        program = _with_blocks(program, _compare(chunks[1:]), CHUNKS)
        program = _with_single(program, chunks[0], chunks[1])
    if len(depths) > 1:
        deep = _alike_but_for_layers(pieces, depths, what)
        found = _in_base(program, deep[0], _compare(deep))
        program = replace(_with_blocks(program, found, LAYERS), step_layers=depths[1] - depths[0])
    for piece in pieces:
        if program.unroll(Counts(layers=piece.layers, chunks=piece.unit.chunks))[0] != list(piece.tokens):
            raise NotAffine(f"{what} make or free tensors in different orders")
    return program


def _alike_but_for_chunks(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of one chunk to four, the last ones alike; none where not so many were traced."""
    groups: dict[Hashable, dict[int, Piece]] = {}
    for piece in pieces:
        figures = tuple(sorted((k, v) for k, v in piece.unit.figures.items() if k != "supervised"))
        groups.setdefault(figures, {})[piece.unit.chunks] = piece
    wanted = range(1, FEWEST_CHUNKS + TRACED_TURNS)
    return next(([group[count] for count in wanted] for group in groups.values() if group.keys() >= set(wanted)), [])


def _alike_but_for_layers(pieces: Sequence[Piece], depths: Sequence[int], what: str) -> list[Piece]:
    """A piece of each depth, of the same shape.

    Raises:
        NotAffine: there are none, or depths are not evenly spaced.
    """
    steps = {deep - shallow for shallow, deep in zip(depths, depths[1:], strict=False)}
    if len(depths) != TRACED_TURNS or len(steps) != 1:
        raise NotAffine(f"{what}: depths {list(depths)} are not three at one distance")
    groups: dict[Hashable, dict[int, Piece]] = {}
    for piece in pieces:
        key = (piece.unit.chunks, tuple(sorted(piece.unit.figures.items())))
        groups.setdefault(key, {})[piece.layers] = piece
    found = next((group for group in groups.values() if len(group) == TRACED_TURNS), None)
    if found is None:
        raise NotAffine(f"{what} were not traced at depths {list(depths)} alike")
    return [found[depth] for depth in depths]


def _compare(three: Sequence[Piece]) -> list[Insertion[Token]]:
    """What every turn inserts."""
    return [
        Insertion(place=insertion.place, block=tuple(token for token, _ in insertion.block))
        for insertion in find_loops(*_sized(three))
    ]


def _sized(pieces: Sequence[Piece]) -> list[list[Sized]]:
    """Tokens with their bytes, so that tensors are told apart by size too.

    All but those that grow from piece to piece: of a kind of which there are as many in each, and not as large.
    """
    found: list[dict[Hashable, list[int]]] = []
    for piece in pieces:
        sizes: dict[Hashable, list[int]] = {}
        for token, size in piece.sized():
            if token[0] == MAKE:
                sizes.setdefault(token[1], []).append(size)
        found.append(sizes)
    grown = {
        kind
        for kind, sizes in found[0].items()
        if len({len(each.get(kind, ())) for each in found}) == 1 and any(each[kind] != sizes for each in found)
    }
    return [[(token, None if token[1] in grown else size) for token, size in piece.sized()] for piece in pieces]


def _in_base(program: Program, piece: Piece, insertions: Sequence[Insertion[Token]]) -> list[Insertion[Token]]:
    """Insertions into a piece of the least depth as insertions into the base of its program.

    Raises:
        NotAffine: one lies inside of what another loop inserted.
    """
    # Stretches of the piece that the base has not, and by how much they shift what follows.
    stretches: list[tuple[int, int, int]] = []
    added = 0
    if program.single and piece.unit.chunks == 1:
        for stretch in program.single:
            begin = stretch.start + added
            stretches.append((begin, begin + len(stretch.tokens), stretch.grown))
            added += stretch.grown
    else:
        for block in program.blocks:
            grown = (piece.unit.chunks - program.counts.chunks) * len(block.tokens)
            stretches.append((block.place + added, block.place + added + grown, grown))
            added += grown
    found = []
    for insertion in insertions:
        if any(begin < insertion.place < end for begin, end, _ in stretches):
            raise NotAffine("a loop over layers runs inside of one over chunks")
        before = sum(grown for _, end, grown in stretches if end <= insertion.place)
        found.append(Insertion(place=insertion.place - before, block=insertion.block))
    return found


def _plain(start: Piece) -> Program:
    """A program of one sequence alone."""
    return Program(
        base=start.tokens,
        sites=tuple(range(len(start.sizes))),
        counts=Counts(layers=start.layers, chunks=start.unit.chunks),
        step_layers=0,
        blocks=(),
        single=(),
    )


def _with_blocks(program: Program, insertions: Sequence[Insertion[Token]], loop: Loop) -> Program:
    """With what a loop inserts; its births take the sites of the same block before it.

    Raises:
        NotAffine: a layer is not like the one before it, so that its sizes are not known for other shapes.
    """
    blocks = list(program.blocks)
    fresh = max(program.all_sites, default=-1) + 1
    for insertion in insertions:
        first = insertion.place - len(insertion.block)
        like_before = first >= 0 and program.base[first : insertion.place] == insertion.block
        births = count_births(insertion.block)
        if like_before and loop == LAYERS:
            born = count_births(program.base[:first])
            sites = program.sites[born : born + births]
        elif loop == CHUNKS:  # A chunk in the middle is as large as none of the base may be.
            sites = tuple(range(fresh, fresh + births))
            fresh += births
        else:
            raise NotAffine(f"a layer's {len(insertion.block)} tokens are not those of the one before it")
        blocks.append(Block(place=insertion.place, loop=loop, tokens=insertion.block, sites=sites))
    return replace(program, blocks=tuple(sorted(blocks, key=lambda block: block.place)))


def _with_single(program: Program, single: Piece, two: Piece) -> Program:
    """With what a loss of one chunk has in place of two: forward lacks a chunk, backward has one unlike either."""
    ones, twos = _sized((single, two))
    start = _common(ones, twos)
    lacked = max(range(len(twos) - len(ones) + 1), key=lambda size: _common(ones[start:], twos[start + size :]))
    middle = _common(ones[start:], twos[start + lacked :])
    rest = start + middle
    same = _common(ones[rest:][::-1], twos[rest + lacked :][::-1])
    tokens = single.tokens[rest : len(ones) - same]
    fresh = max(program.all_sites) + 1
    stretches = (
        Stretch(start=start, end=start + lacked, tokens=(), sites=()),
        Stretch(
            start=rest + lacked,
            end=len(twos) - same,
            tokens=tokens,
            sites=tuple(range(fresh, fresh + count_births(tokens))),
        ),
    )
    return replace(program, single=stretches)


def _common(one: Sequence[Sized], other: Sequence[Sized]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
