"""The program of traced units: three numbers of layers, and of chunks, tell what one more of either inserts."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from lean_finetune.memory.allocator.cut import MAKE, NotAffine, Piece, Token
from lean_finetune.memory.allocator.loops import Insertion, find_loops
from lean_finetune.memory.allocator.program import (
    CHUNKS,
    FEWEST_CHUNKS,
    LAYERS,
    TRACED_TURNS,
    Block,
    Counts,
    Loop,
    Program,
    Stretch,
    count_births,
)

Sized = tuple[Token, int | None]
"""A token and, where tensors are told apart by it, the bytes it makes."""


def find_program(pieces: Sequence[Piece], what: str) -> Program:
    """The program of traced units of one kind: it gives the tokens of each of them.

    Raises:
        NotAffine: there is none.
    """
    depths = sorted({piece.layers for piece in pieces})
    chunks = _alike_but_for_chunks([piece for piece in pieces if piece.layers == depths[0]])
    fewer, alike = chunks[:-TRACED_TURNS], chunks[-TRACED_TURNS:]
    program = _plain(alike[0] if alike else next(piece for piece in pieces if piece.layers == depths[0]))
    if alike:
        program = _with_blocks(program, _compare(alike), CHUNKS)
        for few in fewer:
            program = _with_few(program, few, alike[0])
    if len(depths) > 1:
        deep = _alike_but_for_layers(pieces, depths, what)
        found = _in_base(program, deep[0], _compare(deep))
        program = replace(_with_blocks(program, found, LAYERS), step_layers=depths[1] - depths[0])
    for piece in pieces:
        if program.unroll(Counts(layers=piece.layers, chunks=piece.unit.chunks))[0] != list(piece.tokens):
            raise NotAffine(f"{what} make or free tensors in different orders")
    return program


def _alike_but_for_chunks(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of one chunk to the most that were traced, the last ones alike; none where there are not so many."""
    groups: dict[Hashable, dict[int, Piece]] = {}
    for piece in pieces:
        figures = tuple(sorted((k, v) for k, v in piece.unit.figures.items() if k != "supervised"))
        groups.setdefault(figures, {})[piece.unit.chunks] = piece
    longest = max(([*_from_one(group)] for group in groups.values()), key=len)
    return longest if len(longest) >= FEWEST_CHUNKS - 1 + TRACED_TURNS else []


def _from_one(pieces: Mapping[int, Piece]) -> Iterator[Piece]:
    """Pieces by number of chunks from one on, as far as there is none left out."""
    chunks = 1
    while chunks in pieces:
        yield pieces[chunks]
        chunks += 1


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
    if piece.unit.chunks in program.few:
        for stretch in program.few[piece.unit.chunks]:
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
        few={},
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


def _with_few(program: Program, few: Piece, base: Piece) -> Program:
    """With what a loss of fewer chunks has in place of the base's: wherever their tokens differ."""
    fewer, more = _sized((few, base))
    start = _common(fewer, more)
    same = min(_common(fewer[::-1], more[::-1]), len(fewer) - start, len(more) - start)
    between = SequenceMatcher(None, more[start : len(more) - same], fewer[start : len(fewer) - same], autojunk=False)
    fresh = max(program.all_sites) + 1
    stretches = []
    for change, first, last, first_few, last_few in between.get_opcodes():
        if change == "equal":
            continue
        tokens = few.tokens[start + first_few : start + last_few]
        births = count_births(tokens)
        sites = tuple(range(fresh, fresh + births))
        stretches.append(Stretch(start=start + first, end=start + last, tokens=tokens, sites=sites))
        fresh += births
    return replace(program, few={**program.few, few.unit.chunks: tuple(stretches)})


def _common(one: Sequence[Sized], other: Sequence[Sized]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
