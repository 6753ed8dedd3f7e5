"""What one rank's queries and a block of keys make of attention(): calls on rows of both, and what each is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._chunks import Chunk


class Packed(NamedTuple):
    """Documents that lie one after the other in a piece's rows and in its keys."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int

    def given(self) -> dict[str, Any]:
        return self._asdict()


class Piece(NamedTuple):
    rows: Chunk
    keys: Chunk
    given: dict[str, Any]  # of what attention() takes
    packed: Packed | None = None
    place: tuple[int, ...] | None = None  # in the mask of dropout: _library.DropoutPlace

    @property
    def is_plain(self) -> bool:
        return self.packed is None and self.given.keys() == {"scale"}


class Rule(NamedTuple):
    """What attends to what, by positions in the whole sequence, or in a document where these are packed."""

    causal: bool
    window: int | None
    scale: float | None
    score_mod: Any
    mask_mod: Any
    documents: tuple[int, ...] | None = None  # where each begins, and where the last one ends
    dropout_p: float = 0.0
    head: int = 0  # the first one's number among all heads
    heads: int = 0

    @property
    def is_simple(self) -> bool:
        return (
            self.window is None
            and not self.dropout_p
            and self.score_mod is self.mask_mod is self.documents is None
        )

    def pieces(self, mine: Sequence[Chunk], theirs: Sequence[Chunk], device: torch.device) -> list[Piece]:
        """The calls of these chunks. A pair of a row and a key is in one piece at most; in none, it does not attend."""
        if self.causal and self.is_simple and mine == theirs:
            whole = Chunk(0, mine[-1].end, 0)  # positions ascend within a shard
            return [Piece(whole, whole, {"scale": self.scale, "causal": True})]
        pairs = [(a, b) for a in mine for b in theirs]
        if self.documents is not None:
            return [piece for a, b in pairs for piece in self._of_documents(a, b, device)]
        found = self._found((0, a, b) for a, b in pairs)
        return _joined(found) if all(piece.is_plain for piece in found) else found

    def seen_by(self, rows: Chunk) -> Chunk:
        """The keys, of a whole sequence, that a chunk of queries may see."""
        begin = 0 if self.window is None else max(0, rows.first - self.window + 1)
        return Chunk(begin, rows.last + 1, begin)

    def _of_documents(self, q: Chunk, kv: Chunk, device: torch.device) -> list[Piece]:
        """Documents that begin in both chunks are one call; the others, at the chunks' ends, are one each."""
        apart, together = [], []
        documents = self.documents or ()
        for i, (begin, end) in enumerate(zip(documents, documents[1:])):
            rows, keys = _overlap(q, begin, end), _overlap(kv, begin, end)
            if rows.rows <= 0 or keys.rows <= 0:
                continue
            if rows.first == keys.first == 0:
                together.append((i, rows, keys))
            else:
                apart.append((i, rows, keys))
        if len(together) == 1:
            apart, together = apart + together, []
        found = self._found(apart)
        if together:
            first, last = together[0][0], together[-1][0]
            rows, keys = (Chunk(a.begin, b.end, 0) for a, b in zip(together[0][1:], together[-1][1:]))
            # With the empty ones between them, so that their numbers follow each other.
            lengths = [
                tuple(_overlap(x, *documents[i : i + 2]).rows for i in range(first, last + 1))
                for x in (q, kv)
            ]
            packed = packed_documents(*lengths, device)
            given = (
                self.arguments(Chunk(0, packed.max_seqlen_q, 0), Chunk(0, packed.max_seqlen_kv, 0), first)
                or {}
            )
            if "causal" in given:  # both begin where the document does, wherever they end
                given["causal"] = "top_left"
            found.append(
                Piece(rows, keys, {**given, **packed.given()}, packed, self._place(first, rows, keys))
            )
        return found

    def _found(self, blocks: Iterable[tuple[int, Chunk, Chunk]]) -> list[Piece]:
        """The blocks of a document in which any pair attends."""
        return [
            Piece(rows, keys, given, None, self._place(document, rows, keys))
            for document, rows, keys in blocks
            if (given := self.arguments(rows, keys, document)) is not None
        ]

    def _place(self, document: int, rows: Chunk, keys: Chunk) -> tuple[int, ...] | None:
        return (
            (document, self.head, self.heads, rows.first, keys.first, rows.step, keys.step)
            if self.dropout_p
            else None
        )

    def arguments(self, q: Chunk, kv: Chunk, document: int = 0) -> dict[str, Any] | None:
        """What attention() of one chunk and another is given; None: no pair attends."""
        given: dict[str, Any] = {"scale": self.scale}
        if self.dropout_p:
            given["dropout_p"] = self.dropout_p
        score_mod, mask_mod = self.score_mod, self.mask_mod
        # Numbers that differ between ranks and steps are read at each call, so that their kernels are the same.
        q_first, kv_first, head, batch = (
            torch.tensor(x, dtype=torch.int32) for x in (q.first, kv.first, self.head, document)
        )
        moved = lambda b, h, i, j: (
            b + batch,
            h + head,
            _scaled(i, q.step) + q_first,
            _scaled(j, kv.step) + kv_first,
        )
        if score_mod is not None:
            given["score_mod"] = lambda s, b, h, i, j: score_mod(s, *moved(b, h, i, j))
        tests: list[Callable[..., Any]] = []
        if mask_mod is not None:
            tests.append(mask_mod)
        if self.causal:
            window = self.window
            if kv.first > q.last or (window is not None and q.first - kv.last >= window):
                return None
            if window is not None and q.last - kv.first >= window:
                tests.append(lambda b, h, i, j: i - j < window)
            if kv.last > q.first:
                if not tests and q.last == kv.last and q.step == kv.step:
                    given["causal"] = True
                else:
                    tests.append(lambda b, h, i, j: i >= j)
        if tests:

            def mask(*place: Any) -> Any:
                where = moved(*place)
                return functools.reduce(lambda x, y: x & y, [test(*where) for test in tests])

            given["mask_mod"] = mask
        return given


def _scaled(index: Any, step: int) -> Any:
    return index * step if step > 1 else index


def _overlap(chunk: Chunk, begin: int, end: int) -> Chunk:
    """The rows of a document in a chunk of neighbours, by positions in the document."""
    low, high = max(chunk.first, begin), min(chunk.last + 1, end)
    at = chunk.begin - chunk.first
    return Chunk(low + at, high + at, low - begin)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Fewer ones of more rows or keys, of such as have no mask."""

    def join(pieces: list[Piece], along: str, across: str) -> list[Piece]:
        result: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: (getattr(p, across), getattr(p, along))):
            last = result[-1] if result else None
            a: Any = getattr(last, along, None)
            b: Any = getattr(piece, along)
            if last and a.end == b.begin and getattr(last, across)[:2] == getattr(piece, across)[:2]:
                both: dict[str, Any] = {along: Chunk(a.begin, b.end, a.first)}
                result[-1] = last._replace(**both)
            else:
                result.append(piece)
        return result

    return join(join(pieces, "rows", "keys"), "keys", "rows")


@functools.lru_cache(maxsize=256)
def packed_documents(lengths_q: tuple[int, ...], lengths_kv: tuple[int, ...], device: torch.device) -> Packed:
    cu_q, cu_kv = (
        torch.nn.functional.pad(torch.tensor(x).cumsum(0), (1, 0)).to(torch.int32).to(device)
        for x in (lengths_q, lengths_kv)
    )
    return Packed(cu_q, cu_kv, max(lengths_q), max(lengths_kv))
