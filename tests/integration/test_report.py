"""The report in a real browser, without a window."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from hpcml.report.data import gather
from hpcml.report.page import page
from hpcml.runs.status import collect
from tests.unit.runs.fakes import START, FakeRun, at, make_cells

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1300,900",
)


class Browser:
    """A page, and what a person does to it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get(path.as_uri())
        assert self.driver.get_log("browser") == []

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def type(self, selector: str, words: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(words)

    def choose(self, section: str, label: str, option: str) -> None:
        path = f"//section[@id='{section}']//label[contains(., '{label}')]/select/option"
        self.driver.find_element("xpath", f"{path}[.='{option}']").click()

    def ground(self) -> str:
        return str(self.one("body").value_of_css_property("background-color"))


@pytest.fixture(scope="module")
def browser(
    chromium: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location, driver = chromium
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    with webdriver.Chrome(options=options, service=service) as started:
        yield Browser(started)


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Any:
    """Opens the report of a run; at the end nothing has gone wrong in it."""

    def open_(run: FakeRun) -> Browser:
        path = tmp_path / "report.html"
        path.write_bytes(page(gather(run.folder, collect(run.folder))))
        browser.open(path)
        return browser

    yield open_
    assert browser.driver.get_log("browser") == []


def sweep(root: Path, count: int) -> FakeRun:
    """A sweep of which most is done, some failed, one runs not yet, one came back."""
    cells = make_cells(count, optimizer=["adam" if n % 2 else "sgd" for n in range(count)])
    run = FakeRun(root, cells, objective={"metric": "loss", "mode": "min"}, kind="train")
    run.folder.write_submission({"cells": [[0, count - 1]], "created": at(0)})
    for index in range(count - 1):
        run.start(index, 5.0 + index, submission=1)
        run.metrics(
            index,
            *(
                {"step": s, "loss": (index + 1) / s, "accuracy": s / 5, "tokens_per_second": 99.0}
                for s in range(1, 6)
            ),
        )
        if index % 10 == 3:
            run.end(index, "application", 20.0 + index, reason="exit code 1: <b>boom</b>")
            (run.dir(index) / "log.1.err").write_text("Traceback\n<img src=x onerror=alert(1)>\n")
        else:
            saved = {"time": at(18.0 + index), "event": "checkpoint", "step": 5, "seconds": 2}
            run.append(index, "events.jsonl", saved)
            run.end(index, "done", 20.0 + index)
    return run


def test_a_metric_called_like_a_parameter_is_told_apart(tmp_path: Path, opened: Any) -> None:
    run = FakeRun(tmp_path, make_cells(3), objective={"metric": "loss", "mode": "min"})
    for index in range(3):
        run.done(index, loss=1.0, learning_rate=float(index))
    browser = opened(run)
    titles = [node.text for node in browser.all("#cells thead th")]
    assert titles.count("learning_rate") == titles.count("metric.learning_rate") == 1
    browser.choose("parallel", "metric", "metric.learning_rate")
    axes = [node.text for node in browser.all("#parallel text.name")]
    assert axes == ["learning_rate", "seed", "metric.learning_rate"]
    for words, shown in (("learning_rate<0.0015", 1), ("metric.learning_rate>=1", 2)):
        browser.type("input[name=words]", words)
        assert len(browser.all("#cells tbody tr")) == shown


def test_a_sweep(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 20))
    assert [node.text for node in browser.all("h2")] == [
        *("Summary", "Curves", "Parameters", "Two parameters", "Parallel coordinates"),
        *("Timeline", "Throughput and memory", "Cells", "Failures (2)", "Recipe and site"),
    ]
    assert "cell 0" in browser.text("#summary")
    assert len(browser.all("#curves path.curve")) == 10
    assert len(browser.all("#throughput path.curve")) == 10
    assert len(browser.all("#parameters svg")) == 3
    assert len(browser.all("#parameters circle")) == 3 * 19
    assert len(browser.all("#timeline rect.ran")) == 19
    assert len(browser.all("#timeline rect.waiting")) == 19
    assert len(browser.all("#timeline rect.saved")) == 17
    assert len(browser.all("#cells tbody tr")) == 20
    # What a program wrote is text.
    browser.one("#failures details details summary").click()
    assert "<img src=x onerror=alert(1)>" in browser.text("#failures details details")
    assert "<b>boom</b>" in browser.text("#failures summary")
    assert browser.all("#failures img") == []


def inference(root: Path, lines: int = 10) -> FakeRun:
    """Two workers gave their answers; a row failed."""
    run = FakeRun(root, make_cells(1), kind="infer")
    folder = run.dir(0)
    output = folder / "output.jsonl"
    good = {"choices": [{"message": {"content": "<b>Paris</b> & more"}}]}
    rows = [
        {"custom_id": "france", "error": None, "response": {"body": good}},
        {"custom_id": "none", "error": {"message": "too long"}, "response": None},
    ]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    proof = {
        "output": str(output),
        "rows_in": 41,
        "rows_out": 41,
        "answered": 40,
        "failed": 1,
        "errors": {"too_long": 1},
        "prompt_tokens": 1035,
        "output_tokens": 4000,
        "output_lengths": {"2": 2, "4": 12, "8": 26},
    }
    (folder / "merge.json").write_text(json.dumps(proof))
    (folder / "result.json").write_text(json.dumps({"metrics": {"answered": 40}, "step": 41}))
    for worker in (0, 1):
        place = folder / "workers" / str(worker)
        place.mkdir(parents=True)
        begun = START + 10 * worker
        started = {"time": at(10.0 * worker), "event": "started", "attempt": 1, "pid": 1}
        ended = {"time": at(60.0), "event": "ended", "attempt": 1, "code": 0, "cause": "done"}
        (place / "events.jsonl").write_text(json.dumps(started) + "\n" + json.dumps(ended) + "\n")
        with (place / "metrics.jsonl").open("w") as file:
            for n in range(1, lines + 1):
                times = {"begun_at": begun, "reported_at": begun + 5 * n}
                record = {"step": 2 * n, "output_tokens": 200 * n, "rows_per_second": 0.4, **times}
                file.write(json.dumps(record) + "\n")
    return run


def test_an_inference(tmp_path: Path, opened: Any) -> None:
    browser = opened(inference(tmp_path))
    assert "41\nrows of 41, each once\n40\nanswered\n1\nfailed" in browser.text("#answers-0")
    assert len(browser.all("#answers-0 path.curve")) == 1
    assert len(browser.all("#answers-0 rect.length")) == 3
    assert browser.text("#answers-0 table.errors") == "1 too_long"
    assert browser.text("#answers-0 td.answer") == "<b>Paris</b> & more"
    assert browser.text("#answers-0 td.failed") == "too long"
    assert len(browser.all("#timeline rect.ran")) == 2


def test_an_inference_that_was_quick(tmp_path: Path, opened: Any) -> None:
    run = inference(tmp_path, lines=1)
    shutil.rmtree(run.dir(0) / "workers" / "1")
    browser = opened(run)
    assert len(browser.all("#answers-0 circle.dot")) == 1


def test_two_parameters(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 20))
    browser.choose("heat", "across", "seed")
    browser.choose("heat", "up", "optimizer")
    assert len(browser.all("#heat rect.box")) == 6
    browser.choose("heat", "metric", "accuracy")
    assert "accuracy" in browser.one("#heat svg").get_attribute("aria-label")


def test_parallel_coordinates(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 20))
    assert len(browser.all("#parallel path.curve")) == 19
    axis = browser.all("#parallel rect.handle")[0]
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", axis)
    # The upper half of the first parameter.
    drag = webdriver.ActionChains(browser.driver)
    drag.move_to_element(axis).click_and_hold().move_by_offset(0, -160).release().perform()
    shown = int(browser.text("#shown").split()[0])
    assert 8 <= shown <= 10
    assert len(browser.all("#parallel path.curve")) == shown
    assert len(browser.all("#cells tbody tr")) == shown
    webdriver.ActionChains(browser.driver).move_to_element(
        browser.all("#parallel rect.handle")[0]
    ).click().perform()
    assert browser.text("#shown") == "20 of 20 cells"


def test_filters_and_choices(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 20))
    browser.one("#filter input[name=failed]").click()
    assert browser.text("#shown") == "18 of 20 cells"
    assert len(browser.all("#parameters circle")) == 3 * 17
    assert len(browser.all("#timeline rect.ran")) == 17
    browser.type("#filter input[name=words]", "optimizer=adam learning_rate<=0.008")
    assert browser.text("#shown") == "3 of 20 cells"
    assert len(browser.all("#curves path.curve")) == 3
    assert len(browser.all("#cells tbody tr")) == 3
    browser.one("#filter button").click()
    assert browser.text("#shown") == "20 of 20 cells"

    browser.choose("curves", "cells", "all that are shown")
    assert len(browser.all("#curves path.curve")) == 19
    browser.choose("curves", "metric", "accuracy")
    assert "accuracy" in browser.one("#curves svg").get_attribute("aria-label")
    before = browser.one("#curves path.curve").get_attribute("d")
    for box in browser.all("#curves input[type=checkbox]"):
        box.click()
        assert browser.one("#curves path.curve").get_attribute("d") != before
    slider = browser.one("#curves input[type=range]")
    rough = browser.one("#curves path.curve").get_attribute("d")
    slider.send_keys("\ue014" * 30)
    assert browser.one("#curves path.curve").get_attribute("d") != rough

    browser.one("#cells tbody tr:nth-child(4) input").send_keys(" ")
    assert len(browser.all("#curves path.picked")) == 1
    assert len(browser.all("#parameters circle.picked")) == 3
    browser.choose("curves", "cells", "those that are picked")
    assert len(browser.all("#curves path.curve")) == 1
    browser.one("#cells th:nth-child(3) button").click()
    assert browser.text("#cells tbody tr:first-child td:nth-child(3)") == "0"


def test_dark_and_light(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 3))
    light, toggle = browser.ground(), browser.one("#theme")
    toggle.click()
    assert browser.ground() != light
    toggle.click()
    assert browser.ground() == light
    media = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.driver.refresh()
    assert browser.ground() != light
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_thousand_cells(tmp_path: Path, opened: Any) -> None:
    browser = opened(sweep(tmp_path, 1000))
    assert len(browser.all("#parameters circle")) == 3 * 999
    # Only what can be seen of the timeline is there, and it follows when it is scrolled.
    assert 10 < len(browser.all("#timeline rect.ran")) < 40
    first = browser.text("#timeline text.name")
    browser.driver.execute_script(
        "document.querySelector('#timeline .scroll').scrollTop = 9000;"
        "document.querySelector('#timeline .scroll').dispatchEvent(new Event('scroll'))"
    )
    assert browser.text("#timeline text.name") != first
    browser.choose("curves", "cells", "all that are shown")
    assert len(browser.all("#curves path.curve")) == 999
    browser.type("#filter input[name=words]", "learning_rate>0.9901")
    assert browser.text("#shown") == "10 of 1000 cells"
    assert len(browser.all("#curves path.curve")) == 9


@pytest.mark.parametrize("begun", [False, True])
def test_runs_of_which_there_is_little(tmp_path: Path, opened: Any, begun: bool) -> None:
    run = FakeRun(tmp_path, make_cells(1))
    if begun:
        run.start(0)
    browser = opened(run)
    assert browser.text("#shown") == "1 of 1 cells"
    assert browser.all("#curves") == []
    assert len(browser.all("#timeline rect.ran")) == begun
    assert len(browser.all("#cells tbody tr")) == 1
