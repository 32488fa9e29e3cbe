"""The page can be read by everybody: contrast, names of tables and sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[2] / "synchronizer_server/http/assets"


def colors(scheme: str) -> dict[str, tuple[float, ...]]:
    """The colours of a scheme, red, green and blue from 0 to 1."""
    css = (ASSETS / "page.css").read_text()
    blocks = re.findall(r"(?s):root \{(.*?)\}", css)
    found = {}
    for block in blocks[: 1 if scheme == "light" else 2]:
        for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6});", block):
            found[name] = tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """By the rules of WCAG 2."""
    light = []
    for color in (one, other):
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_schemes_and_while_nothing_comes(scheme: str) -> None:
    css = (ASSETS / "page.css").read_text()
    (opacity,) = map(float, re.findall(r"\.stale .*opacity: ([\d.]+)", css))
    known = colors(scheme)
    pairs = [
        (text, back)
        for text in ("text", "soft", "accent", "good", "warning", "bad")
        for back in ("page", "card", "raised")
    ] + [("good", "good-back"), ("bad", "bad-back")]
    for text, back in pairs:
        assert contrast(known[text], known[back]) >= 4.5, (text, back)
    for text in ("text", "soft"):
        faded = [
            tuple(
                opacity * x + (1 - opacity) * y
                for x, y in zip(known[c], known["page"], strict=True)
            )
            for c in (text, "card")
        ]
        assert contrast(*faded) >= 4.5, f"{text}, faded"


def test_every_table_and_section_says_what_it_is() -> None:
    page = (ASSETS / "index.html").read_text()
    ids = re.findall(r'\bid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    for tag in ("section", "table", "ol", "svg"):
        for attributes in re.findall(rf"<{tag}\b([^>]*)>", page):
            if tag == "ol" and "tabindex" not in attributes:
                continue
            (label,) = re.findall(r'aria-labelledby="([^"]+)"', attributes)
            assert set(label.split()) <= set(ids), attributes
    scripts = ASSETS.glob("*.js")
    asked = {x for path in scripts for x in re.findall(r'byId\("([\w-]+)"\)', path.read_text())}
    assert asked <= set(ids), "the page has what its scripts fill"
