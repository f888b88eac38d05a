"""A sequence that goes on where another one in the mount ends."""

from __future__ import annotations

from ._kvfs import Changed, InvalidArgument, Missing, Model, Sequence


def continued(store: Model, source: Sequence | None, name: str, ids: list[int], kept: int) -> tuple[Sequence, int]:
    """The sequence `name`, and how many of the ids it has: `kept` where `source` still has them, whose pages it shares."""
    sequence = None
    if source is not None:
        try:
            sequence = source.copy(name, 0, kept)
        except (Missing, Changed, InvalidArgument):
            # It is not there any more, or shorter: nobody waits for a cache to end.
            pass
    if sequence is None:
        sequence = store.create_sequence(name)
    has = sequence.tokens
    if has != ids[: len(has)]:
        sequence.clear()
        has = []
    return sequence, len(has)
