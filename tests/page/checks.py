"""Drives the pages of the examples `server` and `streams` as a person does, and reads what they show. Run by tests/page.sh."""

import concurrent.futures
import contextlib
import re
import sys
import time
import traceback

from browser import Driver, wait_for
from picture import small
from programs import ROOT, Redis, Server, Streams

TAB, ENTER, SPACE, RIGHT = "\ue004", "\ue007", " ", "\ue014"

# Milliseconds, for checks of what Redis decides. A busy machine may not run Redis or the server for longer than the default deadline.
PATIENT = "1000"

pictures = None


class Page:
    """The page of a server in a browser of its own."""

    def __init__(self, driver, server, *arguments):
        self.browser = driver.browser(*arguments)
        self.browser.resize(1000, 900)
        self.browser.open(server.url + "/")
        wait_for("figures", lambda: " of " in self.figure("hello", "used"))

    def figure(self, lane, name):
        script = "return document.querySelector(`[data-lane=${arguments[0]}] [data-figure=${arguments[1]}]`)?.textContent ?? ''"
        return self.browser.run(script, lane, name)

    def dots(self, lane):
        return int(self.browser.run("return document.querySelector(`[data-lane=${arguments[0]}]`).dataset.dots", lane))

    def more(self, lane):
        """The numbers above columns that are too small for their dots."""
        return self.browser.run("return document.querySelector(`[data-lane=${arguments[0]}]`).dataset.more", lane)

    def said(self):
        return self.browser.text("#said")

    def request(self):
        """Presses "One request"; what the page says about it."""
        self.browser.run("document.querySelector('#said').textContent = ''")
        self.browser.click("#one")
        return wait_for("an answer", lambda: re.search(r"(admitted|refused|rejected|let through)", self.said()) and self.said())

    def badges(self):
        return self.browser.run("return [...document.querySelectorAll('.group .badge')].map((badge) => badge.textContent)")

    def notice(self):
        return self.browser.run("const notice = document.querySelector('#connection'); return notice.hidden ? '' : notice.textContent")

    def check_console(self):
        errors = self.browser.errors()
        assert not errors, errors


def take_still(page, number):
    """The lane of the sliding window, for docs/window.md."""
    if pictures is not None:
        pictures[f"window_{number}"] = page.browser.screenshot("[data-lane=hello]")


def take_screenshots(page):
    """The lanes after a burst across the boundary, in all of their looks. In haste, since the dots move on."""
    browser = page.browser
    browser.prefer(prefers_color_scheme="light")
    pictures["light"] = browser.screenshot()
    browser.prefer(prefers_color_scheme="dark")
    time.sleep(0.2)
    pictures["dark"] = browser.screenshot()
    browser.prefer(prefers_color_scheme="light")
    browser.resize(360, 780, is_phone=True)
    browser.run("document.querySelector('.group').scrollIntoView()")
    time.sleep(0.2)
    pictures["phone"] = browser.screenshot()
    browser.resize(1000, 1160)
    browser.run("scrollTo(0, 230)")
    browser.click("#stop")
    wait_for("modes", lambda: "deciding" not in page.badges())
    for path in ["/hello", "/login", "/api/items"]:
        browser.run("await fetch(`send?client=1&count=3&path=${arguments[0]}`, { method: 'POST', headers: { 'x-page': '1' } })", path)
    time.sleep(0.2)
    pictures["redis_stopped"] = browser.screenshot()


def five_dots_then_a_refusal_and_a_dot_that_leaves_frees_a_place(driver):
    with Server(HELLO="5/4s") as server:
        page = Page(driver, server)
        assert page.request() == "1 admitted."
        time.sleep(0.5)
        for number in range(2, 6):
            assert page.request() == "1 admitted."
            wait_for(f"dot {number}", lambda: page.dots("hello") == number)
        take_still(page, 1)
        assert page.request() == "1 refused."
        wait_for("no place", lambda: page.figure("hello", "left") == "0")
        assert page.figure("hello", "used") == "5 of 5" and page.dots("hello") == 5
        take_still(page, 2)
        early, late = page.browser.run(PRESS_AROUND_THE_NEXT_PLACE)
        assert (early, late) == ("1 refused.", "1 admitted."), "the page has said when a place is free"
        take_still(page, 3)
        assert page.figure("hello", "most") == "5"
        page.check_console()


def a_burst_across_the_boundary_gets_ten_in_the_fixed_lane_and_five_in_ours(driver):
    with Redis() as redis, Server(REDIS_URL=redis.url, DEADLINE=PATIENT) as server:
        page = Page(driver, server)
        page.browser.resize(1000, 820)
        page.browser.click("#across")
        assert page.browser.text("#across").startswith("Burst in ")
        most = 0
        while not page.said().startswith("In 10 s"):
            most = max(most, page.dots("hello"))
            assert most <= 5
            time.sleep(0.05)
        assert page.said() == "In 10 s, the fixed window admitted 10, the sliding one 5. The limit is 5."
        assert most == 5 and page.dots("hello-fixed") == 10
        assert (page.figure("hello", "most"), page.figure("hello-fixed", "most")) == ("5", "10")
        if pictures is not None:
            take_screenshots(page)
        page.check_console()


def the_badges_show_that_redis_stops_and_comes_back(driver):
    with Redis() as redis, Server(REDIS_URL=redis.url) as server:
        page = Page(driver, server)
        press = lambda: page.browser.click("#stop")
        for stop, start in [(press, press), (lambda: redis.signal("SIGSTOP"), lambda: redis.signal("SIGCONT"))]:
            stop()
            wait_for("modes", lambda: [badge.split(":")[0] for badge in page.badges()] == ["open", "closed", "local"])
            wait_for("the breaker", lambda: all("breaker open" in badge for badge in page.badges()))
            assert page.figure("hello", "used") == "unknown"
            assert page.request() == "1 let through uncounted."
            page.browser.run("document.querySelector('#path').value = '/login'")
            assert page.request() == "1 rejected with 503."
            page.browser.run("document.querySelector('#path').value = '/api/items'")
            page.browser.click("#burst")
            wait_for("the share", lambda: page.said() == "5 admitted by this process alone, 15 refused.")
            page.browser.run("document.querySelector('#path').value = '/hello'")
            start()
            wait_for("decisions", lambda: page.badges() == ["deciding"] * 3)
        assert page.figure("hello", "used") == "0 of 5", "requests without a decision are not counted"
        page.check_console()


def two_servers_on_one_redis_show_one_window(driver):
    with contextlib.ExitStack() as programs:
        redis = programs.enter_context(Redis())
        servers = [programs.enter_context(Server(REDIS_URL=redis.url, DEADLINE=PATIENT)) for _ in range(2)]
        pages = [Page(driver, server) for server in servers]
        said = [page.request() for page in [pages[0]] * 3 + [pages[1]]]
        assert said == ["1 admitted."] * 4, said
        for page in pages:
            wait_for("four dots", lambda: page.figure("hello", "used") == "4 of 5" and page.dots("hello") == 4)
            assert page.figure("hello-counter", "most") == "–"
            assert "not drawn" in page.browser.text("[data-lane=hello-counter] .partial:not([hidden])")
        pages[0].browser.click("#another")
        wait_for("an empty window", lambda: pages[0].figure("hello", "used") == "0 of 5" and pages[0].dots("hello") == 0)
        assert pages[1].figure("hello", "used") == "4 of 5"
        for page in pages:
            page.check_console()


def the_page_waits_for_a_server_that_went_away(driver):
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(Server())
        page = Page(driver, server)
        page.request()
        wait_for("a dot", lambda: page.dots("hello") == 1)
        server.signal("SIGTERM")
        assert server.process.wait(5) == 0, "an open page keeps no server from shutting down"
        wait_for("a notice", lambda: "does not answer" in page.notice())
        assert page.said() == "The server does not answer."
        assert page.badges() == ["no connection"] * 3 and page.browser.text("#store-state") == "no connection"
        assert page.figure("hello", "next") == "–"
        for button in ["#one", "#across", "#another"]:
            page.browser.click(button)
        assert page.said() == "The server does not answer."
        assert page.browser.text("#across") == "Burst across the boundary" and page.browser.text("#client") == "client 1"
        servers.enter_context(Server(port=server.port))
        wait_for("the truth", lambda: page.figure("hello", "used") == "0 of 5" and page.dots("hello") == 0)
        assert page.notice() == ""
        assert page.request() == "1 admitted."
        wait_for("a dot", lambda: page.dots("hello") == 1)


def two_hundred_bursts_leave_the_page_usable(driver):
    with Server() as server:
        page = Page(driver, server)
        elements = "return document.querySelectorAll('*').length"
        before = page.browser.run(elements)
        page.browser.run("""
            const burst = () => fetch("send?client=1&count=20&path=/hello", { method: "POST", headers: { "x-page": "1" } });
            await Promise.all(Array.from({ length: 200 }, (_, n) => new Promise((done) => setTimeout(() => burst().then(done), n * 5))));
        """)
        assert page.request() in ("1 admitted.", "1 refused.")
        assert page.browser.run(elements) <= before + 5
        wait_for("all requests", lambda: page.browser.text("#store [data-figure=requests]") == "4001")
        assert page.figure("hello", "most") == "5"
        page.check_console()


def a_window_of_an_hour_has_a_lane(driver):
    with Server(HELLO="5/h") as server:
        page = Page(driver, server)
        page.browser.click("#burst")
        wait_for("an answer", lambda: page.said() == "5 admitted, 15 refused.")
        wait_for("no place", lambda: re.fullmatch(r"in (60|59\.\d+) min|in 1 h", page.figure("hello", "next")))
        assert "1 h ago" in page.browser.text("[data-lane=hello] .axis")
        assert page.browser.text("[data-lane=hello] .figures > :last-child > dt") == "most so far in any 1 h"
        page.browser.click("#across")
        # Between one and two hours, by the time of day.
        possible = r"This window is used\. The next burst across a boundary is possible in (1(\.\d)?|2) h\."
        wait_for("a time", lambda: re.fullmatch(possible, page.said()))
        page.check_console()


def dots_that_do_not_fit_are_a_number(driver):
    with Server(HELLO="100/h") as server:
        page = Page(driver, server)
        page.browser.click("#burst")
        wait_for("twelve more", lambda: (page.dots("hello"), page.more("hello")) == (20, "12"))
        assert page.browser.run("return document.querySelector('[data-lane=login]').dataset.more") == ""
        page.check_console()


def a_browser_without_server_sent_events_asks_instead(driver):
    with Server() as server:
        page = Page(driver, server)
        page.browser.cdp("Page.addScriptToEvaluateOnNewDocument", source="delete window.EventSource")
        page.browser.open(server.url + "/")
        wait_for("a notice", lambda: "no server-sent events" in page.notice())
        assert page.request() == "1 admitted."
        wait_for("a dot", lambda: page.figure("hello", "used") == "1 of 5" and page.dots("hello") == 1)
        page.check_console()


def reduced_motion_is_a_step_a_second(driver):
    with Server() as server:
        page = Page(driver, server)
        drawings = lambda: int(page.browser.run("return document.body.dataset.drawings || 0"))
        begun = drawings()
        wait_for("motion", lambda: drawings() > begun + 10)
        page.browser.prefer(prefers_reduced_motion="reduce")
        page.browser.open(server.url + "/")
        wait_for("a drawing", lambda: page.browser.run("return document.body.dataset.drawings"))
        begun = drawings()
        time.sleep(2.5)
        assert 2 <= drawings() - begun <= 3, drawings() - begun
        page.check_console()


def the_keyboard_reaches_everything(driver):
    with Server() as server:
        page = Page(driver, server)
        focused = lambda: page.browser.run("return document.activeElement.id")
        reached = []
        for _ in range(7):
            page.browser.press(TAB)
            reached.append(focused())
            outline = page.browser.run("return getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", f"{reached[-1]} does not show that it has the focus"
        assert reached == ["path", "another", "stop", "one", "burst", "across", "rate"]
        page.browser.press(RIGHT, RIGHT)
        assert page.browser.text("#rate-text") == "2 a second"
        wait_for("a stream", lambda: page.dots("hello") >= 2)
        for button, key in [("another", ENTER), ("one", ENTER), ("one", SPACE)]:
            page.browser.run("document.getElementById(arguments[0]).focus()", button)
            page.browser.press(key)
        assert page.browser.text("#client") == "client 2"
        wait_for("dots of the keyboard", lambda: page.dots("hello") >= 2)
        page.check_console()


def it_fits_a_phone_and_can_be_read_in_light_and_dark(driver):
    with Server() as server:
        page = Page(driver, server)
        for scheme in ["light", "dark"]:
            page.browser.prefer(prefers_color_scheme=scheme)
            for stopped in ["true", "false"]:
                page.browser.run("await fetch(`store?stopped=${arguments[0]}`, { method: 'POST', headers: { 'x-page': '1' } })", stopped)
                wait_for("badges", lambda: ("deciding" in page.badges()) == (stopped == "false"))
                assert page.browser.run(FAINT_TEXTS) == [], scheme
        for stopped in ["true", "false"]:
            page.browser.run("await fetch(`store?stopped=${arguments[0]}`, { method: 'POST', headers: { 'x-page': '1' } })", stopped)
            page.browser.resize(360, 780, is_phone=True)
            page.browser.open(server.url + "/")
            wait_for("badges", lambda: page.badges() and ("deciding" in page.badges()) == (stopped == "false"))
            assert page.browser.run("return document.documentElement.scrollWidth") == 360
            page.browser.click("#burst")
            wait_for("an answer", lambda: page.said() != "")
            assert page.browser.run("const bar = document.querySelector('#said').getBoundingClientRect(); return bar.top > 0 && bar.bottom <= 780")
        page.check_console()


# Presses "One request" shortly before and shortly after the moment that the page says. By the timers of the page, since a
# round trip of the driver may take longer.
PRESS_AROUND_THE_NEXT_PLACE = """
    const begun = performance.now(), said = document.querySelector("#said");
    const millis = 1000 * document.querySelector("[data-lane=hello] [data-figure=next]").textContent.match(/^in (.*) s$/)[1];
    const pressAt = async (time) => {
      await new Promise((done) => setTimeout(done, begun + time - performance.now()));
      said.textContent = "";
      document.querySelector("#one").click();
      while (!said.textContent) await new Promise((done) => setTimeout(done, 5));
      return said.textContent;
    };
    return [await pressAt(millis - 400), await pressAt(millis + 50)];
"""

# WCAG AA: a contrast of 4.5 between a text and what is behind it.
FAINT_TEXTS = """
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
      const [r, g, b] = channels(colour).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
      for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor;
        if (channels(colour)[3] !== 0) return colour;
      }
    };
    return [...document.querySelectorAll("body *")]
      .filter((element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && element.checkVisibility())
      .filter((element) => {
        const pair = [getComputedStyle(element).color, behind(element)].map(light).sort((a, b) => b - a);
        return (pair[0] + 0.05) / (pair[1] + 0.05) < 4.5;
      })
      .map((element) => element.outerHTML.slice(0, 80));
"""

def a_page_that_is_left_keeps_its_place_unless_it_closes_its_stream(driver):
    def states(browser, server):
        """The states of four pages, each of which the user leaves for the next."""
        for number in range(4):
            browser.run("setTimeout(() => { location.href = arguments[0]; })", f"{server.url}/?{number}")
            wait_for("the next page", lambda: browser.run("return location.search") == f"?{number}")
            yield wait_for("a state", lambda: (state := browser.text("p")) != "waiting" and re.match(r"\w+", state)[0])

    careless = "const add = addEventListener; addEventListener = (kind, act) => kind === 'pagehide' || add(kind, act)"
    with Streams() as server:
        browser = driver.browser()
        browser.open(server.url + "/")
        assert list(states(browser, server)) == ["event"] * 4
    with Streams() as server:
        browser = driver.browser()
        browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=careless)
        browser.open(server.url + "/")
        # The page before the first has a place, too.
        assert list(states(browser, server)) == ["event", "refused", "refused", "refused"]


CHECKS = [
    a_burst_across_the_boundary_gets_ten_in_the_fixed_lane_and_five_in_ours,
    five_dots_then_a_refusal_and_a_dot_that_leaves_frees_a_place,
    the_badges_show_that_redis_stops_and_comes_back,
    two_servers_on_one_redis_show_one_window,
    the_page_waits_for_a_server_that_went_away,
    two_hundred_bursts_leave_the_page_usable,
    a_window_of_an_hour_has_a_lane,
    dots_that_do_not_fit_are_a_number,
    a_browser_without_server_sent_events_asks_instead,
    reduced_motion_is_a_step_a_second,
    the_keyboard_reaches_everything,
    it_fits_a_phone_and_can_be_read_in_light_and_dark,
    a_page_that_is_left_keeps_its_place_unless_it_closes_its_stream,
]


def passes(check):
    begun, driver = time.monotonic(), Driver()
    try:
        check(driver)
    except Exception:
        print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
        return False
    finally:
        driver.close()
    print(f"ok     {check.__name__} ({time.monotonic() - begun:.1f} s)", flush=True)
    return True


def main(arguments):
    global pictures
    folder = None
    if arguments[:1] == ["--screenshots"]:
        folder, pictures, arguments = ROOT / arguments[1], {}, arguments[2:]
    checks = [check for check in CHECKS if all(word in check.__name__ for word in arguments)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        failed = [check for check, passed in zip(checks, pool.map(passes, checks)) if not passed]
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (folder / f"{name}.png").write_bytes(small(picture))
    print(f"{len(checks) - len(failed)} of {len(checks)} checks of the page passed")
    return 0 if checks and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
