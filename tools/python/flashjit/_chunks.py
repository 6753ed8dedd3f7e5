"""The rows of a sequence that a rank has."""

from __future__ import annotations

from typing import NamedTuple

LAYOUTS = ("contiguous", "zigzag", "striped")


class Chunk(NamedTuple):
    """Rows of a shard that are neighbours in the sequence, or `step` apart: row begin + i is at position first + step * i."""

    begin: int
    end: int
    first: int
    step: int = 1

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def last(self) -> int:
        return self.first + self.step * (self.rows - 1)


def chunks(rank: int, ranks: int, rows: int, layout: str) -> tuple[Chunk, ...]:
    """What a rank has of a sequence: `rows` rows. contiguous: rows rank * rows and on. zigzag: of twice as many blocks as
    ranks, block `rank` and the one as far from the end, so that a causal mask leaves all ranks the same work. striped: each
    ranks-th row, from `rank` on."""
    if layout == "contiguous":
        return (Chunk(0, rows, rank * rows),)
    if layout == "striped":
        return (Chunk(0, rows, rank, ranks),)
    half = rows // 2
    if rank == ranks - 1:  # whose two blocks are neighbours
        return (Chunk(0, rows, rank * half),)
    return Chunk(0, half, rank * half), Chunk(half, rows, (2 * ranks - 1 - rank) * half)


#: Tiles of 128 keys that keep a GPU's multiprocessors busy nearly to a kernel's end.
TILES_OF_PART = 1024


def parts_of_heads(ranks: int, tokens: int, heads: int, heads_kv: int) -> int:
    """In how many parts ranks exchange their heads, so that one's transfers run beside another's kernels: two, if each rank's heads
    divide and a part's kernels fill a GPU. tokens: of all sequences."""
    each, each_kv = heads // ranks, max(1, heads_kv // ranks)
    return (
        2
        if ranks > 1 and each % 2 == each_kv % 2 == 0 and each_kv // 2 * tokens >= TILES_OF_PART * 128
        else 1
    )
