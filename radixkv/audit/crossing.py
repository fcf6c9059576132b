"""Check 3 over HTTP in many combinations: B writes a prompt, A reads it.

A *way* is one combination of six parts:

    space    the salt, adapter and other fields that each side names
    form     the prompt as text, as token ids or as messages
    writer   the surface through which B writes
    reader   the surface through which A reads
    uses     how often B writes
    length   a short or a long prompt

The ways that are tried cover the pairs of parts that may matter, and every combination of space, form and reader.
An audit with few probes (``light``) covers fewer pairs.

In each way A reads three prompts, in this order:

    fresh   a prompt that was never sent. The server may report cached tokens if all prompts begin alike.
    theirs  B's prompt. More cached tokens than for any fresh prompt: a leak.
    own     A's own prompt. No more than for a fresh prompt: the control failed, and the way shows nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from radixkv.audit.limit import Stopped
from radixkv.audit.probe_prompts import FORMS, Prompt, Prompts, unknown_at_most
from radixkv.audit.surfaces import PLAIN, READERS, ROUTED, WRITERS, Extra, Surface, completion
from radixkv.audit.target import Reply, Target, TargetError, answered
from radixkv.audit.verdict import Check, Verdict, alone, not_checked

NAME = "cross-tenant probe"
EVERY_WAY = f"{NAME}, every way"
TRIAL_SHARE, TRIAL_S = 1 / 8, 5.0
"""Share of the time that is left, or seconds, which a surface may take to show whether the server has it."""
WAYS_SHARE = 0.8
"""Share of the time that is left which the ways may take. The rest is for what confirms their results."""
USES = 3
CONFIRMATIONS = 3
TRIES = 20
GIVE_UP_AFTER = 5
"""Ways in a row whose requests failed, after which the server has stopped answering."""
LONG_WORDS, LONGEST_WORDS = 160, 960
SHARE_OF_OWN = 4
"""A control succeeds if at least a quarter of A's own prompt is cached. (Half of a batch is a fresh prompt.)"""
_DIGITS = re.compile(r"\d+")
_NOT_SIGNALS = ("id", "created", "choices", "message", "seconds", "timings", "date", "content-length")


@dataclass(frozen=True, slots=True)
class Space:
    """The fields that each side's requests carry in addition to the prompt.

    - ``group``: its check in the report.
    - ``fields``: the space is separate only if the server uses these fields.
    """

    name: str
    group: str
    a: Extra = PLAIN
    b: Extra = PLAIN
    fields: tuple[str, ...] = ()
    is_main: bool = True


def spaces(salt: str, adapter: str) -> tuple[Space, ...]:
    """Return spaces in which both sides name the same fields, and spaces with fields that must not meet."""
    both = {"salt": salt, "adapter": adapter}
    main = [
        Space("no salt", "no salt"),
        _same("a salt", {"salt": salt}),
        _same("an adapter", {"adapter": adapter}),
        _same("a salt and an adapter", both),
    ]
    pairs: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [
        ("a salt of B's alone", {}, {"salt": salt}),
        ("a salt of A's alone", {"salt": salt}, {}),
        ("an adapter of B's alone", {}, {"adapter": adapter}),
        ("an adapter of A's alone", {"adapter": adapter}, {}),
        ("B's salt as A's adapter", {"adapter": salt}, {"salt": salt}),
        ("B's adapter as A's salt", {"salt": adapter}, {"adapter": adapter}),
        ("salts that differ in case", {"salt": salt.upper()}, {"salt": salt}),
        (
            "fields whose joined text is the same",
            {"salt": salt, "adapter": f"x{adapter}"},
            {"salt": f"{salt}x", "adapter": adapter},
        ),
    ]
    different = [
        Space(name, "two namespaces", Extra(a), Extra(b), tuple(sorted({*a, *b})), is_main=False)
        for name, a, b in pairs
    ]
    return (*main, *different)


def _same(name: str, fields: Mapping[str, str]) -> Space:
    return Space(name, name, Extra(fields), Extra(fields), tuple(fields))


@dataclass(frozen=True, slots=True)
class Way:
    """One combination. The report describes it by its parts."""

    space: Space
    form: str
    writer: Surface
    reader: Surface
    uses: int = 1
    words: int = 0

    @property
    def parts(self) -> dict[str, str]:
        """Its parts as text."""
        return {
            "space": self.space.name,
            "form": FORMS[self.form],
            "writer": f"B wrote by {self.writer.name}",
            "reader": f"A read by {self.reader.name}",
            "uses": f"B wrote {self.uses} times" if self.uses > 1 else "B wrote once",
            "length": "a long prompt" if self.words else "a short prompt",
        }

    def __str__(self) -> str:
        return "; ".join(self.parts.values())


@dataclass(slots=True)
class Probe:
    """A's replies in one way. ``fresh`` is None if no fresh prompt was read."""

    way: Way
    fresh: Reply | None
    theirs: Reply
    own: Reply

    def found(self, which: Reply | None) -> int | None:
        """Return the cached tokens that the reader finds in a reply; None if there is no reply, or no number in it."""
        return None if which is None else self.way.reader.found(which)

    @property
    def is_known(self) -> bool:
        """Whether a fresh prompt was mostly cached. The reader then can't tell prompts apart."""
        fresh = self.found(self.fresh)
        return bool(fresh) and 2 * (fresh or 0) >= (self.found(self.own) or 0)

    @property
    def is_partial(self) -> bool:
        """Whether A found less than half of B's prompt, compared with the same prompt after A computed it."""
        return 2 * (self.found(self.theirs) or 0) < (self.found(self.own) or 0)


@dataclass(slots=True)
class Judged:
    """The probes of one audit, grouped by result."""

    leaking: list[Probe] = field(default_factory=list)
    blind: list[Probe] = field(default_factory=list)
    sound: list[Probe] = field(default_factory=list)

    def leaks_in(self, probes: Sequence[Probe]) -> bool:
        """Whether one of these probes leaks."""
        return any(each is probe for each in self.leaking for probe in probes)


class Crossing:
    """Tries the ways on a server. Call ``run`` once. ``light``: try fewer pairs of writers and readers."""

    def __init__(
        self,
        a: Target,
        b: Target,
        prompts: Prompts,
        spaces_of: Callable[[], Sequence[Space]],
        *,
        light: bool,
        seed: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._a, self._b, self._prompts, self._spaces_of = a, b, prompts, spaces_of
        self._spaces: list[Space] = []
        self._light, self._progress, self._random = light, progress, random.Random(seed)
        self.refused: dict[str, str] = {}
        """What the server refuses → its answer."""
        self._broken_off: dict[str, str] = {}
        self._long: list[int] = []
        self._readers: set[tuple[str, str]] = set()
        """Pairs of surface and form that the server accepts."""
        self._writers: set[tuple[str, str]] = set()

    def run(self) -> list[Check]:
        """Try the ways. Returns one check for each group of spaces, and one for each thing that could not be tried."""
        self._spaces = list(self._spaces_of())
        absent = self._try_surfaces()
        if not self._readers:
            return [not_checked(3, EVERY_WAY, "the server accepts none of the prompts"), *absent]
        absent += self._try_spaces() + self._try_lengths()
        ways = self._ways()
        probes, cut = self._try(ways)
        judged = self._confirmed(judge(probes), probes)
        silent = silent_parts(judged)
        return [*self._groups(judged, silent), *self._silent(silent), *absent, *self._broken(), *cut]

    def _try(self, ways: Sequence[Way]) -> tuple[list[Probe], list[Check]]:
        """Return the probes of all ways; if something ended it early, also a check that says so."""
        probes: list[Probe] = []
        failed = done = 0
        why = f"{GIVE_UP_AFTER} ways in a row were aborted"
        try:
            with self._a.limit.part(WAYS_SHARE):
                while done < len(ways) and failed < GIVE_UP_AFTER:
                    found = self._probed(ways[done])
                    probes += found
                    done += 1
                    failed = 0 if found else failed + 1
                    self._progress(done, len(ways))
        except Stopped as stopped:
            why = str(stopped)
        if done == len(ways):
            return probes, []
        return probes, [not_checked(3, EVERY_WAY, f"{done} of {len(ways)} ways were tried: {why}")]

    # what the server accepts

    def _try_surfaces(self) -> list[Check]:
        for surfaces, taken in ((READERS, self._readers), (WRITERS, self._writers)):
            for surface in surfaces:
                taken |= {(surface.name, form) for form in surface.forms if self._takes(surface, form)}
        names, forms = ({each[at] for each in self._readers} for at in (0, 1))
        missing = [each.name for each in READERS if each.is_common and each.name not in names]
        missing += [text for form, text in FORMS.items() if form not in forms]
        return [not_checked(3, f"{NAME}, {what}", self._reason(what)) for what in missing]

    def _reason(self, what: str) -> str:
        reasons = [why for refused, why in self.refused.items() if what in refused.split("; ")]
        return f"the server refuses it, {reasons[0]}" if reasons else "the server refuses it"

    def _takes(self, surface: Surface, form: str) -> bool:
        name = f"{surface.name}; {FORMS[form]}"
        try:
            with self._a.limit.part(TRIAL_SHARE, TRIAL_S):
                reply = (surface.trial or surface.ask)(self._a, self._prompts.fresh(form), PLAIN)
            if surface.undo is not None:
                with self._a.cleaning():
                    surface.undo(self._a, reply)
        except (TargetError, Stopped) as error:
            self._a.limit.check()
            self.refused[name] = str(error)
            return False
        if not reply.is_ok:
            self.refused[name] = reply.reason
        return reply.is_ok

    def _try_lengths(self) -> list[Check]:
        """Find the long prompts that the server accepts."""
        self._long = [words for words in (LONG_WORDS, LONGEST_WORDS) if words <= self._fitting(words)]
        if not self._long and (fitting := self._fitting(LONG_WORDS)) > 2 * self._prompts.words:
            self._long = [fitting]
        if self._long:
            return []
        return [
            not_checked(3, f"{NAME}, a long prompt", f"the server accepts no prompt of {LONG_WORDS} words")
        ]

    def _fitting(self, words: int) -> int:
        """Return the first of ``words``, half of it, a quarter of it and so on that the server accepts; 0 if none."""
        if self._light and words > LONG_WORDS:
            return 0
        while words > self._prompts.words:
            try:
                if completion(self._a, self._prompts.fresh(self._plain_form(), words), PLAIN).is_ok:
                    return words
            except TargetError as error:
                self.refused[f"{words} words"] = str(error)
            words //= 2
        return 0

    def _try_spaces(self) -> list[Check]:
        absent: dict[str, str] = {}
        kept = []
        for space in self._spaces:
            reason = self._refuses(space)
            if reason is None:
                kept.append(space)
            else:
                absent.setdefault(space.group, reason)
        self._spaces, self._spaces_by_name = kept, {space.name: space for space in kept}
        return [not_checked(3, f"{NAME}, {group}", reason) for group, reason in absent.items()]

    def _refuses(self, space: Space) -> str | None:
        for target, extra in ((self._a, space.a), (self._b, space.b)):
            if not extra.fields:
                continue
            try:
                reply = completion(target, self._prompts.fresh(self._plain_form()), extra)
            except TargetError as error:
                return str(error)
            if not reply.is_ok:
                return f"the server refuses it, {reply.reason}"
        return None

    def _plain_form(self) -> str:
        return "text" if ("a completion", "text") in self._readers else "messages"

    # ways

    def _ways(self) -> list[Way]:
        """Return enough ways to cover every wanted combination.

        Of several random candidates, it takes the one that covers most.
        """
        wanted = self._wanted()
        found: list[Way] = []
        for seed in sorted(wanted, key=sorted):
            if seed in wanted:
                drawn = [way for _ in range(TRIES) if (way := self._drawn(dict(seed))) is not None]
                if drawn:
                    found.append(max(drawn, key=lambda way: len(wanted & _met(way))))
                    wanted -= _met(found[-1])
        longest = [self._drawn({"space": space.name}) for space in self._spaces if space.is_main]
        return found + [replace(way, words=self._long[-1]) for way in longest if way and len(self._long) > 1]

    def _wanted(self) -> set[frozenset[tuple[str, str]]]:
        main = [space.name for space in self._spaces if space.is_main]
        others = [space.name for space in self._spaces if not space.is_main]
        readers = sorted({name for name, _ in self._readers})
        common = sorted({each.name for each in READERS if each.is_common} & set(readers))
        writers = sorted({name for name, _ in self._writers})
        forms = sorted({form for _, form in self._readers & self._writers} or {self._plain_form()})
        pairs: list[tuple[str, Iterable[str], str, Iterable[str]]] = [
            ("space", main, "reader", common if self._light else readers),
            ("space", main, "writer", writers[:0] if self._light else writers),
            ("space", main, "form", forms),
            ("space", others, "form", forms[:1] if self._light else forms),
            ("form", forms, "reader", readers),
            ("form", forms, "writer", writers),
            ("uses", [str(USES)], "space", main),
            ("uses", [str(USES)], "form", forms),
            ("long", ["yes"] if self._long else [], "space", main),
            ("long", ["yes"] if self._long else [], "form", forms),
        ]
        if not self._light:
            pairs.append(("writer", writers, "reader", readers))
        wanted = {
            frozenset({(one, this), (other, that)})
            for one, these, other, those in pairs
            for this in these
            for that in those
        }
        if not self._light:
            wanted |= {
                frozenset({("space", space), ("form", form), ("reader", reader)})
                for space in main
                for form in forms
                for reader in readers
            }
        return wanted

    def _drawn(self, fixed: dict[str, str]) -> Way | None:
        """Return a way with these parts, the others drawn at random; None if there is none."""
        draw = self._random
        forms = [form for form in FORMS if fixed.get("form", form) == form]
        draw.shuffle(forms)
        for form in forms:
            readers = _surfaces(READERS, self._readers, form, fixed.get("reader"))
            writers = _surfaces(WRITERS, self._writers, form, fixed.get("writer"))
            pairs = [(w, r) for w in writers for r in readers if w is not ROUTED or r.name == ROUTED.name]
            if pairs:
                writer, reader = draw.choice(pairs)
                space = self._spaces_by_name[fixed.get("space", "no salt")]
                words = self._long[0] if "long" in fixed else 0
                return Way(space, form, writer, reader, int(fixed.get("uses", 1)), words)
        return None

    # probes

    def _probed(self, way: Way) -> list[Probe]:
        """Return one probe, repeated once if its control failed. Empty if a request failed."""
        found: list[Probe] = []
        for _ in range(2):
            try:
                probe = self._probe(way)
            except TargetError as error:
                self._broken_off[str(way)] = str(error)
                break
            found = [probe]
            own, fresh = probe.found(probe.own), probe.found(probe.fresh)
            if own is None or own > (fresh or 0):
                break
        return found

    def _probe(self, way: Way) -> Probe:
        words = way.words or None
        reader, space = way.reader, way.space
        fresh = None if words else self._read(reader, self._prompts.fresh(way.form), space.a)
        prompt = self._prompts.fresh(way.form, words)
        written = [way.writer.ask(self._b, prompt, space.b) for _ in range(way.uses)]
        try:
            theirs = self._read(reader, prompt, space.a)
            self._own(way, prompt)
            own = self._read(reader, prompt, space.a)
        finally:
            if way.writer.undo is not None:
                with self._b.cleaning():
                    way.writer.undo(self._b, written[-1])
        return Probe(way, fresh, theirs, own)

    def _read(self, reader: Surface, prompt: Prompt, extra: Extra) -> Reply:
        reply = answered(reader.ask(self._a, prompt, extra))
        if reader.undo is not None:
            with self._a.cleaning():
                reader.undo(self._a, reply)
        return reply

    def _own(self, way: Way, prompt: Prompt) -> None:
        """Let A compute the prompt itself, if reading it didn't."""
        if way.reader.computes:
            return
        if way.writer is ROUTED:
            ROUTED.ask(self._a, prompt, way.space.a)
            return
        computing = (each for each in WRITERS if each.computes and (each.name, prompt.form) in self._writers)
        next(computing).ask(self._a, prompt, way.space.a)

    def _confirmed(self, judged: Judged, probes: Sequence[Probe]) -> Judged:
        """Drop leaks of a small part of a prompt that don't recur: two prompts may begin alike by chance."""
        for probe in list(judged.leaking):
            if probe.is_partial:
                try:
                    more = [again for _ in range(CONFIRMATIONS) for again in self._probed(probe.way)]
                except Stopped:
                    more = []
                if not judge([*probes, *more]).leaks_in(more):
                    judged.leaking.remove(probe)
                    judged.sound += [probe] if more else []
        return judged

    # the report

    def _groups(self, judged: Judged, silent: Mapping[tuple[str, str], str]) -> list[Check]:
        found: list[Check] = []
        for group in dict.fromkeys(space.group for space in self._spaces):
            found += alone(
                3,
                f"{NAME}, {group}",
                lambda _, group=group: self._group(group, judged, silent),  # type: ignore[misc]
            )
        return found

    def _group(self, group: str, judged: Judged, silent: Mapping[tuple[str, str], str]) -> Check:
        def of(probes: list[Probe]) -> list[Probe]:
            return [each for each in probes if each.way.space.group == group]

        leaking, sound = of(judged.leaking), of(judged.sound)
        blind = [each for each in of(judged.blind) if not set(each.way.parts.items()) & set(silent)]
        name = f"{NAME}, {group}"
        num_probes = len(leaking) + len(blind) + len(sound)
        figures: dict[str, Any] = {
            "probes": num_probes,
            "leaks": len(leaking),
            "blind": len(blind),
            "leaking": [str(each.way) for each in leaking[:20]],
            "control failed": [str(each.way) for each in blind[:20]],
        }
        if leaking:
            where = "; ".join(common_parts([each.way for each in leaking]))
            detail = (
                f"{len(leaking)} of {num_probes} prompts of B were found by A; common to all of them: {where}"
            )
            return Check(3, name, Verdict.LEAKS, detail, figures)
        if blind:
            return Check(3, name, Verdict.BLIND, f"A doesn't find its own prompt: {blind[0].way}", figures)
        if not sound:
            return not_checked(3, name, "A never finds its own prompts there")
        ignored = self._ignored(group)
        if ignored:
            return not_checked(
                3, name, f"the server accepts the field {ignored} but doesn't separate caches by it"
            )
        return Check(
            3,
            name,
            Verdict.ISOLATED,
            f"A found none of {num_probes} prompts of B, but found its own",
            figures,
        )

    def _ignored(self, group: str) -> str | None:
        """Return a field of this group that the server ignores: with it, A finds what it wrote without it."""
        form = self._plain_form()
        fields = {
            name: value
            for space in self._spaces
            if space.group == group
            for name, value in {**space.a.fields, **space.b.fields}.items()
            if name in space.fields
        }
        reader = next(each for each in READERS if (each.name, form) in self._readers)
        for name, value in fields.items():
            prompt = self._prompts.fresh(form)
            first = self._read(reader, prompt, PLAIN)
            other = self._read(reader, prompt, Extra({name: value}))
            if (reader.found(other) or 0) > (reader.found(first) or 0):
                return name
        return None

    def _broken(self) -> list[Check]:
        if not self._broken_off:
            return []
        way, why = next(iter(self._broken_off.items()))
        detail = f"{len(self._broken_off)} probes were aborted; the first: {way}: {why}"
        return [not_checked(3, f"{NAME}, aborted probes", detail)]

    def _silent(self, silent: Mapping[tuple[str, str], str]) -> list[Check]:
        return [
            not_checked(3, f"{NAME}, {what}", "A's own prompts aren't reported as cached there")
            for what in silent.values()
        ]


def _surfaces(
    known: Sequence[Surface], taken: set[tuple[str, str]], form: str, name: str | None
) -> list[Surface]:
    return [each for each in known if (each.name, form) in taken and name in (None, each.name)]


def _met(way: Way) -> set[frozenset[tuple[str, str]]]:
    """Return the combinations of two and three parts that a way covers."""
    parts = [
        ("space", way.space.name),
        ("form", way.form),
        ("writer", way.writer.name),
        ("reader", way.reader.name),
        ("uses", str(way.uses)),
    ] + ([("long", "yes")] if way.words else [])
    return {frozenset(some) for size in (2, 3) for some in combinations(parts, size)}


def common_parts(ways: Sequence[Way]) -> list[str]:
    """Return the parts that all of these ways share, as text."""
    first = ways[0].parts
    shared = [text for part, text in first.items() if all(way.parts[part] == text for way in ways)]
    return shared or ["nothing in common"]


# judging probes


def judge(probes: Sequence[Probe]) -> Judged:
    """Sort probes into leaking ones, blind ones (they showed nothing) and sound ones."""
    judged = Judged()
    groups: dict[tuple[str, str], list[Probe]] = {}
    for probe in probes:
        groups.setdefault((probe.way.reader.name, probe.way.form), []).append(probe)
    by_reader: dict[str, list[Probe]] = {}
    for probe in probes:
        by_reader.setdefault(probe.way.reader.name, []).append(probe)
    signals = {name: Signals(some) for name, some in by_reader.items()}
    for (reader, _), group in groups.items():
        bound = bound_of(group)
        is_new = not any(probe.is_known for probe in group)
        for probe in group:
            theirs = probe.found(probe.theirs)
            if (is_new and theirs is not None and theirs > bound) or signals[reader].shows(probe.theirs):
                judged.leaking.append(probe)
            elif (is_new and _sees(probe, bound)) or signals[reader].shows(probe.own):
                judged.sound.append(probe)
            else:
                judged.blind.append(probe)
    return judged


def bound_of(group: Sequence[Probe]) -> int:
    """Return the most cached tokens that a fresh prompt of this group may report."""
    fresh = [found for probe in group if (found := probe.found(probe.fresh)) is not None] or [0]
    return unknown_at_most(fresh, min(probe.own.prompt_tokens for probe in group))


def _sees(probe: Probe, bound: int) -> bool:
    own = probe.found(probe.own)
    return own is not None and own > bound and SHARE_OF_OWN * own >= probe.own.prompt_tokens


class Signals:
    """Headers and fields that distinguish a hit from a miss, other than the count of cached tokens.

    A signal has the same value in all fresh replies, and another value in each reply to A's own prompts. A number
    is a signal only if it is 0 in fresh replies, because prompt sizes vary. Fewer than three fresh replies give no
    signal.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        fresh = [features(probe.fresh) for probe in probes if probe.fresh is not None and probe.fresh.is_ok]
        own = [features(probe.own) for probe in probes if probe.own.is_ok]
        names = {name for each in [*fresh, *own] for name in each}
        self._usual: dict[str, Any] = {}
        if len(fresh) < 3 or not own:
            return
        for name in names:
            values = [each.get(name) for each in fresh]
            usual = values[0]
            numbers = any(isinstance(each.get(name), float) for each in own)
            if any(value != usual for value in values) or (numbers and usual):
                continue
            if all(each.get(name) != usual for each in own):
                self._usual[name] = usual

    def shows(self, reply: Reply) -> bool:
        """Whether a reply contains a signal of a hit."""
        if not reply.is_ok:
            return False
        found = features(reply)
        return any((found.get(name) or None) != (usual or None) for name, usual in self._usual.items())


def features(reply: Reply) -> dict[str, Any]:
    """Return the headers and fields of a reply, without those that always differ between replies.

    Numbers are floats. Other values are text with its numbers removed, because they depend on the prompt.
    """
    found: dict[str, Any] = {}
    for document in reply.documents:
        _flatten("", {name: each for name, each in document.items() if each is not None}, found)
    for name, text in reply.headers.items():
        if name.lower() not in _NOT_SIGNALS:
            _flatten(f"header {name.lower()}", _number(text), found)
    return found


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _flatten(name: str, value: Any, found: dict[str, Any], depth: int = 0) -> None:
    if isinstance(value, Mapping) and depth < 8:
        for key, each in value.items():
            if key not in _NOT_SIGNALS:
                _flatten(f"{name}.{key}", each, found, depth + 1)
    elif isinstance(value, bool) or value is None:
        found[name] = str(value)
    elif isinstance(value, int | float):
        found[name] = float(value) if abs(value) < 1e300 else str(value)
    elif isinstance(value, str):
        found[name] = _DIGITS.sub("#", value)


def silent_parts(judged: Judged) -> dict[tuple[str, str], str]:
    """Readers and forms of which no probe showed A its own prompt: part of a way → its name in the report."""
    silent: dict[tuple[str, str], str] = {}
    for kind in ("reader", "form"):
        seen = {each.way.parts[kind] for each in [*judged.leaking, *judged.sound]}
        for probe in judged.blind:
            text = probe.way.parts[kind]
            if text not in seen:
                silent[kind, text] = probe.way.reader.name if kind == "reader" else text
    return silent
