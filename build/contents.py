"""What is inside an archive: a bill of materials, and the licence of each part.

A part is one of two folders, `agent` and `engine`: each holds Python distributions, a Python, and
libraries of the host that it was built on (build/system_libraries.py wrote down which).
"""

import importlib.metadata
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

Distribution = importlib.metadata.Distribution
Row = dict[str, object]

LICENCE = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)[^/]*$")
NAME_MAX_CHARS = 80  # of a licence; some distributions give its whole text in that field


@dataclass
class Part:
    """One folder of the archive."""

    name: str
    distributions: list[Distribution]
    python: str
    """Version of its CPython."""
    python_licence: Path
    libraries: Path
    """Folder of libraries.json and the copyright files that it stands for."""
    web: Path | None = None
    """Folder of what scripts/web-install took from npm."""
    rows: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = json.loads((self.libraries / "libraries.json").read_text())


@dataclass(frozen=True)
class WebLibrary:
    """One package of npm, of which the dashboard has a file."""

    name: str
    version: str
    licence: str
    file: Path


def web_libraries(folder: Path | None) -> list[WebLibrary]:
    """Read from the lock that they were taken by."""
    if folder is None or not (folder / "made-of.json").exists():
        return []
    files = {path.name.lower(): path for path in folder.iterdir()}
    packages = json.loads((folder / "made-of.json").read_text())["packages"]
    return [
        WebLibrary(name, row["version"], row["license"], files[f"{name.lower()}.license"])
        for key, row in sorted(packages.items())
        if (name := key.removeprefix("node_modules/")) and key
    ]


def distributions(path: list[str] | None = None) -> list[Distribution]:
    found = importlib.metadata.distributions(**({} if path is None else {"path": path}))
    return sorted(found, key=lambda one: one.metadata["Name"].lower())


# --- licences -------------------------------------------------------------------------------


def copy_licences(folder: Path, parts: list[Part]) -> None:
    """`folder`/PART/COMPONENT/..., and an index of all components with their licences."""
    index = []
    for part in parts:
        own = folder / part.name
        keep(part.python_licence, own / "CPython" / "LICENSE.txt")
        index.append((part.name, f"CPython {part.python}", "PSF-2.0"))
        for one in part.distributions:
            name = one.metadata["Name"]
            for file in licence_files(one):
                inside = file.as_posix().partition(".dist-info/")[2].removeprefix("licenses/")
                keep(Path(one.locate_file(file)), own / name / inside)
            index.append((part.name, f"{name} {one.version}", licence_name(one)))
        for library in web_libraries(part.web):
            keep(library.file, own / library.name / "LICENSE")
            index.append((part.name, f"{library.name} {library.version}", library.licence))
        for row in part.rows:
            package = row["package"]
            keep(part.libraries / package / "copyright", own / package / "copyright")
            index.append((part.name, f"{row['library']} ({package} {row['version']})", "copyright"))
    lines = [f"{part}\t{component}\t{licence}\n" for part, component, licence in index]
    (folder / "INDEX.tsv").write_text("".join(lines))


def licence_files(one: Distribution) -> list[importlib.metadata.PackagePath]:
    """Its texts; of a wheel without any, its METADATA: who made it, and under which licence."""
    files = [file for file in one.files or [] if ".dist-info/" in file.as_posix()]
    texts = [file for file in files if LICENCE.search(file.as_posix())]
    return texts or [file for file in files if file.name == "METADATA"]


def keep(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def licence_name(one: Distribution) -> str:
    """As the distribution gives it: an SPDX expression, or a name; "see files" without either."""
    expression = one.metadata.get("License-Expression")
    if expression:
        return expression
    classes = one.metadata.get_all("Classifier") or []
    named = [line.rpartition(" :: ")[2] for line in classes if line.startswith("License :: ")]
    text = (one.metadata.get("License") or "").strip()
    is_name = text and "\n" not in text and len(text) <= NAME_MAX_CHARS
    return text if is_name else " and ".join(named) or "see files"


# --- the bill of materials ------------------------------------------------------------------


def bill_of_materials(version: str, parts: list[Part], epoch_s: int) -> Row:
    """CycloneDX 1.5; the same inputs give the same text, so it has no serial number."""
    rows = [row for part in parts for row in part_rows(part)]
    about = {"type": "application", "bom-ref": "asyncgrpo-agent", "name": "asyncgrpo-agent"}
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": written, "component": {**about, "version": version}},
        "components": rows,
        "dependencies": [{"ref": "asyncgrpo-agent", "dependsOn": [row["bom-ref"] for row in rows]}],
    }


def part_rows(part: Part) -> list[Row]:
    python = f"pkg:generic/cpython@{part.python}"
    rows = [component(part, "CPython", part.python, python, "PSF-2.0", kind="application")]
    for one in part.distributions:
        name = one.metadata["Name"]
        expression = one.metadata.get("License-Expression", "")
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{one.version.replace('+', '%2B')}"
        row = component(part, name, one.version, purl, expression)
        if not expression:
            row["licenses"] = [{"license": {"name": licence_name(one)}}]
        rows.append(row)
    for library in web_libraries(part.web):
        purl = f"pkg:npm/{library.name}@{library.version}"
        rows.append(component(part, library.name, library.version, purl, library.licence))
    packages = {row["package"]: row for row in part.rows}  # some hold several libraries
    for package, row in sorted(packages.items()):
        rows.append(component(part, package, row["version"], row["purl"]))
    return rows


def component(
    part: Part, name: str, version: str, purl: str, licence: str = "", *, kind: str = "library"
) -> Row:
    row: Row = {
        "type": kind,
        "bom-ref": f"{part.name}/{purl}",
        "name": name,
        "version": version,
        "purl": purl,
        "properties": [{"name": "asyncgrpo-agent:folder", "value": part.name}],
    }
    return row | ({"licenses": [{"expression": licence}]} if licence else {})
