"""What `mkdocs.yml` needs so that the pages can be as they are on GitHub: the README is the first page, and links to
other files work."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and the files outside docs/ that pages link to."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    for path in [*sorted((ROOT / "dags").glob("*.py")), ROOT / "docker-compose.yaml"]:
        files.append(File.generated(config, str(path.relative_to(ROOT)), content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files beside docs/ to their places on the site."""
    return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
