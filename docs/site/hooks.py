"""Hooks of MkDocs: pages from files outside docs/, links between both, and the packages as they are installed.

A link in a document is relative to the repository. On the site it leads to the page that the same file has there. Source
files that a document links to get a page that shows them.
"""

import os
import posixpath
import re
import shutil
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build/docs-packages"
# Files outside docs/ that are pages of the site: path in the repository -> page.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LICENSE": "project/license.md",
    "mpirun/README.md": "project/environment.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
_MODULES = re.compile(r"^<!-- modules of (grace_ext[\w.]*) -->$", re.MULTILINE)
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
_repository_paths = {page: path for path, page in PAGES.items()}


def on_startup(command, dirty):
    """Lay the adapters inside the package, where an installation has them: the reference is read from these files.

    Before the configuration is read, because mkdocstrings drops paths that do not exist then.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.rmtree(PACKAGES, ignore_errors=True)
    shutil.copytree(ROOT / "grace_ext", PACKAGES / "grace_ext", ignore=ignored)
    shutil.copytree(ROOT / "adapters", PACKAGES / "grace_ext/adapters", ignore=ignored)


def on_files(files, config):
    """Add the pages from outside docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=_content(path)))
    for path in sorted(
        {found for document in _documents(files) for found in _sources(document)}
    ):
        page = _page_of(path)
        _repository_paths[page] = path
        files.append(
            File.generated(
                config,
                page,
                content=_content(path),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages."""
    path = _repository_path(page.file)
    folder = posixpath.dirname(page.file.src_uri)

    def on_site(match):
        target = _resolve(path, match[1])
        if target is None or (path.startswith("docs/") and target.startswith("docs/")):
            return match[1]
        return posixpath.relpath(_page_of(target), folder or ".")

    parts = _FENCE.split(_MODULES.sub(_directives, markdown))
    markdown = "".join(
        part if part.startswith("```") else _LINK.sub(on_site, part) for part in parts
    )
    if path == "README.md":
        page.meta["hide"] = ["navigation"]
    return markdown


def _directives(match):
    """Directives for a package's public modules, the one with the base class first."""
    folder = PACKAGES.joinpath(*match[1].split("."))
    names = sorted(
        (path.stem for path in folder.glob("[a-z]*.py")),
        key=lambda name: (name != "base", name),
    )
    return "\n".join(f"::: {match[1]}.{name}" for name in names)


def _content(path):
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = "python" if path.endswith(".py") else "text"
    return f"# {posixpath.basename(path)}\n\n````{language}\n{text}\n````\n"


def _documents(files):
    """(path in the repository, text) of all pages that are written by hand."""
    for file in files.documentation_pages():
        path = _repository_path(file)
        yield path, _content(path)


def _sources(document):
    """The files that are neither pages nor in docs/ and that a document links to."""
    path, text = document
    for link in _LINK.findall(_FENCE.sub("", text)):
        target = _resolve(path, link)
        if target and target not in PAGES and not target.startswith("docs/"):
            yield target


def _repository_path(file):
    return _repository_paths.get(file.src_uri, f"docs/{file.src_uri}")


def _page_of(path):
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"{os.path.splitext(path)[0]}.md")


def _resolve(path, link):
    """The file of the repository that a link in one of its files leads to; None if there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None
