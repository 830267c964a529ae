"""docs/architecture.md names files that exist, and has a place for every file of the packages: a new one needs a line there. Its picture
names folders, files and imports as they are."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_carriers import ray_actors
from tests.test_layers import ENGINES, MAY_IMPORT, imported_modules, imports, module_name, source_files

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("correction", "rollout", "learner", "actors", "lab")
PICTURE = ElementTree.fromstring((ROOT / "docs" / "images" / "architecture.svg").read_text())
SVG = "{http://www.w3.org/2000/svg}"
FILE = re.compile(r"`([\w/]+\.py)`")


def rooms(page: str) -> dict[str, set[str]]:
    """Folder (with its slash) -> the files that the table names in it; none for a folder that has one line for all of its files."""
    found: dict[str, set[str]] = {}
    folders: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            continue
        room, files = line.split("|")[1:3]
        folders = re.findall(r"`([\w/]+/)`", room) or folders
        for folder in folders:
            found.setdefault(folder, set()).update(FILE.findall(files))
    return found


def missing(page: str, root: Path) -> set[str]:
    """Files and folders that a page names, and that aren't there."""
    of_table = {folder + name for folder, names in rooms(page).items() for name in (names or {""})}
    of_text = {name for name in FILE.findall(page) if "/" in name}
    return {name for name in of_table | of_text if not (root / name).exists()}


def unplaced(page: str, files: set[str]) -> set[str]:
    """Those of the files that neither have a name in their room nor lie in, or below, one that has a line for all."""
    places = rooms(page)
    wholes = tuple(folder for folder, names in places.items() if not names)
    named = {folder + name for folder, names in places.items() for name in names}
    return {file for file in files if file not in named and not file.startswith(wholes)}


def test_every_file_that_the_page_names_exists() -> None:
    assert len(FILE.findall(PAGE)) > 100, "the page names no files: the test would pass for nothing"
    assert missing(PAGE, ROOT) == set()


def test_every_file_of_the_packages_has_a_place_on_the_page() -> None:
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert unplaced(PAGE, files) == set()


def test_the_page_stays_short() -> None:
    """Five minutes and one picture: sentences belong into docs/how_it_works.md. The table's bars aren't words."""
    assert len(PAGE.replace("|", " ").split()) <= 710


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_each_package_has_a_room(package: str) -> None:
    """Not one line for all of its files: its root is what a newcomer opens first, or folders that have a line each."""
    places = rooms(PAGE)
    assert places[f"{package}/"] and len(places[f"{package}/"]) + sum(folder.startswith(f"{package}/") for folder in places) > 10


@pytest.mark.parametrize(
    ("package", "seen"),
    [
        ("correction", ("early_warning", "diagnostics")),
        ("rollout", ("tasks", "rewards")),
        ("learner", ("training", "model")),
        ("actors", ("driver", "pool")),
    ],
)
def test_a_folder_imports_only_those_of_its_package_below_it_in_the_table(package: str, seen: tuple[str, str]) -> None:
    order = [folder.split("/")[1] for folder in rooms(PAGE) if re.fullmatch(rf"{package}/\w+/", folder)]
    files = {module_name(path): path for path in source_files(package)}
    room = {name: path.relative_to(ROOT / package).parts[0] for name, path in files.items() if path.parent != ROOT / package}
    assert set(room.values()) == set(order)
    pairs = {(room[name], room[other]) for name in room for other in imported_modules(files[name], set(room)) if room[other] != room[name]}
    assert seen in pairs, "no import was seen"
    assert {(one, other) for one, other in pairs if order.index(one) > order.index(other)} == set()


def test_no_ray_actor_imports_what_writes_a_run_down() -> None:
    """Neither itself nor through others: actors/record/ is the driver's, and an actor's process need not load it."""
    files = {module_name(path): path for path in source_files("actors")}
    seen: set[str] = set()
    actors = {module_name(path) for path in ray_actors().values()}
    of_a_run = ("pool.rollout_worker", "queue.queue_actor", "service.correction_service", "ranks.learner_rank_actor")
    assert {f"actors.{name}" for name in of_a_run} <= actors, "an actor was not seen"
    waiting = set(actors)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= imported_modules(files[module], set(files)) - seen
    assert [module for module in sorted(seen) if module.startswith("actors.record")] == []
    assert len(seen) > len(actors), "they import nothing of actors: the test would pass for nothing"


def test_the_reader_sees_what_is_missing(tmp_path: Path) -> None:
    page = "| `a/` | `x.py` `gone.py` | ... |\n| | `y.py` | ... |\n| `a/b/` | all | ... |\nText about `a/x.py` and `a/never.py`.\n"
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x.py", "y.py"):
        (tmp_path / "a" / name).touch()
    assert missing(page, tmp_path) == {"a/gone.py", "a/never.py"}
    assert unplaced(page, {"a/x.py", "a/y.py", "a/z.py", "a/b/any.py", "c/d.py"}) == {"a/z.py", "c/d.py"}


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box of the picture: its frame in pixels, and the lines in it from top to bottom."""

    left: float
    top: float
    right: float
    bottom: float
    lines: tuple[str, ...] = ()

    def holds(self, x: float, y: float, *, margin: float = 0.0) -> bool:
        return self.left - margin <= x <= self.right + margin and self.top - margin <= y <= self.bottom + margin

    @property
    def folders(self) -> list[str]:
        """Those that the first line names; none where that is a title."""
        return re.findall(r"\b([a-z]+)/(?= |$)", self.lines[0])


def drawn_boxes() -> list[DrawnBox]:
    texts = [(float(one.get("x", 0)), float(one.get("y", 0)), one.text or "") for one in PICTURE.iter(f"{SVG}text")]
    found = []
    for one in PICTURE.iter(f"{SVG}rect"):
        if "box" in one.get("class", "").split():
            x, y, width, height = (float(one.get(name, 0)) for name in ("x", "y", "width", "height"))
            box = DrawnBox(x, y, x + width, y + height)
            found.append(replace(box, lines=tuple(text for left, top, text in texts if box.holds(left, top))))
    return found


def drawn_arrows() -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Start and tip of each, in pixels; on paths of moves and lines to absolute places."""
    found = []
    for one in PICTURE.iter(f"{SVG}path"):
        if "arrow" not in one.get("class", "").split():
            continue
        x = y = 0.0
        places = []
        for letter, first, second in re.findall(r"([MLHV])([\d.]+)(?:,([\d.]+))?", one.get("d", "")):
            x, y = {"H": (float(first), y), "V": (x, float(first))}.get(letter) or (float(first), float(second))
            places.append((x, y))
        found.append((places[0], places[-1]))
    return found


def named_in_the_picture() -> set[str]:
    """Folders and files; a line of a file's name alone belongs to the folder in the line above."""
    found: set[str] = set()
    folder = ""
    for one in PICTURE.iter(f"{SVG}text"):
        text = (one.text or "").strip()
        if re.fullmatch(r"\w+\.py", text):
            found.add(folder + text)
        if names := re.findall(r"\b[a-z]+/[\w/]*(?:\.py)?", text):
            found.update(names)
            folder = names[-1]
    return found


def test_every_file_and_folder_of_the_picture_exists() -> None:
    named = named_in_the_picture()
    assert {"actors/ranks/learner_group.py", "actors/record/", "lab/"} <= named, "a name was not seen"
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_arrows_of_the_picture_are_the_imports() -> None:
    """Whatever can be reached along arrows between folders may be imported, and nothing else."""
    boxes = [box for box in drawn_boxes() if box.folders]
    direct: dict[str, set[str]] = {folder: set() for box in boxes for folder in box.folders}
    for start, tip in drawn_arrows():
        ends = [[folder for box in boxes if box.holds(*place, margin=3) for folder in box.folders] for place in (start, tip)]
        for importer in ends[0]:
            direct[importer].update(ends[1])
    assert sum(map(len, direct.values())) == 7, "an arrow begins or ends in no box"
    for folder in TopologicalSorter(direct).static_order():
        direct[folder] |= {below for other in direct[folder] for below in direct[other]}
        assert direct[folder] == MAY_IMPORT.get(folder, set(PACKAGES[:4])) - {folder}, folder


def test_what_the_picture_says_of_a_package_is_so() -> None:
    """The only home of an engine; the other packages that correction/ imports."""
    said = {box.folders[0]: box.lines[1] for box in drawn_boxes() if box.folders}
    homes = {found[1].lower(): folder for folder, note in said.items() if (found := re.fullmatch(r"the only home of (\w+)", note))}
    assert homes == ENGINES
    imported = {name for path in source_files("correction") for _, name in imports(path)} - sys.stdlib_module_names - {"correction"}
    assert set(said["correction"].split(", ")) == imported
