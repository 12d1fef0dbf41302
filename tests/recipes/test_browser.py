"""The page in a real browser: every picture loads, nothing is wider than the window, nothing is fetched."""

import html
import io
import json
import re
import shutil
import subprocess

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from matplotlib import image
from rich.console import Console

from pipeback.recipes.report import report
from tests.recipes.synthetic import facts, rows, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; Debian has it: apt-get install chromium")
PICTURES = ["gap", "delay", "schedules"]
CHARTS = ["samples_seen"] * 3 + ["wall_time"] * 3 + ["step"] * 3 + ["final"] + ["target"] * 2 + ["cost"] * 3

# what the page is like once it has loaded, told to the frame around it; what is folded is unfolded
PROBE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(e => { e.open = true; });
  const pictures = [...document.images];
  const found = {
    pictures: pictures.map(i => ({id: i.id, wide: i.naturalWidth, high: i.naturalHeight, shown: i.clientWidth,
                                  alt: i.alt, narrow: i.currentSrc !== i.src})),
    charts: [...document.querySelectorAll(".plot, .rows")].map(e => ({id: e.closest("[id]").id, shown: e.clientWidth,
      high: e.clientHeight, size: [...new Set([...e.querySelectorAll("text")].map(t => getComputedStyle(t).fontSize))],
      marks: [...e.querySelectorAll("polyline, rect, circle")].filter(m => m.getBoundingClientRect().width > 0).length,
      told: e.querySelectorAll("title").length})),
    window: innerWidth, page: document.documentElement.scrollWidth,
    outside: [...document.querySelectorAll("body *")].filter(e => !e.closest(".wide, pre, head")
      && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 120)),
    cut: [...document.querySelectorAll(".wide, pre")].filter(e => e.scrollWidth > e.clientWidth
      && getComputedStyle(e).overflowX !== "auto").length,
    fetched: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
  };
  parent.postMessage(JSON.stringify(found), "*");
});</script>"""
# a window cannot be as narrow as a telephone, a frame can
FRAME = """<!doctype html><script>addEventListener("message", message => {
  document.body.append(Object.assign(document.createElement("output"), {textContent: message.data}));
});</script><body><iframe src="probed.html" width="%d" height="1000" style="border: 0"></iframe></body>"""


def browse(page, profile, *options, width, height=1000):
    """Headless, without a network: no name resolves. The flags are those that a container needs."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},{height}", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    finals = {"sgd": 0.96, "pb": 0.90, "cerebras": 0.97, "a_method_with_a_rather_long_name_slack2": 0.85}
    for name, final in finals.items():
        for seed in (0, 1):
            values = [final * (1 - 0.5**n) - 0.01 * seed for n in range(1, 9)]
            gaps = [0.0] * 4 if name == "sgd" else [3.0, 2.0, 1.0, 0.0]
            write(folder / "runs" / f"{name}-seed{seed}", facts(name, seed), rows(values, gaps=gaps, every=5))
    report([folder / "runs"], folder / "report.html", Console(file=io.StringIO()))
    return folder / "report.html"


@pytest.mark.parametrize("width", [400, 1200])
def test_page_in_a_browser(page, width, tmp_path):
    (tmp_path / "probed.html").write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME % width)
    options = ("--dump-dom", "--virtual-time-budget=20000")
    dom = browse(tmp_path / "frame.html", tmp_path / "profile", *options, width=1300)
    found = json.loads(html.unescape(re.search("<output>(.*?)</output>", dom, re.DOTALL)[1]))
    assert [picture["id"] for picture in found["pictures"]] == PICTURES
    for picture in found["pictures"]:
        assert picture["wide"] > 300 and picture["high"] > 100 and picture["alt"], picture
        assert 300 < picture["shown"] <= width, picture
        assert picture["narrow"] == (width < 700), picture  # a telephone is shown the narrow pictures
    assert [chart["id"] for chart in found["charts"]] == CHARTS
    for chart in found["charts"]:
        assert 200 < chart["shown"] < width and chart["high"] > 100 and chart["marks"] > 1 and chart["told"] > 1, chart
        assert chart["size"] == ["13px"], chart  # letters keep their size in a narrow window
    assert found["window"] == width
    assert found["page"] <= width and found["outside"] == [] and found["cut"] == 0
    assert found["fetched"] == []


@pytest.mark.parametrize("width", [400, 1200])
def test_screenshot_shows_something(page, width, tmp_path):
    file = tmp_path / "page.png"
    browse(page, tmp_path / "profile", f"--screenshot={file}", width=width, height=2400)
    pixels = image.imread(file)[..., :3]  # (height, width, 3)
    assert pixels.shape[:2] == (2400, width)
    for part in range(4):  # text or pictures in every quarter of it, on white
        quarter = pixels[600 * part : 600 * (part + 1)]
        marked = (quarter.min(axis=2) < 0.9).mean()
        assert 0.01 < marked < 0.6, (part, marked)
    orange = abs(pixels - [0.835, 0.369, 0.0]).max(axis=2) < 0.05  # the line of cerebras
    assert orange.sum() > 100
