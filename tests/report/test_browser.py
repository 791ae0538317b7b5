"""Reports in headless Chromium: no console message, no request, and everything that a person does on the page."""

import os
import shutil

import pytest
from small_cache import build, draw

from latentcache.report.page import render, report_facts

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=\"document.title='hit'\"> & 'quotes' </script><script>document.title='hit'</script>"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    """The page of nine images; the names and captions of two would be markup."""
    folder = tmp_path_factory.mktemp("browser")
    shapes = [(96, 64), (64, 96), (200, 64)]
    for number in range(9):
        name = f"p{number}" if number > 1 else f"p{number}<svg onload=alert(1)>"
        draw(folder / "data" / f"{name}.png", shapes[number % 3], seed=number)
        (folder / "data" / f"{name}.txt").write_text(HOSTILE if number < 2 else f"number {number}, cat")
    build(folder / "data", folder / "cache")
    draw(folder / "data" / "p4.png", (64, 96), seed=99)
    page = folder / "report.html"
    page.write_text(render(report_facts(folder / "cache")), "utf-8")
    return page


@pytest.fixture
def opened(browser, report_file):
    """Opens the page with options of the browser; at the end it has to have been silent."""
    problems, pages = [], []

    def open_page(**options):
        page = browser.new_page(**options)
        pages.append(page)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        allowed = ("data:", report_file.as_uri())
        page.on("request", lambda request: request.url.startswith(allowed) or problems.append(request.url))
        page.goto(report_file.as_uri())
        return page

    yield open_page
    titles = [page.title() for page in pages]
    for page in pages:
        page.close()
    assert problems == []
    assert all(title.endswith("latentcache report") for title in titles)


def names(page):
    return page.locator(".card:visible").evaluate_all("cards => cards.map(card => card.dataset.name)")


def test_hostile_names_and_captions_are_text(opened):
    page = opened()
    assert HOSTILE in page.locator(".caption").all_text_contents()
    assert page.locator("section svg[onload]").count() == page.locator("img[onerror]").count() == 0
    page.locator(".card .images").nth(0).click()
    assert page.locator("dialog img[onerror]").count() == 0


def test_search_filter_and_sort(opened):
    page = opened()
    assert len(names(page)) == 9
    assert names(page)[0] == "p4.png"  # it has a finding
    page.fill("#search", "number 5")
    assert names(page) == ["p5.png"]
    assert page.text_content("#count") == "1 of 9"
    page.fill("#search", "")
    page.select_option("#filter", "marked")
    assert "p4.png" in names(page)
    assert len(names(page)) < 9
    page.select_option("#filter", "")
    page.select_option("#sort", "name")
    assert names(page) == sorted(names(page))
    page.select_option("#sort", "loss")
    losses = page.locator(".card").evaluate_all("cards => cards.map(card => Number(card.dataset.loss))")
    assert losses == sorted(losses, reverse=True)


def test_a_click_enlarges_and_keys_move_on(opened):
    page = opened()
    shown = names(page)
    page.locator(".card .images").nth(1).focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#lightbox")
    assert dialog.is_visible()
    assert dialog.locator("b").text_content() == shown[1]
    page.keyboard.press("ArrowRight")
    assert dialog.locator("b").text_content() == shown[2]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert dialog.locator("b").text_content() == shown[0]
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    focused = page.evaluate("document.activeElement.closest('.card').dataset.name")
    assert focused == shown[0]


def test_names_of_a_selection_can_be_copied(browser, opened):
    page = opened()
    assert page.locator("#copy").is_disabled()
    page.locator(".pick input").nth(0).check()
    page.locator(".pick input").nth(2).check()
    assert page.text_content("#copy") == "Copy 2 names"
    page.click("#copy")
    page.wait_for_function("document.querySelector('#copy').textContent === 'Copied'")


def test_dark_mode_follows_the_system_and_the_button(opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert light.evaluate(ground) == "rgb(251, 250, 248)"
    assert dark.evaluate(ground) == "rgb(21, 23, 26)"
    light.click("#theme")
    assert light.evaluate(ground) == "rgb(21, 23, 26)"
    light.click("#theme")
    assert light.evaluate(ground) == "rgb(251, 250, 248)"


def test_a_phone_shows_all_of_it_without_sideways_scrolling(opened):
    page = opened(viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".card .images").nth(0).click()
    assert page.locator("#lightbox").bounding_box()["width"] <= 360


def test_crop_boxes_lie_inside_their_images(opened):
    page = opened()
    outside = page.locator(".frame:has(.crop)").evaluate_all(
        """frames => frames.filter(frame => {
            const box = frame.querySelector(".crop").getBoundingClientRect(), all = frame.getBoundingClientRect();
            return box.left < all.left - 2 || box.right > all.right + 2 || box.bottom > all.bottom + 2;
        }).length"""
    )
    assert page.locator(".frame:has(.crop)").count() == 9
    assert outside == 0
