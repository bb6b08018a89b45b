# SPDX-License-Identifier: Apache-2.0
"""The site builds strictly, without a network for us or for its readers, and says what the code says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import scalerl_verl
from scalerl_verl import metrics, names
from scalerl_verl.names.keys import KEYS
from tests.metric_names import undocumented
from tests.paths import REPO
from tests.unit.docs.test_commands import PAGES

DOCS = REPO / "docs"
PACKAGE = Path(scalerl_verl.__file__).parent
NO_NETWORK = """import socket
def refuse(*_, **__):
    raise OSError("no network in this test")
socket.socket.connect = refuse
"""


class Resources(HTMLParser):
    """Addresses a browser would fetch by itself: not those of links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "embed"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, made where no connection can be opened."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = ["-m", "mkdocs", "build", "--strict", "--config-file", str(DOCS / "mkdocs" / "mkdocs.yml")]
    command += ["--site-dir", str(folder / "html")]
    environment = {**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_site_builds_without_a_warning(site: Path) -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    # The second is for pages that are opened from a folder, where a browser loads scripts only.
    assert all((site / "search" / f"search_index.{kind}").is_file() for kind in ("json", "js"))
    assert 'src="iframe-worker.js"' in (site / "index.html").read_text()
    folders = {path.name for path in DOCS.iterdir() if path.is_dir()}
    assert not [name for name in folders if (site / name).exists()], "what builds the site is no part of it"


def test_readers_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        parser = Resources()
        parser.feed(page.read_text())
        assert parser.found
        elsewhere = [url for url in parser.found if re.match(r"(https?:)?//", url)]
        assert not elsewhere, f"{page.name} fetches {elsewhere}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_names_in_tables_do_not_break_and_commands_do(site: Path) -> None:
    text = (site / "costs.html").read_text()
    assert '<code data-text="command">python -m benchmarks.step.bench' in text and "<td data-text=" in text
    assert "<code>1fb623e0d9</code>" in text
    assert 'href="site.css"' in text and "nowrap" in (site / "site.css").read_text()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    assert [path.stem for path in DOCS.glob("*.md") if f'href="{path.stem}.html"' not in index] in ([], ["index"])


def anchors_of(page: Path) -> set[str]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES.find_pages(), ids=lambda path: str(path.relative_to(REPO)))
def test_link_of_a_page_leads_somewhere(page: Path) -> None:
    """Those between pages of docs/ the build checks, too; the others are read where the repository is."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", page.read_text())
    for name, anchor in links:
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor[1:] in anchors_of(target), name + anchor
    assert len(links) > 10 or page != REPO / "README.md"


def test_every_folder_has_a_line_in_the_architecture() -> None:
    text = (DOCS / "architecture.md").read_text()
    inside = [path for folder in ("scalerl_verl", "recipes") for path in (REPO / folder).iterdir() if path.is_dir()]
    folders = {str(path.relative_to(REPO)) for path in inside if path.name != "__pycache__"}
    assert len(folders) > 15
    recipes = text[text.index("| `recipes/tiny-gpu/`") :].splitlines()[0]
    named = {f"recipes/{name}" for name in re.findall(r"`([\w-]+)/`", recipes)}
    assert sorted(name for name in folders - named if f"`{name}/" not in text) == []


def part_of(value: ast.expr) -> str:
    """A part of an f-string: its text, the name of ours that stands there, or a mark for what is filled in."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    inner = value.value if isinstance(value, ast.FormattedValue) else value
    name = getattr(names, inner.id, None) if isinstance(inner, ast.Name) else None
    return name if isinstance(name, str) else "\0"


def texts_of(tree: ast.AST) -> list[str]:
    """String constants of a module, those of an f-string joined with a mark for what is filled in."""
    found, inner = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
            found.append("".join(map(part_of, node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def said() -> list[str]:
    """Every text of the package, the list of metrics left out."""
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "metrics.py"]
    return [text for path in paths for text in texts_of(ast.parse(path.read_text()))]


def test_troubleshooting_quotes_what_plugin_and_launcher_say(said: list[str]) -> None:
    launcher = (REPO / "recipes" / "launch").glob("*.py")
    said = [*said, *(text for path in launcher for text in texts_of(ast.parse(path.read_text())))]
    page = (DOCS / "troubleshooting.md").read_text()
    quotes = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", page)
    assert len(quotes) > 30
    for quote in quotes:
        if quote == "italics":  # explains itself
            continue
        for part in quote.split("…"):
            assert any(part.strip() in text for text in said), f"nobody says {part!r}"


def test_troubleshooting_names_keys_and_metrics_that_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    logged = [name for name in re.findall(r"`(scalerl/\w+/[\w/]+)`", page)]
    assert len(logged) >= 4 and undocumented(logged) == []
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for key in re.findall(r"`(SCALERL_VERL_\w+|--[\w-]+)`", page):
        assert f'"{key}"' in source, key


def test_every_metric_in_the_code_is_documented(said: list[str]) -> None:
    """Names written out; those put together from parts are seen by the end-to-end tests."""
    literal = {text for text in said if re.fullmatch(r"scalerl/[a-z]+/\w+", text)}
    assert len(literal) > 40
    known = [f"scalerl/{name}" for name in metrics.METRICS]
    beginnings = {text for text in literal if any(name.startswith(f"{text}_") for name in known)}
    assert undocumented(literal - beginnings) == []


def test_every_name_is_on_the_page_with_its_place() -> None:
    page = (DOCS / "reference.md").read_text()
    table = page[page.index("## Names") : page.index("## Keys")]
    for path, values in names.VALUES.items():
        for value in values - {"float"}:  # vLLM's other word for float32, which a check refuses
            assert f"`{value}`" in table, f"{path}={value}"
    keys = page[page.index("## Keys") : page.index("## Presets")]
    for path in {f"{section}.{key}" for section, own in KEYS.items() for key in own} - {names.SAMPLER_CLASS_PATH}:
        assert f"`{path}`" in keys
