"""Explains why a request finds less of an earlier one than it could.

The differences of the two contents are undone one at a time. Each time the conversation is rendered again, and compared
with the earlier one:

    earlier       ████████████████████████████████
    new           ██████┤ 6                          the tools' order
    without that  █████████████████┤ 17              message 4: saves 11
    without both  ████████████████████████████████   saves 15

The difference whose undoing gains tokens is the one at which the prefix ends: so causes come in the order of the
prompt, each with its place in tokens, and no difference that costs nothing is called a cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from radixkv.service.explanations import advice
from radixkv.service.explanations.bodies import Chat, Content, Ids, Request, changed_fields, num_common
from radixkv.service.explanations.causes import KINDS, WORDS
from radixkv.service.explanations.differences import (
    Cause,
    ChangedLine,
    Comparison,
    Difference,
    Part,
    Undone,
    compared,
)
from radixkv.service.explanations.lines import Span
from radixkv.service.problems import ApiError
from radixkv.service.prompt_lines import LineRule
from radixkv.tokenizer.protocol import text_of

MAX_CAUSES: Final = 16
"""Causes that are explained; of others only the number is told."""
MAX_RENDERINGS: Final = 128
"""Changed contents that are rendered for one explanation."""
_MOST_TRIED: Final = 8
"""Differences that are tried at each step, each for a rendering."""
EXCERPT_CHARS: Final = 80
_EXCERPT_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    - ``offset``: the token at which the prefix ends for it, once the causes before it are undone.
    - ``saved_tokens``, ``saved_blocks``: by how much the prefix grows with ``change``, once the causes before it are
      undone. ``is_joint``: it gains nothing without the next cause, which has the gain of both.
    - ``rule``: rules of the service that make the change, for the operator.
    """

    cause: Cause
    difference: Difference
    offset: int
    said: str
    change: str
    saved_tokens: int
    saved_blocks: int
    is_joint: bool = False
    rules: tuple[LineRule, ...] = ()

    def document(self, *, with_content: bool) -> dict[str, Any]:
        """Return the cause as JSON. Without content nothing of it is quoted from a body."""
        words, found = WORDS[self.cause], self.difference
        document: dict[str, Any] = {
            "cause": self.cause,
            "anthropic": _anthropic_of(found) or words.anthropic,
            "openai": "tools_changed" if found.part == "tools" else words.openai,
            "part": found.part,
            "place": found.place or None,
            "earlier_place": found.earlier_place or None,
            "bytes": None if found.span is None else _spans(found.span),
            "offset": self.offset,
            "num": found.num,
            "num_new": found.num_new,
            "said": self.said,
            "change": self.change,
            "saved_tokens": self.saved_tokens,
            "saved_blocks": self.saved_blocks,
            "is_joint": self.is_joint,
            "lines": [_line(each, with_content=with_content) for each in found.lines],
        }
        if with_content:
            document |= {"names": list(found.names), "rules": [asdict(each) for each in self.rules]}
        return document


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The texts around the token at which the ids of both begin to differ: what both have, and how each goes on."""

    offset: int
    both: str
    earlier: str
    new: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request finds of an earlier one, and why no more.

    - ``earlier``: the number of the earlier request of which it finds the most, from 0; None: there is none.
    - ``matched_tokens``: with how many tokens both begin, in one cache. Whole blocks of them are found.
    - ``lost_tokens``, ``lost_blocks``: what it would find besides if nothing had been changed.
    - ``num_more``: further differences, not explained.
    - ``unrelated``: fields that differ and cost nothing.
    """

    verdict: str
    num_tokens: int
    earlier: int | None
    earlier_tokens: int
    block_size: int
    matched_tokens: int
    matched_blocks: int
    lost_tokens: int
    lost_blocks: int
    findings: tuple[Finding, ...]
    num_more: int
    unrelated: tuple[str, ...]
    excerpt: Excerpt | None

    def document(self, *, with_content: bool) -> dict[str, Any]:
        """Return the explanation as JSON, with stable names. Without content nothing is quoted from a body."""
        return {
            "verdict": self.verdict,
            "tokens": self.num_tokens,
            "earlier": self.earlier,
            "earlier_tokens": self.earlier_tokens,
            "block_size": self.block_size,
            "matched_tokens": self.matched_tokens,
            "matched_blocks": self.matched_blocks,
            "lost_tokens": self.lost_tokens,
            "lost_blocks": self.lost_blocks,
            "causes": [each.document(with_content=with_content) for each in self.findings],
            "more_differences": self.num_more,
            "unrelated_fields": list(self.unrelated),
            "excerpt": asdict(self.excerpt) if self.excerpt is not None and with_content else None,
        }


def explain(new: Request, history: Sequence[Request], block_size: int) -> Explanation:
    """Explain a request by the earlier one of which it finds the most; of equal ones, by the latest.

    ``history``: earlier requests, oldest first. Costs a few renderings for each cause, MAX_RENDERINGS at most.
    Raises ApiError if the contents can't be rendered.
    """
    if not history:
        return _first(new, block_size)
    best = max(range(len(history)), key=lambda at: (*_shared(new, history[at]), at))
    return _Search(new, history, best, block_size).explanation()


def num_blocks(number: int) -> str:
    """Return a number of blocks in words."""
    return f"{number:,} block{'' if number == 1 else 's'}"


def _shared(new: Request, earlier: Request) -> tuple[int, int]:
    """Return what a request finds of an earlier one, and what it would find in one cache."""
    common = num_common(earlier.ids, new.ids)
    is_one = None in (new.model, earlier.model) or new.model == earlier.model
    is_one &= (new.adapter, new.salt) == (earlier.adapter, earlier.salt)
    is_one &= new.rendering.tokenizer.digest == earlier.rendering.tokenizer.digest
    return common if is_one and new.uses_cache and earlier.uses_cache else 0, common


def _namespaces(new: Request, earlier: Request) -> list[Cause]:
    """Return why two requests share no cache."""
    found = list[Cause]()
    if None not in (new.model, earlier.model) and new.model != earlier.model:
        found.append("model_changed")
    if new.rendering.tokenizer.digest != earlier.rendering.tokenizer.digest:
        found.append("template_changed" if _encodes_alike(new, earlier) else "tokenizer_changed")
    if new.adapter != earlier.adapter:
        found.append("adapter_changed")
    if new.salt != earlier.salt:
        found.append("salt_changed")
    if not new.uses_cache or not earlier.uses_cache:
        found.append("cache_not_used")
    return found


def _encodes_alike(new: Request, earlier: Request) -> bool:
    """Whether the tokenizers of two requests give the same ids to the texts of both."""
    ours, theirs = new.rendering.tokenizer, earlier.rendering.tokenizer
    return all(
        ours.encode(text) == theirs.encode(text) for each in (earlier, new) for text in _texts_of(each)
    )


def _texts_of(request: Request) -> list[str]:
    content = request.content
    if isinstance(content, Chat):
        return [text_of(turn.get("content")) for turn in content.turns]
    return [content] if isinstance(content, str) else []


def _first(new: Request, block_size: int) -> Explanation:
    saved = advice.num_of_beginning(new) // block_size * block_size
    finding = _finding(Difference("first_request", "", "", part="request"), 0, saved, saved // block_size)
    verdict = f"This is the first request: all of its {new.num_tokens:,} tokens are computed."
    return Explanation(verdict, new.num_tokens, None, 0, block_size, 0, 0, 0, 0, (finding,), 0, (), None)


def _finding(
    difference: Difference,
    offset: int,
    saved: int,
    saved_blocks: int,
    *,
    change: str | None = None,
    is_joint: bool = False,
    rules: tuple[LineRule, ...] = (),
) -> Finding:
    words = WORDS[difference.cause]
    facts = {
        "place": difference.place,
        "earlier": difference.earlier_place,
        "num": difference.num,
        "num_new": difference.num_new,
        "kind": " and ".join(dict.fromkeys(KINDS[each.kind] for each in difference.lines)),
    }
    return Finding(
        difference.cause,
        difference,
        offset,
        words.said.format(**facts),
        change or words.change.format(**facts),
        saved,
        saved_blocks,
        is_joint,
        rules,
    )


class _Search:
    """Undoes the differences of two requests, and keeps what that gains."""

    def __init__(self, new: Request, history: Sequence[Request], best: int, block_size: int) -> None:
        self._new, self._earlier, self._best = new, history[best], best
        self._block_size = block_size
        self._namespaces = _namespaces(new, self._earlier)
        self._comparison: Comparison = compared(self._earlier, new, history)
        is_other = {"tokenizer_changed", "template_changed"} & {*self._namespaces}
        self._ids = new.rendering.ids(self._earlier.content) if is_other else self._earlier.ids
        self._common = num_common(self._ids, new.ids)
        self._current: Ids = new.ids
        self._undone: Undone = frozenset()
        self._findings: list[Finding] = []
        self._num_more = 0
        self._num_left = MAX_RENDERINGS

    def explanation(self) -> Explanation:
        """Return the explanation."""
        size, common = self._block_size, self._common
        matched = 0 if self._namespaces else common
        for index, cause in enumerate(self._namespaces):
            is_last = index == len(self._namespaces) - 1
            after = common if is_last else 0
            self._add(self._of_cache(cause), after, since=0, offset=0, is_joint=not is_last)
        self._undo_all()
        restored = self._restored()
        if max(restored, min(self._earlier.num_tokens, self._new.num_tokens)) < size:
            short = Difference("shorter_than_block", "", "", part="request")
            self._findings.insert(0, _finding(short, matched, 0, 0))
        lost = restored - matched
        lost_blocks = restored // size - matched // size
        return Explanation(
            self._verdict(matched, lost, lost_blocks),
            self._new.num_tokens,
            self._best,
            self._earlier.num_tokens,
            size,
            matched,
            matched // size,
            lost,
            lost_blocks,
            tuple(self._findings),
            self._num_more,
            tuple(changed_fields(self._new, self._earlier)),
            self._excerpt(common) if self._findings and common < len(self._ids) else None,
        )

    def _of_cache(self, cause: Cause) -> Difference:
        if cause != "cache_not_used":
            return Difference(cause, "", "", part="request")
        last = self._earlier.places[-1]
        return Difference(cause, "prompt_cache_options", last, part="request")

    # ---- undoing

    def _undo_all(self) -> None:
        differences = self._comparison.differences
        forms = frozenset(at for at, each in enumerate(differences) if each.is_form)
        ids = self._rendered(forms) if forms else None
        if ids is not None and np.array_equal(ids, self._current):
            self._undone = forms  # the model reads the same
        pending = [at for at, each in enumerate(differences) if each.can_undo and at not in self._undone]
        while pending and self._common < len(self._ids) and self._step(pending):
            pending = [at for at in pending if at not in self._undone]
            if len(self._findings) >= MAX_CAUSES:
                break
        self._num_more = len(pending) if self._common < len(self._ids) else 0
        for each in differences:
            if not each.can_undo and self._common < len(self._ids) and not self._num_more:
                self._add(each, self._common)

    def _step(self, pending: Sequence[int]) -> bool:
        """Undo the difference at which the prefix ends. Return whether anything was undone."""
        best: tuple[int, int, Ids] | None = None
        before = self._undone
        for at in self._tried(pending):
            ids = self._rendered(self._undone | {at})
            if ids is None:
                continue
            if np.array_equal(ids, self._current):
                self._undone |= {at}  # it changes no token
                continue
            gained = num_common(self._ids, ids)
            if gained > self._common and (best is None or gained > best[1]):
                best = at, gained, ids
        if best is not None:
            self._note(best[0], best[1])
            self._undone |= {best[0]}
            self._common, self._current = best[1], best[2]
        if self._undone != before:
            return True
        return self._step_jointly(pending)

    def _step_jointly(self, pending: Sequence[int]) -> bool:
        """Undo differences until the prefix grows, where none gains anything alone."""
        together = list[int]()
        for at in pending[: MAX_CAUSES - len(self._findings)]:
            together.append(at)
            ids = self._rendered(self._undone | {*together})
            if ids is not None and (gained := num_common(self._ids, ids)) > self._common:
                for each in together[:-1]:
                    self._add(self._comparison.differences[each], self._common, is_joint=True)
                self._add(self._comparison.differences[at], gained)
                self._undone |= {*together}
                self._common, self._current = gained, ids
                return True
        return False

    def _tried(self, pending: Sequence[int]) -> list[int]:
        """Return the differences that may be the first in the prompt: those of tools, and the first ones of turns."""
        turns = [at for at in pending if self._comparison.differences[at].turn is not None]
        tools = [at for at in pending if self._comparison.differences[at].turn is None]
        return [*tools, *turns][:_MOST_TRIED]

    def _rendered(self, undone: Undone) -> Ids | None:
        return self._ids_of(self._comparison.built(undone))

    def _ids_of(self, content: Content) -> Ids | None:
        """Return the ids of a content; None if it can't be rendered, or no more may be."""
        if not self._num_left:
            return None
        self._num_left -= 1
        try:
            return self._new.rendering.ids(content)
        except ApiError:
            return None

    def _note(self, index: int, gained: int) -> None:
        """Add the cause that a difference is, with what its change saves."""
        difference = self._comparison.differences[index]
        if difference.cause == "volatile_line":
            new = self._comparison.built(self._undone)
            for moved in advice.moves(difference, self._earlier.content, new):
                saved = self._gained_by(moved.earlier, moved.new)
                if saved > self._common:
                    self._add(difference, saved, change=moved.change, rules=moved.rules)
                    return
            self._add(difference, gained, change=advice.kept(difference))
            return
        self._add(difference, gained)

    def _gained_by(self, earlier: Content, new: Content) -> int:
        """Return with how many ids two changed contents begin."""
        ids, others = self._ids_of(earlier), self._ids_of(new)
        return 0 if ids is None or others is None else num_common(ids, others)

    def _add(
        self,
        difference: Difference,
        after: int,
        *,
        since: int | None = None,
        offset: int | None = None,
        change: str | None = None,
        is_joint: bool = False,
        rules: tuple[LineRule, ...] = (),
    ) -> None:
        """Add a cause with which the prefix has ``after`` tokens; ``since``: those that it has without."""
        before = self._common if since is None else since
        saved = max(after - before, 0)
        blocks = max(after // self._block_size - before // self._block_size, 0)
        at = self._common if offset is None else offset
        self._findings.append(
            _finding(difference, at, saved, blocks, change=change, is_joint=is_joint, rules=rules)
        )

    # ---- what is left

    def _restored(self) -> int:
        """Return how many tokens would be found if nothing had been changed. Adds what the template loses."""
        is_whole = self._comparison.extends and not self._num_more
        is_whole &= all(each.can_undo for each in self._comparison.differences)
        if not is_whole or self._common == len(self._ids):
            return self._common
        size, least = self._block_size, len(self._ids)
        is_text = not isinstance(self._new.content, Chat)
        if (is_text or least // size > self._common // size) and self._add_rewritten():
            return least
        return self._common

    def _add_rewritten(self) -> bool:
        """Add why a conversation that only goes on doesn't begin with all of the earlier one.

        Return False if only the opening of the answer is missing: the answer, or another message, is in its place.
        """
        content = self._comparison.built(self._undone)
        tokenizer, common = self._new.rendering.tokenizer, self._common
        old, new = (tokenizer.decode(ids[common:].tolist()) for ids in (self._ids, self._current))
        if not isinstance(content, Chat) or (old and new.startswith(old)):
            place = self._new.places[0] if not isinstance(content, Chat) and self._new.places else ""
            part: Part = "messages" if isinstance(content, Chat) else "prompt"
            found = Difference("retokenised", place, place, part=part, can_undo=False)
            self._add(found, advice.num_at_boundary(self._earlier, self._ids, self._current, common))
            return True
        assert isinstance(self._earlier.content, Chat)
        index = advice.turn_at(self._earlier.content, self._ids, common, self._ids_of)
        if index is None:
            return False
        place, turn = self._earlier.places[index], self._earlier.content.turns[index]
        if turn.get("role") == "assistant" and advice.has_thoughts(turn):
            found = Difference("reasoning_stripped", place, place, turn=index, can_undo=False)
            after = self._gained_by(
                advice.without_reasoning(self._earlier.content), advice.without_reasoning(content)
            )
            change = (
                "The chat template leaves it out once a question follows. Send answers back without their reasoning "
                "from the first time on, or use a template that keeps it."
            )
            self._add(found, after, change=change)
            return True
        self._add(Difference("template_rewrites", place, place, turn=index, can_undo=False), common)
        return True

    # ---- words

    def _verdict(self, matched: int, lost: int, lost_blocks: int) -> str:
        size, whole = self._block_size, self._earlier.num_tokens
        blocks = num_blocks(matched // size)
        found = f"{matched:,} of the {whole:,} tokens of the earlier request are found, in {blocks}"
        if not self._findings:
            return f"Nothing is lost: {found}."
        said = self._findings[0].said
        if not lost_blocks:
            return f"No block is lost, {found}: {said}."
        return f"{lost:,} tokens of the earlier request, {num_blocks(lost_blocks)}, are not found: {said}."

    def _excerpt(self, common: int) -> Excerpt:
        decode: Callable[[list[int]], str] = self._new.rendering.tokenizer.decode
        both = decode(self._ids[max(common - _EXCERPT_TOKENS, 0) : common].tolist())
        earlier, new = (
            decode(ids[common : common + _EXCERPT_TOKENS].tolist())[:EXCERPT_CHARS]
            for ids in (self._ids, self._new.ids)
        )
        return Excerpt(common, both[-EXCERPT_CHARS:], earlier, new)


def _anthropic_of(difference: Difference) -> str | None:
    """Return Anthropic's name for a volatile line, which depends on where it is."""
    names: Mapping[str, str] = {"tools": "tools_changed", "system": "system_changed"}
    is_line = difference.cause == "volatile_line"
    return names.get(difference.part, "messages_changed") if is_line else None


def _spans(span: Span) -> Mapping[str, Sequence[int]]:
    return {"earlier": list(span.earlier), "new": list(span.new)}


def _line(line: ChangedLine, *, with_content: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": line.kind, "bytes": _spans(line.span)}
    if with_content:
        found |= {"earlier": line.earlier[:EXCERPT_CHARS], "new": line.new[:EXCERPT_CHARS]}
    return found
