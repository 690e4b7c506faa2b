"""The page in headless Chromium: nothing leaves it, it sorts, fits a phone, can be read in the dark, escapes names."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protofl.report import report

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'protofl[test]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH")

HOSTILE = "<script>alert(1)</script>\"'{{7*7}}</table>&amp;"
LINK = "[x](javascript:alert(2))<img src=x onerror=alert(3)>"
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CONTRAST = """
function light(c) { return c.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0); }
function parts(text) { const m = text.match(/[\\d.]+/g).map(Number); return { rgb: m.slice(0, 3), a: m[3] ?? 1 }; }
function behind(e) { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
  if (c.a === 1) return c.rgb; } return [255, 255, 255]; }
return [...document.querySelectorAll("p, li, td, th, th button, a, h1, h2, h3, figcaption, summary, code")]
  .filter(e => e.textContent.trim()).map(e => {
    const [a, b] = [light(parts(getComputedStyle(e).color).rgb), light(behind(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }).reduce((x, y) => Math.min(x, y), 99);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(writers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long list of runs, and runs whose names would break out of the page if they could."""
    _, write_run = writers
    folder = tmp_path_factory.mktemp("page")
    study = folder / "study"
    for i, method in enumerate(("fedprox", "moon", "fedproc", "fednh", "fedcspc")):
        write_run(study, method, 0, [0.1, 0.9 - i / 10])
    for seed in range(40):
        write_run(study, "fedavg", seed, [0.2, 0.3 + seed / 1000])
    names = {"classes": [HOSTILE] * 10, "fingerprint": "d41d8cd98f00b204", "note": LINK}
    options = {HOSTILE: LINK, **{f"option_{i}": f"value_{i}" for i in range(30)}}
    write_run(study, "fedproto", 0, [None] * 2, name=HOSTILE, options=options, document={"data": names})
    write_run(study, "fedper", 0, [0.1], status="running", name=LINK, protocol={"rounds": 2})
    for name in ("a", "b"):
        (study / name).mkdir()
        (study / name / "protocol.json").write_text("{")
    return report([study], folder / "out", title=HOSTILE, command=f"protofl report {HOSTILE}")


def look(browser: Any, page: Path, width: int = 1200, scheme: str = "light") -> None:
    """Open the page; nothing that was logged before counts."""
    for name in ("browser", "performance"):
        browser.get_log(name)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def column(browser: Any, table: str, head: str) -> list[str]:
    """The texts of a column, in the order of the page."""
    script = """
    const table = document.getElementById(arguments[0]);
    const i = [...table.tHead.rows[0].cells].findIndex(c => c.textContent.trim() === arguments[1]);
    return [...table.tBodies[0].rows].map(row => row.cells[i].textContent.trim());"""
    return list(browser.execute_script(script, table, head))


def press(browser: Any, table: str, head: str) -> str:
    """Press the head of a column -> what it then says of its order."""
    script = """
    const heads = [...document.getElementById(arguments[0]).tHead.rows[0].cells];
    const head = heads.find(c => c.textContent.trim() === arguments[1]);
    head.firstElementChild.click(); return head.getAttribute("aria-sort");"""
    return str(browser.execute_script(script, table, head))


def test_nothing_is_logged_and_nothing_leaves_the_file(browser: Any, page: Path) -> None:
    look(browser, page)
    assert browser.get_log("browser") == []
    told = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in told if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", page.as_uri()))] == []
    assert any(url.startswith("data:image/") for url in asked)


def test_names_are_shown_as_they_are(browser: Any, page: Path) -> None:
    look(browser, page)
    assert browser.title == HOSTILE and browser.find_element("tag name", "h1").text == HOSTILE
    assert {HOSTILE, LINK} <= set(column(browser, "table-accuracy", "method"))
    made = browser.execute_script("""
    const made = selector => document.querySelectorAll(selector).length;
    return [made("script"), made("img:not([src^='data:'])"), made("[onerror]"), made("a[href^='javascript']")]""")
    assert made == [1, 0, 0, 0]
    assert "alert(1)</script>" not in page.read_text("utf-8") and "49</table>" not in page.read_text("utf-8")


def test_the_policy_lets_no_other_script_run(browser: Any, page: Path) -> None:
    """What the escapes would let through, the policy stops: the page's own script is known by its hash."""
    look(browser, page)
    browser.execute_script("""
    const made = document.createElement("script");
    made.textContent = "window.ran = true";
    document.body.append(made);""")
    assert browser.execute_script("return window.ran === undefined")
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_sorting_keeps_missing_last(browser: Any, page: Path) -> None:
    look(browser, page)
    table, head = "table-accuracy", "last round (headline)"
    before = column(browser, table, head)
    for order, descending in (("ascending", False), ("descending", True), ("ascending", False)):
        assert press(browser, table, head) == order
        shown = column(browser, table, head)
        known = [float(v.split()[0]) for v in shown if v[0].isdigit()]
        assert known == sorted(known, reverse=descending) and len(known) == 7
        assert shown[len(known) :] == ["-"] and sorted(shown) == sorted(before)
    press(browser, table, "method")
    names = [name for name in column(browser, table, "method") if name.isalpha()]
    assert names == sorted(names, key=str.casefold) and len(names) == 6
    told = "return [...document.querySelectorAll('[aria-sort]')].map(head => head.textContent.trim())"
    assert browser.execute_script(told) == ["method"]


def test_sorting_by_keyboard(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    look(browser, page)
    head = browser.find_element("css selector", "#table-summary th:nth-child(2) button")
    for key, order in ((Keys.ENTER, "ascending"), (Keys.SPACE, "descending")):
        head.send_keys(key)
        assert (
            browser.find_element("css selector", "#table-summary th:nth-child(2)").get_attribute("aria-sort") == order
        )
    outline = "const style = getComputedStyle(document.activeElement); return [style.outlineStyle, style.outlineWidth]"
    assert browser.execute_script(outline) == ["solid", "2px"]


def test_a_long_list_of_runs_is_folded_and_found(browser: Any, page: Path) -> None:
    look(browser, page)
    table = browser.find_element("id", "table-runs")
    assert not table.is_displayed()
    digest = column(browser, "table-runs", "digest")[20]
    browser.execute_script("location.hash = arguments[0]", f"run-{digest}")
    # the page opens the list when it hears of the change, which is after the script returns
    assert browser.execute_async_script("const done = arguments[0]; setTimeout(() => done(true), 50)")
    assert table.is_displayed()
    script = """
    const row = document.getElementById(arguments[0]), heads = row.closest("table").tHead;
    return [heads.getBoundingClientRect().bottom, row.getBoundingClientRect().top]"""
    below, top = browser.execute_script(script, f"run-{digest}")
    assert 0 <= below <= top <= 900
    height = browser.execute_script("return document.querySelector('.tall').getBoundingClientRect().height")
    assert height <= 0.8 * 900 + 1


@pytest.mark.parametrize("width", [375, 1200])
def test_the_page_itself_does_not_scroll_sideways(browser: Any, page: Path, width: int) -> None:
    look(browser, page, width)
    browser.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true })")
    wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1] == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Any, page: Path, scheme: str) -> None:
    look(browser, page, scheme=scheme)
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    browser.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true })")
    assert browser.execute_script(CONTRAST) >= 4.5


def test_figures_load_and_links_lead_somewhere(browser: Any, page: Path) -> None:
    look(browser, page)
    script = "return [...document.images].map(i => [i.alt, i.naturalWidth])"
    images = browser.execute_script(script)
    assert len(images) >= 3 and all(alt and width > 100 for alt, width in images)
    targets = [html.unescape(target) for target in re.findall(r'href="([^"]+)"', page.read_text("utf-8"))]
    anchors = re.findall(r'id="([^"]+)"', page.read_text("utf-8"))
    assert len(anchors) == len(set(anchors))
    assert targets and all(t[1:] in anchors if t[0] == "#" else (page.parent / t).is_file() for t in targets)


def test_nothing_is_cut_off_on_paper(browser: Any, page: Path) -> None:
    """On A4, less its margins, the page and every table are no wider than the paper, and the folded list is there."""
    look(browser, page)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    size = {"width": 718, "height": 1047, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.find_element("id", "table-runs").is_displayed()
    wide = browser.execute_script(
        "return [...document.querySelectorAll('table, img')].map(e => [e.id, e.getBoundingClientRect().right])"
    )
    assert [(name, right) for name, right in wide if right > 718] == []
    assert browser.execute_script(
        "return document.querySelector('.tall').scrollHeight <= document.querySelector('.tall').clientHeight"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
