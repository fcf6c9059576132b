"""The report's page as text: it is complete and refers to nothing outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from radixkv.audit.page import page
from radixkv.audit.verdict import AuditReport, Check, Verdict, not_checked
from tests.audit.reports import leaking, sound, without_timing


class Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps tags and attributes."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    return tags


def test_the_page_is_complete_and_self_contained() -> None:
    for report in (sound(), leaking(), without_timing()):
        text = page(report)
        tags = parsed(text)
        assert not {tag for tag, _ in tags.seen} & {"script", "link", "img", "iframe"}
        assert not [
            value
            for _, attributes in tags.seen
            for name, value in attributes.items()
            if name in ("src", "href")
        ]
        assert "url(" not in text and "http" not in re.sub(r"http-equiv|http://127\.0\.0\.1:8400", "", text)
        for check in report.checks:
            assert check.name in text


def test_the_page_draws_every_arm_and_shows_every_figure() -> None:
    report = sound()
    text = page(report)
    arms = [attributes.get("data-arm") for tag, attributes in parsed(text).seen if tag == "polyline"]
    assert sorted(map(str, arms)) == sorted(["hit", "own_miss", "cross", "miss"] * 2)
    auc = report.check(10).figures["auc"]
    figures = [f"{auc[name]:.4f}" for name in ("estimate", "low", "high")]
    for said in ("isolated", *figures, "p_value", "300", "400", "0.5 ± 0.02", "stopping_rule"):
        assert said in text, said


def test_drawings_include_outliers() -> None:
    """Outliers are in the last bar: the shares of a histogram sum to one."""
    text = page(sound())
    (points,) = re.findall(r'data-arm="cross"\s+points="([^"]+)" fill="var', text)
    ys = [300 - float(point.split(",")[1]) for point in points.split()]
    top = float(re.findall(r"share, up to ([\d.e-]+)", text)[1])
    assert abs(sum(ys[1:-1:2]) / 300 * top - 1) < 0.05


def test_foreign_text_is_escaped() -> None:
    nasty = '<script>alert(1)</script> & "quotes" \''
    report = AuditReport(
        nasty, nasty, {nasty: nasty}, (Check(1, nasty, Verdict.LEAKS, nasty, {nasty: nasty}),)
    )
    text = page(report)
    assert "<script" not in text and "&lt;script&gt;" in text
    parsed(text)


def test_each_verdict_is_explained() -> None:
    for verdict in set(Verdict) - {Verdict.NOT_CHECKED}:
        text = page(AuditReport("x", "0", {}, (Check(1, "check", verdict, "why"),)))
        assert text.count(f">{verdict}</span>") == 2


def test_omitted_checks_are_counted_beside_the_verdict_and_listed_once_after_the_evidence() -> None:
    done = Check(3, "probe", Verdict.ISOLATED, "none of 20")
    left_out = not_checked(9, "timing <control>", "left out (--no-timing)")
    text = page(AuditReport("x", "0", {}, (left_out, done)))
    header = text[text.index("<header>") : text.index("</header>")]
    assert "isolated in what was checked" in header and "All checks below" not in text
    assert "not done: 1" in header and "left out" not in header
    assert text.count("<li>9 timing &lt;control&gt;: left out (--no-timing)</li>") == 1
    assert text.count("left out (--no-timing)") == 1 and text.index("none of 20") < text.index("left out")
    parsed(text)
    assert "Not checked" not in page(AuditReport("x", "0", {}, (done,)))


def test_the_page_begins_with_what_leaks_and_says_how_much_was_tried() -> None:
    checks = tuple(
        Check(number, f"check {number}", verdict, f"detail {number}")
        for number, verdict in [
            (9, Verdict.NOT_CHECKED), (1, Verdict.ISOLATED), (12, None), (8, Verdict.NOT_APPLICABLE),
            (2, Verdict.LEAKS), (3, Verdict.BLIND), (4, Verdict.INCONCLUSIVE), (5, Verdict.LEAKS),
        ]
    )  # fmt: skip
    text = page(AuditReport("x", "0", {}, checks, tried="3 calls. That is little"))
    at = [text.index(f"detail {number}") for number in (2, 5, 3, 4, 1, 12, 8, 9)]
    assert at == sorted(at)
    assert "That is little" in text[text.index("<header>") : text.index("</header>")]
