"""What FlashInfer's functions are told besides their tensors, which say it, too: compared, so that nothing that is given goes unread."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import InvalidArgument


def check_number(name: str, given: Any, found: int, of: str) -> None:
    """of: what says another number, such as "k_cache is .."."""
    if given != found:
        raise InvalidArgument(f"{name} is {given!r}, but {of}: give {name}={found}.")


def check_sequences(batch_size: Any, name: str, found: int) -> None:
    check_number("batch_size", batch_size, found, f"{name} is of {found} sequences")


def lengths_of(offsets: Any) -> Tensor | None:
    """How long sequences are, on the CPU alone: a GPU would launch a kernel for numbers that nothing reads."""
    return offsets.diff() if _are_read(offsets) else None


def check_values(name: str, given: Any, of: str, found: Any) -> None:
    """Compares a number of each sequence, on the CPU alone, where it can be read without waiting."""
    if not _are_read(given, found):
        return
    said, wanted = given.reshape(-1).tolist(), found.reshape(-1).tolist()
    if len(said) != len(wanted):
        raise InvalidArgument(
            f"{name} is of {len(said)} sequences, but {of} of {len(wanted)}: give the same ones, or leave {name} out."
        )
    for i, (x, y) in enumerate(zip(said, wanted)):
        if x != y:
            raise InvalidArgument(
                f"{name} says {x} for sequence {i}, but {of} {y}: give the same, or leave {name} out."
            )


def check_offsets(name: str, given: Any, starts: Tensor, each: int) -> None:
    """Compares where sequences begin, with or without the end, on the CPU alone. each: how much is counted of a row."""
    if not _are_read(given, starts):
        return
    wanted = (starts * each).tolist()
    for i, (x, y) in enumerate(zip(given.reshape(-1).tolist(), wanted)):
        if x != y:
            raise InvalidArgument(
                f"{name} says {x} for sequence {i}, which begins at {y}: rows are packed without gaps here, so give that, or leave "
                f"{name} out."
            )


def longest_list(indptr: Tensor, indices: Tensor) -> int:
    """How many pages the sequence with most of them has. Reads indptr on the host."""
    ends = indptr.tolist()
    counts = [after - before for before, after in zip(ends, ends[1:])]
    if any(count < 0 for count in counts) or ends[0] < 0:
        raise InvalidArgument(
            f"indptr is {_shown(ends)}: give where each sequence's pages begin in indices, in order, and the end."
        )
    if ends[-1] > indices.numel():
        raise InvalidArgument(
            f"indptr ends at {ends[-1]}, but indices has {indices.numel()} pages: give as many."
        )
    return max(counts, default=0)


def _shown(values: list[int]) -> str:
    return f"{values[:8]}{'' if len(values) <= 8 else ', ..'}"


def check_pages(name: str, given: Any, table: Tensor, counts: Tensor | None, of: str) -> None:
    """Compares the first pages of each sequence, as many as counts says, on the CPU alone."""
    if counts is None or not _are_read(given, table, counts):
        return
    for i, (own, wanted, count) in enumerate(zip(given.tolist(), table.tolist(), counts.tolist())):
        if own[:count] != wanted[:count]:
            raise InvalidArgument(
                f"{name} has other pages than {of} for sequence {i}: give the same, or leave {name} out."
            )


def check_room(name: str, lengths: Tensor, indptr: Tensor, page_size: int) -> None:
    """That sequences have pages for their keys, on the CPU alone."""
    if not _are_read(lengths, indptr):
        return
    for i, (keys, pages) in enumerate(zip(lengths.tolist(), indptr.diff().tolist())):
        if not 0 <= keys <= pages * page_size:
            raise InvalidArgument(
                f"{name} says {keys} keys for sequence {i}, which has {pages} pages of {page_size}: give it pages, or a smaller "
                "length."
            )


def _are_read(*given: Any) -> bool:
    return all(isinstance(x, Tensor) and x.is_cpu for x in given)
