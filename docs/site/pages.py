"""A hook of the site's builder (`make docs`): every page of the repository, under the path that it has there.

So links between pages work in the site as they do in a clone. Headings have the anchors that GitHub gives them; links
to other files, such as sources, become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from properdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "benchmarks", "runs", "models/*", "docs", "docs/decisions", "examples")
PICTURES = ("docs/*.png", "docs/*.svg", "docs/*/*.png", "docs/*/*.svg")


def paths() -> list[Path]:
    """The pages of the site and their pictures."""
    patterns = (*(f"{folder}/*.md" for folder in FOLDERS), *PICTURES)
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def anchor(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": False}
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Replace the folder docs_dir: by the theme's files and all pages."""
    from properdocs.structure.files import File, Files

    kept = [file for file in files if not Path(file.abs_src_path or ROOT).is_relative_to(config.docs_dir)]
    found = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths()]
    return Files([*kept, *found])


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    folder, shown = (ROOT / page.file.src_uri).parent, set(paths())

    def plain(link: re.Match[str]) -> str:
        target = (folder / link[2].partition("#")[0]).resolve()
        outside = target.exists() and (target.is_dir() or target not in shown)
        return link[1] if outside and not re.match(r"https?:|mailto:|#", link[2]) else link[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", plain, markdown)
