"""The documentation: its code runs, its links lead somewhere, and it leaves no public name out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from test_architecture import FILES, inside, room_of

import conjugp
from conjugp import conformal, export, kernels, likelihoods, metrics, plotting
from conjugp._fit.fit import ELBO_ROWS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *EXAMPLES,
]
WITH_CODE = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs" / name for name in ("api.md", "deployment.md", "saving.md", "table.md")),
    *EXAMPLES,
]

# What only makes a page slow: the numbers it prints are for readers.
QUICKER = {'"max_epochs": 100': '"max_epochs": 2', "train_size=600": "train_size=320"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in links."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# SHAP's own, under the newest Matplotlib.
@pytest.mark.filterwarnings("ignore:The set_:PendingDeprecationWarning")
@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_code_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages may write files
    names = {"__name__": "__main__"}
    code = blocks(path, "python")
    assert code
    for block in code:
        for slow, quick in QUICKER.items():
            block = block.replace(slow, quick)
        exec(compile(block, name_of(path), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), f"{link} in {name_of(path)}"
        assert not anchor or anchor in anchors(target), f"{link} in {name_of(path)}"


def test_every_picture_is_shown_and_drawn_by_a_script():
    shown = {link for page in PAGES for link in re.findall(r"images/(\w+)\.png", page.read_text())}
    there = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    scripts = [ROOT / "docs" / "make_images.py", *(ROOT / "experiments").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in scripts)
    assert shown == there == set(re.findall(r'IMAGES / "(\w+)\.png"', text))


def test_readme_has_the_commands():
    commands = blocks(ROOT / "README.md", "sh")
    assert commands == [
        "pip install -e . && conjugp demo\n",
        "pip install -e .\n"
        "conjugp demo --table wine.csv\n"
        "conjugp fit wine.csv --target label -o wine.conjugp\n"
        "conjugp report wine.conjugp wine.csv -o report.html\n",
        'pip install -e ".[test]" && pytest\n',
    ]


def test_readme_opens_with_a_short_example():
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line]) <= 6


def test_the_tree_in_contributing_has_every_room_in_the_order_of_imports():
    tree = blocks(ROOT / "CONTRIBUTING.md", "text")[0].partition("src/conjugp/\n")[2]
    tree = tree.partition("\ntests/")[0]
    shown = [
        name.removesuffix("/").removesuffix(".py")
        for line in tree.splitlines()
        for name in re.findall(r"\w+(?:/|\.py)", re.split(r"\s{2,}", line.strip())[0])
    ]
    rooms = [*shown, "__main__"]
    assert sorted(rooms) == sorted({room_of(path) for path in FILES})
    for path in FILES:
        above = rooms[: rooms.index(room_of(path))]
        assert inside(path) <= set(above), name_of(path)


def test_the_signature_in_the_api_page():
    shown = blocks(ROOT / "docs" / "api.md", "text")[0]
    parameters = inspect.signature(conjugp.GPClassifier).parameters.values()
    expected = [f"    {p.name}={p.default!r},".replace("'", '"') for p in parameters]
    lines = [line for line in shown.splitlines() if "=" in line]
    assert lines == expected


MODULES = [conjugp, kernels, likelihoods, metrics, plotting, conformal, export]


@pytest.mark.parametrize("module", MODULES)
def test_the_api_page_has_every_public_name(module):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in module.__all__
        if not name.startswith("__") and not re.search(rf"`[^`\n]*\b{name}\b", page)
    ]
    assert not missing


def test_the_api_page_has_every_method_option_and_attribute():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    methods = [name for name in vars(conjugp.GPClassifier) if not name.startswith(("_", "set_"))]
    options = inspect.signature(conjugp.FitOptions).parameters
    documented = re.findall(r"^    (\w+_) : ", str(conjugp.GPClassifier.__doc__), re.M)
    for name in (*methods, *options, *documented):
        assert re.search(rf"`[^`\n]*\b{name}\b", page), name
    for name, parameter in options.items():
        row = next(line for line in page.splitlines() if re.match(rf"\|[^|]*`{name}`", line))
        default = repr(parameter.default).replace("'", '"')
        assert re.search(rf"\b{re.escape(default.strip(chr(34)))}", row.split("|")[2]), row


def test_how_many_rows_the_elbo_is_estimated_from():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `elbo_`"))
    said = str(conjugp.GPClassifier.__doc__).partition("elbo_ : float")[2].partition("_ : ")[0]
    for text in (row, said):
        assert f"estimated from {ELBO_ROWS:,} rows" in " ".join(text.split())
