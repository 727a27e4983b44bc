"""Build the benchmark pages and their pictures from `docs/results` when mkdocs runs.

A picture is drawn once: the folder `.cache` keeps the pictures of a result until its JSON, the
drawing code or matplotlib change. Pictures are put into the finished HTML, so that neither Markdown
nor the search index has to read them.
"""

import hashlib
import html
import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from scree_bench import pages, plots, shard_pages
from scree_bench.results import Result, Table

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
CACHE = DOCS.parent / ".cache" / "pictures"
STYLESHEET = "stylesheets/charts.css"
RULES = """
[data-md-color-scheme]{--chart-text:var(--md-default-fg-color);
  --chart-scree:var(--md-accent-fg-color);--chart-grid:var(--md-default-fg-color--lightest)}
.chart{margin:1em 0;max-width:30rem;text-align:left}
.chart figcaption{margin:0 0 .4em;max-width:none;font-style:normal;text-align:left}
.chart svg{display:block;width:100%;height:auto;max-width:24rem;font-family:inherit}
.bench table:not([class]) th,.bench table:not([class]) td{
  padding:.35em .7em;min-width:0;white-space:nowrap}
.bench table:not([class]) td:nth-child(2):last-child{min-width:11rem;white-space:normal}
.bench details{margin:.6em 0}
.bench code{word-break:break-word}
"""
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
PLACEHOLDER = re.compile(r'<div class="chart" data-picture="([^"]+)"></div>')


@cache
def runs() -> list[Result]:
    """Return all committed runs."""
    read, messages = pages.read(sorted(RESULTS.glob("*-*.json")))
    if messages:
        raise ValueError("; ".join(messages))
    return read


@cache
def guide_tables() -> dict[str, Table]:
    """Return the tables that guides name."""
    return shard_pages.guide_tables(runs())


@cache
def code() -> bytes:
    """Return a digest of everything besides the numbers that decides how pictures look."""
    digest = hashlib.sha256(metadata.version("matplotlib").encode())
    for path in sorted(Path(plots.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


#: Name of a picture -> its drawing function. Filled while pages are written.
DRAWN: dict[str, plots.Draw] = {}


def placeholder(name: str, draw: plots.Draw) -> str:
    """Remember how to draw a picture, and return the element that `on_post_page` fills."""
    DRAWN[name] = draw
    return f'<div class="chart" data-picture="{name}"></div>'


@cache
def figure(name: str) -> str:
    """Return a picture as HTML, from the cache if its results and the code have not changed."""
    digest = hashlib.sha256(code() + name.encode())
    for path in sorted(RESULTS.glob("*-*.json")):
        if name.startswith("overview") or name.endswith(path.stem.rpartition("-")[2]):
            digest.update(path.read_bytes())
    path = CACHE / f"{name}-{digest.hexdigest()[:16]}.json"
    if path.exists():
        caption, svg = json.loads(path.read_text(encoding="utf-8"))
    else:
        caption, svg = plots.render(DRAWN[name])
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{name}-{'[0-9a-f]' * 16}.json"):
            old.unlink()
        path.write_text(json.dumps([caption, svg]), encoding="utf-8")
    svg = _with_own_names(svg, name)
    return f'<figure class="chart"><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>'


def _with_own_names(svg: str, prefix: str) -> str:
    """Prefix the names that an SVG refers to, so that they are unique on a page."""
    svg = re.sub(r' id="', f' id="{prefix}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)


def on_config(config: Any) -> None:
    """Load the colors of the pictures on every page."""
    if STYLESHEET not in config.extra_css:
        config.extra_css.append(STYLESHEET)


def on_files(files: Any, config: Any) -> None:
    """Add the pages per machine and the stylesheet."""
    for tag in pages.machine_names(runs()):
        text = NOT_SEARCHED + pages.machine_page(runs(), tag, placeholder)
        files.append(File.generated(config, f"bench/{tag}.md", content=text))
    light, dark = '[data-md-color-scheme="default"]', '[data-md-color-scheme="slate"]'
    style = plots.css(light, dark) + RULES
    files.append(File.generated(config, STYLESHEET, content=style))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the overview with its pictures, and the pictures and tables that other pages name."""
    if page.file.src_uri == "bench.md":
        return pages.overview(runs(), "bench", placeholder)
    markdown = re.sub(
        r"<!-- table: ([\w-]+) -->", lambda match: guide_tables()[match[1]].markdown(), markdown
    )
    return re.sub(
        r"<!-- picture: (\S+) -->", r'<div class="chart" data-picture="\1"></div>', markdown
    )


def on_page_content(content: str, page: Any, **_: Any) -> str | None:
    """Mark the pages of benchmarks, whose tables are dense and scroll in themselves."""
    is_bench = page.file.src_uri == "bench.md" or page.file.src_uri.startswith("bench/")
    return f'<div class="bench">{content}</div>' if is_bench else None


def on_post_page(output: str, **_: Any) -> str:
    """Put the pictures into the finished page."""
    return PLACEHOLDER.sub(lambda match: figure(match[1]), output)
