"""Writes the API reference, one HTML page made of the docstrings.

    python client/python/api_reference.py reference.html

Needs the package pdoc, and the client on the path.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pdoc

MODULES = ("weft", "weft.data", "weft.recipes")
BODY = re.compile(r"<main.*?</main>", re.DOTALL)


def main() -> None:
    """Renders each module with pdoc and joins the results into one page."""
    parser = argparse.ArgumentParser(description="Write the API reference.")
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    pdoc.render.configure(docformat="markdown", show_source=False, search=False)
    modules = {name: pdoc.doc.Module.from_name(name) for name in MODULES}
    pages = [pdoc.render.html_module(module, modules) for module in modules.values()]
    bodies = []
    for text in pages:
        found = BODY.search(text)
        assert found is not None, "pdoc's page has no <main>"
        bodies.append(found.group())
    first = BODY.search(pages[0])
    assert first is not None
    whole = pages[0][: first.start()] + "\n".join(bodies) + pages[0][first.end() :]
    page.write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    main()
