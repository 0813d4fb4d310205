"""Check that every link of the built site leads to a file of it, and to an anchor that exists.

No page may load anything from another host: the pages are also read from disk, without a network.

python -m docs.make.check_site build/site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """Collect the links and anchors of a page, and the URLs that it loads while it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.add(value)
                if tag != "a":
                    self.loaded.add(value)
            elif name in ("id", "name") and value is not None:
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield a line for each broken link."""
    pages = {page.resolve(): Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for page, links in pages.items():
        if page.name == "404.html":  # its links are those of the server's root
            continue
        for target in sorted(links.targets):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in links.loaded and url.scheme != "data":
                    yield f"{page.relative_to(site.resolve())}: loads {target}"
                continue
            linked = (page.parent / unquote(url.path)).resolve() if url.path else page
            anchors = pages[linked].anchors if linked in pages else {""}
            if not linked.is_file() or unquote(url.fragment) not in anchors:
                yield f"{page.relative_to(site.resolve())}: {target}"


def main(arguments: Sequence[str]) -> None:
    """Print the broken links, and exit with status 1 if there are any."""
    (site,) = map(Path, arguments)
    broken = list(broken_links(site))
    sys.stdout.writelines(f"broken link in {line}\n" for line in broken)
    num_pages = sum(1 for _ in site.rglob("*.html"))
    if broken or not num_pages:
        raise SystemExit(1)
    print(f"{num_pages} pages, no broken link")


if __name__ == "__main__":
    main(sys.argv[1:])
