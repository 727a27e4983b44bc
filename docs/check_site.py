"""Open the built site in Chromium and check what a reader sees.

``nox -s browser`` builds the site and runs this program, which needs Debian's package `chromium`.
On every page, at the width of a telephone and of a desktop, there is no error on the console, no
failed request and no horizontal overflow. The search finds the pages that readers look for. Every
copy button of a Python block gives code that runs, without prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as BrowserTimeoutError

WIDTHS = {"phone": 390, "desktop": 1280}
#: Words that a reader searches -> a page among the first three results.
SEARCHES = {
    "install": "install/",
    "cumsum": "reference/standard/statistical/",
    "padding": "guides/masks/",
    "tutorial": "tutorial/",
}
#: Pages for a look at the pictures.
PICTURES = ("", "tutorial/", "reference/softmax/", "bench/", "guides/masks/")
#: Pages whose code needs a package that `nox -s tensorflow` has.
SKIPPED = ("reference/bridges/from_tensorflow/", "reference/bridges/to_tensorflow/")
COPY = "button.md-clipboard, button.md-code__button[data-md-type='copy']"


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serve(site: Path) -> Iterator[str]:
    """Serve a folder; yield its address."""
    handler = functools.partial(QuietHandler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def page_addresses(site: Path) -> list[str]:
    """Return the addresses of all pages, relative to the site."""
    tree = ET.parse(site / "sitemap.xml")
    found = [element.text or "" for element in tree.iter() if element.tag.endswith("loc")]
    root = min(found, key=len)
    return sorted(address.removeprefix(root) for address in found)


def progress(text: str) -> None:
    """Show one line, which the next one replaces."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def check_pages(page: Page, base: str, addresses: list[str]) -> list[str]:
    """Return the errors of loading and showing every page."""
    errors: list[str] = []
    page.on("console", lambda m: errors.append(f"{page.url}: {m.text}") if m.type == "error" else 0)
    page.on("pageerror", lambda e: errors.append(f"{page.url}: {e}"))
    # A request of the page before, which the next page aborts, has not failed.
    page.on(
        "requestfailed",
        lambda r: (
            None if "ERR_ABORTED" in (r.failure or "") else errors.append(f"failed request {r.url}")
        ),
    )
    page.on(
        "response",
        lambda r: errors.append(f"{page.url}: {r.status} {r.url}") if r.status >= 400 else 0,
    )
    for i, address in enumerate(addresses):
        for name, width in WIDTHS.items():
            progress(f"page {i + 1} of {len(addresses)}: /{address} ({name})")
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(base + address, wait_until="load")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                errors.append(f"/{address}: {wide} pixels wide on a screen of {width}")
    return errors


def check_search(page: Page, base: str) -> list[str]:
    """Return the words whose page is not among the first three results."""
    errors = []
    page.set_viewport_size({"width": WIDTHS["desktop"], "height": 900})
    for word, expected in SEARCHES.items():
        page.goto(base, wait_until="load")
        page.locator("[data-md-component=search-query]").first.click()
        page.locator("[data-md-component=search-query]").first.type(word)
        results = page.locator(".md-search-result__item > a")
        # Without a result in time, the check below reports the word.
        with contextlib.suppress(BrowserTimeoutError):
            results.first.wait_for(timeout=10_000)
        links = [urlsplit(a.get_attribute("href") or "").path for a in results.all()[:3]]
        if not any(expected in link for link in links):
            errors.append(
                f"search for {word!r}: expected {expected} in the first three, got {links}"
            )
    return errors


def copied_blocks(page: Page) -> list[str]:
    """Return what the copy buttons of the Python blocks of the current page put on the clipboard."""
    blocks = []
    for block in page.locator("div.highlight.language-python, div.highlight.language-pycon").all():
        button = block.locator(COPY)
        if not button.count() or not block.is_visible():
            continue
        page.evaluate("navigator.clipboard.writeText('')")
        button.first.click(force=True)
        page.wait_for_function("navigator.clipboard.readText().then(text => text !== '')")
        blocks.append(page.evaluate("navigator.clipboard.readText()"))
    return blocks


def check_copies(page: Page, base: str, addresses: list[str]) -> list[str]:
    """Return the blocks that keep prompts or do not run, page by page."""
    errors = []
    page.set_viewport_size({"width": WIDTHS["desktop"], "height": 900})
    for i, address in enumerate(addresses):
        if address in SKIPPED:
            continue
        progress(f"code of page {i + 1} of {len(addresses)}: /{address}")
        page.goto(base + address, wait_until="load")
        # A block that starts with a docstring shows a module of the package.
        blocks = [block for block in copied_blocks(page) if not block.startswith('"""')]
        if any(re.search(r"^(>>>|\.\.\.) ", block, re.MULTILINE) for block in blocks):
            errors.append(f"/{address}: a copied block has prompts")
        code = "\n\n".join(block for block in blocks if "# needs CUDA" not in block)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            errors.append(f"/{address}: the copied code fails: {done.stderr.strip()[-300:]}")
    return errors


def take_pictures(browser: Browser, base: str, folder: Path) -> None:
    """Write one picture per page, width and colour scheme."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        page = browser.new_context(color_scheme=scheme).new_page()
        for address in PICTURES:
            for name, width in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": 900})
                page.goto(base + address, wait_until="load")
                label = address.strip("/").replace("/", "-") or "home"
                page.screenshot(path=folder / f"{label}-{name}-{scheme}.png")


def main() -> None:
    """Run all checks; the exit status is 1 if one finds an error."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("site", nargs="?", type=Path, default=Path("site"))
    parser.add_argument("--pictures", type=Path, help="folder for pictures of some pages")
    parser.add_argument("--only", help="check the pages whose address contains this")
    options = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("chromium: not found; install Debian's package chromium")
    with sync_playwright() as playwright, serve(options.site) as base:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        if options.pictures:
            take_pictures(browser, base, options.pictures)
        addresses = [a for a in page_addresses(options.site) if (options.only or "") in a]
        errors = check_pages(page, base, addresses)
        errors += check_search(page, base)
        errors += check_copies(page, base, addresses)
        browser.close()
    progress("")
    print("\n".join(dict.fromkeys(errors)))
    print(f"{len(addresses)} pages, {len(errors)} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
