"""The report opens in a browser, as wide as a phone: no error, nothing fetched, columns sort, and a
link opens its experiment."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.tables import render
from tests.recipes.test_tables import TOY, results

__all__ = ["results"]  # a fixture

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PROBE = """<script>
location.hash = "golden";
const head = document.querySelectorAll("th button")[1];
const rows = () => [...document.querySelector("tbody").rows];
const order = () => rows().map((row) => row.cells[0].textContent);
head.click();
const up = order();
head.click();
console.log("probe " + JSON.stringify([up, order()]));
const page = document.documentElement;
const details = document.querySelector("details");
show();
console.log("probe open " + details.open);
console.log("probe fits " + (page.scrollWidth <= page.clientWidth));
console.log("probe requests " + performance.getEntriesByType("resource").length);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_it_opens_without_an_error_and_sorts(results: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    render.render([TOY], results, "smoke")
    page = tmp_path / "page.html"
    page.write_text((results / "report.html").read_text() + PROBE)
    ended = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"),
            *("--window-size=390,844", "--virtual-time-budget=1000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = re.findall(r'CONSOLE[^"]*"(.*)", source', ended.stderr)
    assert told == [
        'probe [["CO2_3","Local SGD","AllReduce"],["AllReduce","Local SGD","CO2_3"]]',
        "probe open true",
        "probe fits true",
        "probe requests 0",
    ]
