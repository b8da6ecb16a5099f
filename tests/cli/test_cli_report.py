"""The HTML report: its numbers, what users' text can do to it, and that it is one file."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from commands import conjugp, fails, read_rows, write_csv
from conjugp import metrics
from conjugp.cli._contents import _number, _scores, contents
from conjugp.cli._evaluate import labelled_rows
from conjugp.cli._findings import Findings, Subject, find, relevance
from conjugp.cli._page import picture
from conjugp.cli._scores import split
from conjugp.cli._settings import Reading
from conjugp.cli.models import load_model

EVIL = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    '"><svg onload=window.hacked=1>',
    "'; window.hacked=1; '",
    "</script><script>window.hacked=1</script>",
    "{{ 7*7 }}{% raw %}",
    "$\\frac{",
    "<!--",
    "&lt;b&gt;",
    "\u202egnp.exe",
]
VOID = {"meta", "input", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """The elements of a page; an error where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def subject(wine):
    model = load_model(wine / "wine.conjugp")
    found = labelled_rows(model, wine / "wine.csv", Reading())
    names = {"source": "wine.csv", "scored": "wine.csv"}
    return Subject(**vars(found), model=model, commands=[], **names)


@pytest.fixture(scope="module")
def page(wine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name in ("wine.csv", "wine.conjugp"):
        shutil.copy(wine / name, folder / name)
    result = conjugp(folder, "report", "wine.conjugp", "wine.csv", "-o", "report.html", "--json")
    assert result.code == 0, result.err
    return (folder / "report.html").read_text(encoding="utf-8"), result.json


def test_the_numbers_are_those_of_a_fit_by_hand(subject):
    findings = find(subject)
    train, test = subject.train, subject.rows
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    encode = subject.model.encoder.encode
    logistic.fit(encode(train.frame), train.y)
    assert len(test.y) == 36 and len(train.y) == 142
    for name, clf in (("conjugp", subject.model.clf), ("logistic regression", logistic)):
        X = encode(test.frame)
        p = clf.predict_proba(X)
        assert findings.scores[name]["nll"] == pytest.approx(metrics.nll(test.y, p), rel=1e-9)
        assert findings.scores[name]["error"] == pytest.approx(1 - clf.score(X, test.y))
    p = subject.model.clf.predict_proba(test.frame)
    truth = p[np.arange(36), np.searchsorted(subject.model.clf.classes_, test.y)]
    np.testing.assert_allclose(findings.surprise, -np.log(truth), rtol=1e-12)
    np.testing.assert_allclose(findings.entropy, -(p * np.log(p)).sum(axis=1), rtol=1e-9)


def test_relevance_finds_the_column_that_matters(subject):
    class OneColumn:
        classes_ = np.array(["class_0", "class_1", "class_2"])

        def predict_proba(self, X):
            code = np.array([1, 2, 0])[np.digitize(np.asarray(X)[:, 0], [12.7, 13.4])]
            return np.eye(3)[code] * 0.94 + 0.02

    model = type(subject.model)(OneColumn())
    found = relevance(model, subject.rows)
    others = list(found.values())[1:]
    assert next(iter(found)) == "alcohol" and found["alcohol"] > 0.1
    assert others == pytest.approx([0.0] * 4, abs=1e-12)


def test_the_page_has_all_its_parts(page):
    text, said = page
    found = Page(text)
    words = " ".join(" ".join(found.text).split())
    for heading in (
        *("Scores", "Calibration", "Confusion", "Rows to look at", "Most surprising"),
        *("Most uncertain", "Features", "Training", "Data", "How to reproduce"),
    ):
        assert heading in words
    assert "logistic regression" in words and "36 rows that the model has not seen" in words
    assert "conjugp fit wine.csv --target label -o wine.conjugp" in words
    assert "conjugp report wine.conjugp wine.csv" in words
    assert "# conjugp 0.1.0 conjugp fit" in words and "pip install" not in words
    assert f"{said['scores']['conjugp']['nll']:.3f}" in words
    assert text.count("<svg") == 2 and text.count("</tr>") > 36
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for tag, name, value in found.attributes if (tag, name) == ("a", "href")]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)


def test_the_page_asks_nothing_of_the_network(page):
    found = Page(page[0])
    loading = {"src", "srcset", "action", "data", "poster", "background"}
    for tag, name, value in found.attributes:
        assert name not in loading, (tag, name)
        assert not name.startswith("on"), (tag, name)
        if name.endswith("href"):
            assert value.startswith("#")
        assert "url(http" not in value and "@import" not in value
    assert not {"link", "iframe", "object", "embed", "base", "form", "img"} & set(found.tags)
    assert "@import" not in page[0] and found.tags.count("script") == 1


def test_text_of_the_user_stays_text(tmp_path):
    rng = np.random.default_rng(0)
    classes = EVIL[:4]
    names = [f"{text}{i}" for i, text in enumerate(EVIL)]
    rows = []
    for i in range(60):
        numbers = [round(float(v), 3) for v in rng.normal(size=len(names) - 1) + i % 4]
        rows.append([*numbers, EVIL[i % len(EVIL)], classes[i % 4]])
    target = "<b onclick=window.hacked=1>target</b>"
    write_csv(tmp_path / "<i>evil.csv", [*names, target], rows)
    options = ("--target", target, "--categorical", "onehot", "-o", "evil.html")
    result = conjugp(tmp_path, "report", "<i>evil.csv", *options)
    assert result.code == 0, result.err
    text = (tmp_path / "evil.html").read_text(encoding="utf-8")
    found = Page(text)
    assert found.tags.count("script") == 1 and not {"img", "i"} & set(found.tags)
    assert not any(name.startswith("on") for _, name, _ in found.attributes)
    words = "".join(found.text)
    for evil in (*EVIL, target, "<i>evil.csv"):
        assert evil in words, evil
    # What may run is told by its digest.
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_a_model_on_rows_of_its_training_and_on_others(wine, tmp_path):
    shutil.copy(wine / "wine.csv", tmp_path / "wine.csv")
    lines = (wine / "wine.csv").read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join(lines[:1] + lines[1::3]))
    call = ("report", wine / "wine.conjugp", "other.csv", "-o", "r.html")
    said = conjugp(tmp_path, *call, "--json").json
    assert set(said["scores"]) == {"conjugp"} and said["n_rows"] == 60
    assert "--train TABLE" in (tmp_path / "r.html").read_text(encoding="utf-8")
    said = conjugp(tmp_path, *call, "--train", "wine.csv", "--json").json
    assert "logistic regression" in said["scores"]
    # The page says how many of the rows were trained on, and so do the numbers for scripts.
    rows = read_rows("\n".join(lines))
    train, test = split(np.array([row["label"] for row in rows]), 0.2, 0)
    trained_on = len(set(train.tolist()) & set(range(0, 178, 3)))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert said["trained_on"] == trained_on and 0 < trained_on < 60
    assert (
        text.count(f"60 rows, {trained_on} of which") == 2 and f"{trained_on} of these 60" in text
    )
    assert "not seen." in text and "has not seen" not in text.replace("that it has not seen.", "")
    (tmp_path / "held.csv").write_text("\n".join([lines[0], *(lines[i + 1] for i in test)]))
    call = ("evaluate", wine / "wine.conjugp", "held.csv")
    assert conjugp(tmp_path, *call, "--json").json["trained_on"] == 0
    assert "36 rows it has not seen" in conjugp(tmp_path, *call).out
    # A file from before there were digests claims nothing.
    model = load_model(wine / "wine.conjugp")
    del model.origin["rows"]
    model.save(tmp_path / "old.conjugp")
    call = ("old.conjugp", "other.csv")
    assert conjugp(tmp_path, "evaluate", *call, "--json").json["trained_on"] is None
    assert "On 60 rows of other.csv; lower" in conjugp(tmp_path, "evaluate", *call).out
    said = conjugp(tmp_path, "report", *call, "-o", "r.html")
    assert "of 60 rows of other.csv." in said.out
    assert "On 60 rows of other.csv." in (tmp_path / "r.html").read_text(encoding="utf-8")
    # A model that held nothing out, on its own table: the page says that the scores flatter it.
    model = load_model(wine / "wine.conjugp")
    model.origin["test_size"] = 0
    model.save(tmp_path / "all.conjugp")
    said = conjugp(tmp_path, "report", "all.conjugp", "wine.csv", "-o", "r.html", "--json").json
    assert said["trained_on"] and said["n_rows"] == 178
    assert "flatter it" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_columns_to_keep_and_what_a_row_counts(wine, tmp_path):
    lines = (wine / "wine.csv").read_text().splitlines()
    named = [f"cellar-{i},{line}" for i, line in enumerate(lines)]
    named[0] = f"id,{lines[0]}"
    (tmp_path / "t.csv").write_text("\n".join(named))
    shutil.copy(wine / "wine.conjugp", tmp_path)
    call = ("report", "wine.conjugp", "t.csv", "--keep", "id", "-o", "r.html")
    assert conjugp(tmp_path, *call).code == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    found = re.findall(r"<h3>Most surprising</h3>.*?<tbody>(.*?)</tbody>", text, re.S)[0]
    rows = re.findall(r"<tr[^>]*><td[^>]*>(\d+)</td>.*?>(cellar-\d+)<", found)
    assert len(rows) == 8 and all(f"cellar-{number}" == name for number, name in rows)
    assert "counts the rows of t.csv from 1" in text
    assert "did you mean 'id'" in fails(tmp_path, *call[:3], "--keep", "idd", "-o", "r.html")


def test_the_lowest_score_is_bold():
    names = ("error", "nll", "brier", "ece")
    lines = {"conjugp": (0.1, 0.2, 0.3, 0.4), "class frequencies": (0.6, 0.5, 0.7, 0.01)}
    scores = {name: dict(zip(names, line, strict=True)) for name, line in lines.items()}
    none = np.empty(0)
    made = _scores(Findings(scores, {}, none, none, none, {}))
    bold = [[cell["best"] for cell in line["cells"]] for line in made]
    assert bold == [[True, True, True, False], [False, False, False, True]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(84720, "84,720"), (-1234.6, "-1,235"), (0.5, "0.5"), (13.05, "13.05"), (0, "0")],
)
def test_numbers_are_written_plainly(value, text):
    assert _number(float(value)) == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wine.csv"], "--target"),
        (["wine.csv", "wine.conjugp"], "not a conjugp model file; give the model first"),
        (["wine.csv", "--target", "label", "--test-size", "0"], "needs rows to score"),
        (["wine.conjugp", "wine.csv", "--missing", "impute"], "--missing is for a table"),
        (["wine.conjugp", "wine.csv", "-o", "x.pdf"], "must end in .html"),
        (["wine.csv", "--target", "lable"], "did you mean"),
        (["wine.csv", "--target", "label", "--unseen", "ignore"], "--unseen is for a model and"),
        (["wine.csv", "--target", "label", "--train", "wine.csv"], "--train is for a model and"),
    ],
)
def test_report_refuses(wine, tmp_path, arguments, words):
    for name in ("wine.csv", "wine.conjugp"):
        shutil.copy(wine / name, tmp_path / name)
    code = 3 if arguments == ["wine.csv", "wine.conjugp"] else 2
    assert words in fails(tmp_path, "report", *arguments, code=code)
    assert len(list(tmp_path.iterdir())) == 2


def test_many_classes_get_a_list_instead_of_a_matrix(subject, monkeypatch):
    findings = find(subject)
    assert contents(subject, findings, [])["confusion"]["labels"] == [
        "class_0",
        "class_1",
        "class_2",
    ]
    monkeypatch.setattr("conjugp.cli._contents.MOST_MATRIX", 2)
    made = contents(subject, findings, [])
    mistakes = round(findings.scores["conjugp"]["error"] * 36)
    assert made["confusion"] is None and mistakes > 0
    assert sum(c["count"] for c in made["confusions"]) == mistakes


def test_pictures_take_the_colours_of_the_page():
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color="C0")
    ax.plot([0, 1], [1, 0], color="0.9")
    svg = str(picture(figure, "one", 'a "quoted" <name>'))
    assert "var(--accent)" in svg and "var(--n18)" in svg and "#1f77b4" not in svg
    assert 'id="one-' in svg and "&lt;name&gt;" in svg and "<metadata" not in svg
    assert svg == str(picture(figure, "one", 'a "quoted" <name>'))


def test_the_rows_that_are_listed(page, wine, subject):
    found = re.findall(r"<h3>Most surprising</h3>.*?<tbody>(.*?)</tbody>", page[0], re.S)
    places = [int(n) for n in re.findall(r"<tr[^>]*><td[^>]*>(\d+)</td>", found[0])]
    findings = find(subject)
    expected = subject.rows.place[np.argsort(-findings.surprise)[:8]] + 1
    assert places == expected.tolist()
    rows = read_rows((wine / "wine.csv").read_text())
    first = re.findall(r"<td[^>]*>([^<]*)</td>", found[0])[:3]
    assert first[1] == rows[places[0] - 1]["label"]
