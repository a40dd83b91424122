"""Build the documentation site (`make docs`), or build it and read it in a browser (`make docs-test`).

    python tools/docs.py          build/site; installs what is missing of requirements/docs.txt
    python tools/docs.py test     then every link, names of the API, pages at two widths and the search, in Chromium

Screenshots of the test are in build/screenshots.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html import unescape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parent.parent
SITE, SHOTS = ROOT / "build/site", ROOT / "build/screenshots"
NEEDED, PINNED = ROOT / "requirements/docs.txt", ROOT / "requirements/constraints.txt"
SHOWN = ("index", "rules/adamw", "plans/int8_split24", "errors", "notebook")
"""The pages of which there are screenshots; all others are opened too, at both widths."""
WIDTHS = {"phone": 360, "desktop": 1280}


def install() -> None:
    """Install what is missing of requirements/docs.txt."""
    for line in NEEDED.read_text().splitlines():
        name, _, wanted = line.partition("==")
        try:
            found = version(name) if wanted else wanted
        except PackageNotFoundError:
            found = ""
        if found != wanted:
            print("docs: the packages of requirements/docs.txt", flush=True)
            options = ["--disable-pip-version-check", "--no-input", "-q", "-c", str(PINNED), "-r", str(NEEDED)]
            subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
            return


def distances() -> None:
    """Add the distances from their oracles of the rules that docs/distances.json lacks: tests of these rules write it.

    RuntimeError if they write none.
    """
    path, rules = ROOT / "docs/distances.json", {p.stem for p in (ROOT / "specs").glob("[!_]*.py")} - {"plans"}
    known: dict[str, float] = json.loads(path.read_text())
    if missing := sorted(rules - known.keys()):
        print(f"docs: distances of {', '.join(missing)}", flush=True)
        path.write_text(json.dumps({k: v for k, v in sorted(known.items()) if k in rules}, indent=0) + "\n")
        files = [f"tests/test_{x}.py" for x in ("against_papers", "bases", "low_rank")]
        chosen = " or ".join(f"[{name}- or -{name}- or {name}_is" for name in missing)
        of = f"(spec_is_its_oracle or fp64) and ({chosen})"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *files, "-k", of]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OPTGEN_DISTANCES": str(path)}, check=True)
        if lost := rules - json.loads(path.read_text()).keys():
            raise RuntimeError(f"no test wrote the distance of {', '.join(lost)}: is there a row in tests/oracles.py?")


def build() -> None:
    """Build the site; a warning, such as of a lost link, is an error."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT, env=environment, check=True)


def lost_links() -> Iterator[str]:
    """Yield the links within the site that lead nowhere, those in raw HTML among them, and requests to other hosts."""
    pages = {path: path.read_text(encoding="utf-8") for path in SITE.rglob("*.html")}
    names = {path: set(map(unescape, re.findall(r'\b(?:id|name)="?([^"\s>]+)', text))) for path, text in pages.items()}
    for path, text in pages.items():
        text = re.sub(r"<(script|pre)\b.*?</\1>", lambda m: m[0][: m[0].index(">")], text, flags=re.S)
        for kind, link in re.findall(r'\b(href|src|srcset)="?([^"\s>]+)', text):
            link = unescape(link)
            parts = urlparse(link)
            if parts.scheme or parts.netloc:
                if kind != "href" or "stylesheet" in link:
                    yield f"{path.relative_to(SITE)}: {link} is on another host"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = names.get(target, {unquote(parts.fragment)}) | {"", "__top"}
            if path.name != "404.html" and (not target.exists() or unquote(parts.fragment) not in known):
                yield f"{path.relative_to(SITE)}: {link}"


def lost_names() -> Iterator[str]:
    """Yield the names of optgen, and the methods of its optimizers, that the page of the API lacks."""
    sys.path.insert(0, str(ROOT))
    import optgen
    from optgen.runtime.optimizer import Optimizer

    known = re.findall(r'\bid="?optgen\.[\w.]*\b(\w+)["\s>]', (SITE / "api.html").read_text(encoding="utf-8"))
    public = {*optgen.__all__, *(name for name, x in vars(Optimizer).items() if callable(x))}
    yield from (f"api: {name} is missing" for name in sorted(public - {*known}) if not name.startswith("_"))


def serve() -> http.server.ThreadingHTTPServer:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def read(address: str, chromium: str) -> Iterator[str]:
    """Yield what is wrong with the pages in a browser: errors of the console, images, widths, the search."""
    from playwright.sync_api import TimeoutError as NothingShown
    from playwright.sync_api import sync_playwright

    broken = "[...document.images].filter(x => x.complete && !x.naturalWidth && x.offsetParent).map(x => x.src)"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: said.append(str(e)))
        page.on("request", lambda r: said.append(f"asks {r.url}") if not r.url.startswith((address, "data:")) else None)
        names = [str(p.relative_to(SITE))[:-5] for p in sorted(SITE.rglob("*.html")) if p.name != "404.html"]
        for (size, width), name in ((w, n) for w in WIDTHS.items() for n in names):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(f"{address}/{name}.html", wait_until="load")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                yield f"{name}: {wide} px wide on {width} px"
            yield from (f"{name}: {text}" for text in [*said, *page.evaluate(broken)])
            said.clear()
            if name in SHOWN:
                page.screenshot(path=SHOTS / f"{name.replace('/', '-')}-{size}.png")
        page.fill("input.md-search__input", "stochastic rounding")
        try:
            page.wait_for_selector("a.md-search-result__link", state="attached", timeout=20_000)
        except NothingShown as error:
            yield f"the search finds nothing: {error}"
        browser.close()


def main() -> int:
    began = time.monotonic()
    distances()
    install()
    build()
    pages = len(list(SITE.rglob("*.html")))
    print(f"docs: build/site/index.html, {pages} pages, {time.monotonic() - began:.0f} s", flush=True)
    if sys.argv[1:] != ["test"]:
        return 0
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("docs-test needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/it", file=sys.stderr)
        return 3
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    server = serve()
    found = [*lost_links(), *lost_names(), *read(f"http://127.0.0.1:{server.server_port}", chromium)]
    server.shutdown()
    print("\n".join(found) or f"docs-test: {pages} pages read at 360 and 1280 px, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
