"""The page of a report in Chromium: it renders, its script works, nothing is said on the console, names stay text."""

from __future__ import annotations

import re

from inductor_plugin import report, report_page
from tests.report.browser import opened
from tests.report.making import CPU, cache, put, timing
from tuning_cache.shapes import Shape

USED = """<script>
document.querySelector("tr.problem").click();
filter.value = "h200"; filter.dispatchEvent(new Event("input"));
document.title = getComputedStyle(document.querySelector("tr.problem .won")).fontWeight + " "
  + [...document.querySelectorAll("figure svg")].map(x => x.getBoundingClientRect().width > 300).join();
</script>"""


def test_it_renders_without_a_word_on_the_console(tmp_path):
    page = tmp_path / "r.html"
    page.write_text(report_page.page(report.collect(cache(tmp_path / "c"), 100)))
    document, said = opened(page, tmp_path / "profile")
    assert said == []
    assert document.count("<svg") == 2 and "6 of 6 problems" in document  # the count is the script's
    assert document.count('<tr class="problem"') == 6 and document.count('<tr class="more" hidden') == 6
    words = re.sub(r"<[^>]+>", " ", document)
    for figure in ("640.0", "960.0", "768.0", "130.0", "measured on CPU", "measured on H200", "A CPU &amp; more"):
        assert figure in words


def test_rows_open_and_the_filter_hides(tmp_path):
    page = tmp_path / "r.html"
    text = report_page.page(report.collect(cache(tmp_path / "c"), 100))
    page.write_text(text.replace("</body>", USED + "</body>"))
    document, said = opened(page, tmp_path / "profile")
    assert said == [] and "2 of 6 problems" in document and "<title>600 true,true</title>" in document
    shown = re.findall(r'<tr class="problem"[^>]*>', document)
    assert sum("hidden" in row for row in shown) == 4


def test_what_the_cache_holds_stays_text(tmp_path):
    store = cache(tmp_path / "c")
    evil = '</script><script>console.error("in")</script><img src=x onerror=alert(1)>$x_{2$'
    cpu = {**CPU, "product": evil}
    put(store, Shape("mm", 3, 8, 8, "f32", bias="none"), "x86", cpu, [timing(f"flykernels {evil}", 1.0, evil)], evil)
    put(store, Shape("mm", 4, 8, 8, "f32", bias="none"), "x86", cpu, [timing(f"flykernels {evil}", 1.0)], evil)
    page = tmp_path / "r.html"
    page.write_text(report_page.page(report.collect(store, 100)))
    document, said = opened(page, tmp_path / "profile")
    assert said == [] and "<img" not in document and "8 of 8 problems" in document
