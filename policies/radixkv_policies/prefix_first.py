"""Evicts generated blocks before prompt blocks, each group in the order of last use.

Any request may send a prompt, or its document, again. An answer returns only if its conversation continues. A block
with generated tokens counts as generated until a request matches it as a part of its prompt. Our own policy; some
engines also keep prompt blocks longer than decoded ones.

State a node: a flag and a stamp a piece, an entry of a queue. Cost: O(log n).
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import Keys, LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle


@mypyc_attr(acyclic=True)
class Written(Piece):
    """``is_prompt``: it was part of a prompt. ``stamp``: order of the end of its last use."""

    __slots__ = ("is_prompt", "stamp")

    def __init__(self, is_prompt: bool) -> None:
        self.is_prompt, self.stamp = is_prompt, 0

    def twin(self) -> Written:
        twin = Written(self.is_prompt)
        twin.stamp = self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixFirst(LeafPolicy[Written]):
    """Prompt blocks outlive generated ones."""

    def begin(self) -> None:
        super().begin()
        self._prompts, self._generated = LeafQueue(), LeafQueue()

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        """Return the number of whole blocks of the prompt."""
        return num_blocks

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Written:
        return Written(not isinstance(hints, int) or start < hints)

    def alike(self, last: Written, piece: Written) -> bool:
        return last.is_prompt == piece.is_prompt

    def used(self, piece: Written) -> None:
        piece.is_prompt = True

    def ended(self, piece: Written) -> None:
        piece.stamp = self.next_stamp()

    def entered(self, node: Handle, piece: Written, depth: int) -> None:
        (self._prompts if piece.is_prompt else self._generated).add(node, piece.stamp)

    def left(self, node: Handle, piece: Written) -> None:
        (self._prompts if piece.is_prompt else self._generated).discard(node)

    def victim(self) -> Handle | None:
        node = self._generated.first()
        return self._prompts.first() if node is None else node

    def _pieces(self, num_blocks: int, depth: int, hints: object, keys: Keys) -> list[Written]:
        start = depth - num_blocks
        if not isinstance(hints, int) or not start < hints < depth:
            return [self._new(start, num_blocks, hints, keys, None)]
        return [
            self._new(start, hints - start, hints, (), None),
            self._new(hints, depth - hints, hints, (), None),
        ]
