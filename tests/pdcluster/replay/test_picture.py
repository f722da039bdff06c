"""The picture of a run: well-formed, a mark for each request, and of a size that stays bounded."""

from xml.etree import ElementTree as ET

from pdcluster.replay.driver import Record
from pdcluster.replay.figures import Targets
from pdcluster.replay.picture import draw

SVG = "{http://www.w3.org/2000/svg}"


def record(due, ttft=0.2, error=""):
    first = None if error else due + ttft
    return Record(due, due, first, first and first + 0.1, due + 1, 100, 11, 11, None, None, 200, error, "")


def parsed(records, title="a run"):
    return ET.fromstring(draw(records, Targets(), title))


def colours(root, tag):
    return [item.get("fill") for item in root.iter(f"{SVG}{tag}") if item.get("r") == "2"]


def test_each_request_has_a_dot_coloured_by_its_targets_and_failures_a_cross():
    root = parsed([record(0), record(1), record(2, ttft=3), record(3, error="timeout")])
    dots = colours(root, "circle")
    assert (len(dots), dots.count("#0072b2"), dots.count("#e69f00")) == (6, 4, 2)
    assert len([item for item in root.iter(f"{SVG}path") if item.get("stroke") == "#d62728"]) == 2


def test_words_of_others_cannot_break_it():
    root = parsed([record(0)], 'trace "<b>" & co')
    assert 'trace "<b>" & co' in [item.text for item in root.iter(f"{SVG}text")]


def test_everything_lies_within_the_picture():
    root = parsed([record(at / 10, ttft=10.0 ** (at % 7 - 4)) for at in range(100)])
    width, height = map(float, root.get("viewBox").split()[2:])
    for item in root.iter(f"{SVG}circle"):
        assert 0 <= float(item.get("cx")) <= width
        assert 0 <= float(item.get("cy")) <= height


def test_a_large_run_has_bounded_dots_and_says_so():
    text = draw([record(at / 1000) for at in range(30_000)], Targets(), "large")
    assert text.count('r="2"') <= 12_000
    assert "dots for one request in 5" in text
    assert len(text) < 2_000_000


def test_runs_of_nothing_and_of_failures_alone_are_drawn_too():
    assert parsed([]) is not None
    assert colours(parsed([record(0, error="no connection")]), "circle") == []
