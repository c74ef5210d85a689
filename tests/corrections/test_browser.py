"""A real Chromium: taking over by keyboard, labels, episodes, hidden tabs, two browsers, a phone, accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, WebSocketRoute

from episodes.schema import HOLD, HUMAN, POLICY
from episodes.store import EpisodeStore, Selection
from real_robot.corrections.server import CorrectionServer
from tests.browser import TIMEOUT_MS, needs_chromium, wait_until
from tests.corrections.small_server import server, write_bundle
from tests.episodes.episode_examples import make_episode

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorrectionServer]:
    with server(tmp_path_factory.mktemp("browser"), show_expert=True, pace=0.4) as one:
        yield one


@pytest.fixture
def open_page(chromium: Browser, running: CorrectionServer) -> Iterator[Callable[..., Page]]:
    """A browser window of its own for each person; all are closed after the test."""
    contexts, errors = [], []

    def open_one(name: str, **options: object) -> Page:
        contexts.append(chromium.new_context(**options))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(running.invite(name))
        page.wait_for_selector("#camera-0")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []


def wait_for_mode(page: Page, mode: str) -> str:
    page.wait_for_selector(f"#mode[data-mode={mode}]")
    return page.text_content("#mode") or ""


def next_episode(page: Page) -> None:
    """Whatever the tests before left."""
    number = (page.text_content("#clock") or "").split(",")[0]
    page.keyboard.press("n")
    wait_until(page, f"!document.getElementById('clock').textContent.startsWith('{number},')")
    wait_for_mode(page, "policy")


def list_episodes(page: Page, task: str) -> None:
    """Until ``task`` can be chosen."""
    page.click("#link-episodes")
    wait_until(page, f"[...document.getElementById('f-task').options].some(option => option.value === '{task}')")


def show_only_episode(page: Page, task: str) -> None:
    """The details of the only episode of ``task``."""
    list_episodes(page, task)
    page.select_option("#f-task", task)
    wait_until(page, "document.getElementById('count').textContent === '1 episodes'")
    page.click("#list tbody tr:first-child button")
    page.wait_for_selector("#detail:not([hidden])")


def drive_by_keyboard(page: Page, running: CorrectionServer) -> None:
    """Press the keys that go where the expert would go, until the episode ends."""
    pressed: set[str] = set()
    page.keyboard.down("Shift")
    while running.robot.states.newest["mode"] == "human":
        x, y, z = running.robot.states.newest["expert"][:3]
        wanted = {key for key, push in (("s", x), ("w", -x), ("d", y), ("a", -y), ("r", z), ("f", -z)) if push > 0.04}
        for key in pressed - wanted:
            page.keyboard.up(key)
        for key in wanted - pressed:
            page.keyboard.down(key)
        pressed = wanted
        page.wait_for_timeout(20)
    for key in (*pressed, "Shift"):
        page.keyboard.up(key)


def test_a_person_takes_over_finishes_labels_and_finds_the_episode(
    open_page: Callable[..., Page], running: CorrectionServer
):
    page = open_page("Anna")
    wait_for_mode(page, "policy")
    wait_until(page, "Number(document.getElementById('rewind-step').max) >= 6")
    page.keyboard.press("t")
    assert wait_for_mode(page, "human") == "You drive"
    drive_by_keyboard(page, running)
    assert wait_for_mode(page, "ended") == "The episode has ended: success"
    page.keyboard.press("1")
    page.click("#link-episodes")
    page.select_option("#f-who", "corrected")
    page.click("#list tbody tr:first-child button")
    page.wait_for_selector("#detail:not([hidden])")
    assert "(Anna)" in (page.text_content("#d-facts") or "")
    wait_until(page, "document.getElementById('d-frame').width === 32")

    with EpisodeStore(running.folder / "episodes") as store:
        (entry,) = [entry for entry in store.select() if (store.read(entry.id).actor == HUMAN).any()]
        episode = store.read(entry.id)
        assert entry.success
        assert store.labels(entry.id)["outcome"] == "success"
        assert set(episode.actor[:6]) == {POLICY}
        after = episode.actor[episode.actor.tolist().index(HUMAN) :]
        assert set(after) <= {HUMAN, HOLD}
        assert episode.operators == ("Anna",)
        # what the page says of each step is what is stored
        said = page.get_attribute("#d-strip", "aria-label") or ""
        human = int((episode.actor == HUMAN).sum())
        assert said == f"{episode.num_steps} steps, {human} of them driven by a person"

        page.click("#d-failure")
        wait_until(page, "document.getElementById('d-facts').textContent.startsWith('Failure, relabelled')")
        assert store.labels(entry.id)["success"] is False
        page.click("#d-delete")
        page.wait_for_selector("#empty:not([hidden])")
        page.click("#d-undo")
        page.click("#d-undo")
        wait_until(page, "document.getElementById('d-facts').textContent.startsWith('Success;')")
        assert store.labels(entry.id) == {"outcome": "success", "success": True}
        assert len(store.history(entry.id)) == 6


def press_long(page: Page, selector: str) -> None:
    """A click during which new states arrive."""
    page.locator(selector).hover()
    page.mouse.down()
    page.wait_for_timeout(300)
    page.mouse.up()


def test_a_mouse_rewinds_to_the_chosen_step_and_sets_the_instruction_that_was_typed(
    open_page: Callable[..., Page], running: CorrectionServer
):
    page = open_page("Mia")
    next_episode(page)
    wait_until(page, "Number(document.getElementById('rewind-step').max) >= 20")
    assert page.evaluate("(({value, max}) => value === max)(document.getElementById('rewind-step'))")
    page.fill("#instruction", "push the red cube")
    press_long(page, "#instruct button")
    wait_until(page, "document.activeElement.id !== 'instruction'")
    page.fill("#rewind-step", "5")
    press_long(page, "#rewind")
    assert wait_for_mode(page, "hold") == "The arm holds: rewound to step 5"
    assert running.robot.session.attempt.instruction == "push the red cube"
    page.keyboard.press("b")
    wait_until(page, "Number(document.getElementById('rewind-step').value) > 8")  # it follows again


def test_an_episode_is_trimmed_and_split_on_its_timeline(open_page: Callable[..., Page], running: CorrectionServer):
    with EpisodeStore(running.folder / "episodes") as store:
        id = store.add(make_episode(steps=9, task="cut"))
        page = open_page("Cleo")
        show_only_episode(page, "cut")
        assert page.is_disabled("#d-start")  # at the first image nothing can be cut off
        page.fill("#d-step", "2")
        page.click("#d-start")
        wait_until(page, "document.getElementById('d-facts').textContent.includes('2 to 9 of 9 steps')")
        page.fill("#d-step", "5")
        page.click("#d-end")
        wait_until(page, "document.getElementById('d-facts').textContent.includes('2 to 7 of 9 steps')")
        page.fill("#d-step", "3")
        page.click("#d-split")
        wait_until(page, "document.getElementById('d-facts').textContent.includes('5 to 7 of 9 steps')")
        page.click("#d-failure")
        wait_until(page, "document.getElementById('d-facts').textContent.startsWith('Failure, relabelled')")
        assert [(entry.id, entry.steps, entry.success) for entry in store.select(Selection(tasks=("cut",)))] == [
            (f"{id}.2-5", 3, True),
            (f"{id}.5-7", 2, False),
        ]
        assert page.text_content("#count") == "2 episodes"
        assert "split: 5 (Cleo" in (page.text_content("#d-history") or "")
        for left in ("5 to 7 of 9 steps", "2 to 7 of 9 steps", "2 to 9 of 9 steps"):
            page.click("#d-undo")
            wait_until(page, f"document.getElementById('d-facts').textContent.includes('{left}')")
        page.click("#d-undo")
        wait_until(page, "!document.getElementById('d-facts').textContent.includes('of 9 steps')")
        assert store.read(id).num_steps == 9
        store.delete(id, author="the test")


def test_an_episode_that_somebody_cuts_meanwhile_is_shown_anew_and_not_cut_elsewhere(
    open_page: Callable[..., Page], running: CorrectionServer
):
    with EpisodeStore(running.folder / "episodes") as store:
        id = store.add(make_episode(steps=9, task="two cut"))
        page = open_page("Ann")
        show_only_episode(page, "two cut")
        page.fill("#d-step", "6")
        store.trim(id, 3, 9, author="Ben")
        page.click("#d-end")
        wait_until(page, "document.getElementById('d-facts').textContent.includes('3 to 9 of 9 steps')")
        assert "somebody has cut this episode meanwhile" in (page.text_content("#problem") or "")
        assert store.labels(id) == {"trim": "3-9"}
        page.fill("#d-step", "4")
        page.click("#d-end")
        wait_until(page, "document.getElementById('d-facts').textContent.includes('3 to 7 of 9 steps')")
        store.delete(id, author="the test")


def test_a_label_never_reaches_the_episode_shown_before(open_page: Callable[..., Page], running: CorrectionServer):
    """However late the answers come: here the label's, then that of the episode opened next."""
    with EpisodeStore(running.folder / "episodes") as store:
        first, second = (store.add(make_episode(steps=steps, task="late")) for steps in (4, 5))
        page = open_page("Lena")
        list_episodes(page, "late")
        page.select_option("#f-task", "late")
        wait_until(page, "document.getElementById('count').textContent === '2 episodes'")
        rows = page.locator("#list tbody tr")
        order = [first, second] if rows.nth(0).locator("td").nth(3).text_content() == "4" else [second, first]
        rows.nth(0).locator("button").click()
        page.wait_for_selector("#detail:not([hidden])")
        held: list[Route] = []
        page.route(re.compile(r"/api/episodes/\w+(/label/\w+)?$"), lambda route: held.append(route))
        page.click("#d-failure")
        wait_until(page, lambda: len(held) == 1)
        rows.nth(1).locator("button").click()
        assert page.is_hidden("#detail")  # what is shown can no longer be changed
        held.pop().continue_()
        wait_until(page, lambda: len(held) == 1)
        assert page.is_hidden("#detail")
        held.pop().continue_()
        page.unroute_all()
        page.wait_for_selector("#detail:not([hidden])")
        page.click("#d-delete")
        wait_until(page, "document.getElementById('d-facts').textContent.startsWith('Success, deleted;')")
        assert [[label.key for label in store.history(id)] for id in order] == [["success"], ["deleted"]]
        store.delete(order[0], author="the test")


def test_a_late_answer_to_an_earlier_filter_is_not_shown(open_page: Callable[..., Page], running: CorrectionServer):
    with EpisodeStore(running.folder / "episodes") as store:
        ids = [store.add(make_episode(steps=steps, task=task)) for steps, task in ((4, "one"), (5, "one"), (6, "two"))]
        page = open_page("Lars")
        list_episodes(page, "two")
        held: list[Route] = []
        page.route(re.compile(r"task=one"), lambda route: held.append(route))
        page.select_option("#f-task", "one")
        wait_until(page, lambda: len(held) == 1)
        page.select_option("#f-task", "two")
        wait_until(page, "document.getElementById('count').textContent === '1 episodes'")
        with page.expect_response(re.compile(r"task=one")) as answer:
            held.pop().continue_()
        answer.value.finished()
        page.wait_for_timeout(200)
        assert page.text_content("#count") == "1 episodes"
        page.unroute_all()
        for id in ids:
            store.delete(id, author="the test")


def test_reload_keeps_the_session_and_lets_go_of_the_robot(open_page: Callable[..., Page], running: CorrectionServer):
    page = open_page("Rita")
    next_episode(page)
    page.keyboard.press("t")
    wait_for_mode(page, "human")
    page.reload()
    page.wait_for_selector("#camera-0")
    assert page.text_content("#me") == "Rita (operator)"
    assert "The arm holds" in wait_for_mode(page, "hold")
    page.keyboard.press("b")
    wait_for_mode(page, "policy")


def test_the_page_opens_from_the_page_of_another_machine(chromium: Browser, running: CorrectionServer):
    """As that of a fleet's hub does it. For a browser these two names are two sites."""
    context = chromium.new_context()
    page, address = context.new_page(), running.invite("Fleur")
    assert "//127.0.0.1" in address
    page.goto(f"http://localhost:{running.origins.port}")
    with context.expect_page() as opened:
        page.evaluate("address => void window.open(address, '_blank', 'noopener')", address)
    opened.value.wait_for_selector("#camera-0", timeout=TIMEOUT_MS)
    context.close()


def test_a_session_that_ends_is_said_and_nothing_is_asked_again(
    open_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("real_robot.corrections.access.SESSION_LIFE_S", 10.0)
    page = open_page("Sina")
    opened: list[str] = []
    page.on("websocket", lambda socket: opened.append(socket.url))
    page.wait_for_selector("text=The session has ended. Open a new address.")
    page.wait_for_timeout(2500)  # twice the time after which lost connections are opened again
    assert opened == []


def test_what_is_pressed_without_a_connection_is_not_done_later(
    open_page: Callable[..., Page], running: CorrectionServer
) -> None:
    page = open_page("Lena")
    sockets: list[WebSocketRoute] = []

    def route(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        socket.connect_to_server()

    page.route_web_socket("**/ws/control", route)
    page.reload()
    page.wait_for_selector("#camera-0")
    next_episode(page)
    page.keyboard.press("p")
    wait_for_mode(page, "hold")
    sockets[-1].close()
    wait_until(page, "document.getElementById('problem').textContent.includes('is lost')")
    page.keyboard.press("b")
    wait_until(page, "document.getElementById('problem').textContent === ''")
    before = len((running.folder / "audit.jsonl").read_text().splitlines())
    page.keyboard.press("3")
    wait_for_mode(page, "ended")
    events = [json.loads(line) for line in (running.folder / "audit.jsonl").read_text().splitlines()[before:]]
    assert [event["event"] for event in events if event["person"] == "Lena"] == ["controls the robot", "labelled"]


def test_two_commands_before_the_lease_is_granted_are_both_done(open_page: Callable[..., Page]) -> None:
    page = open_page("Zoe")
    next_episode(page)
    page.keyboard.press("Escape")
    wait_until(page, "document.getElementById('holder').textContent === 'Nobody controls the robot'")
    page.evaluate("() => ['take_over', 'pause'].forEach((id) => document.getElementById(id).click())")
    assert "paused" in wait_for_mode(page, "hold")
    assert page.text_content("#problem") == ""


def test_a_refusal_is_shown_until_the_next_command(open_page: Callable[..., Page]) -> None:
    page = open_page("Rosa")
    next_episode(page)
    page.fill("#instruction", " ")
    page.press("#instruction", "Enter")
    wait_until(page, "document.getElementById('problem').textContent.includes('one line of 1 to 200 characters')")
    page.click("#take_over")
    wait_for_mode(page, "human")
    assert page.is_hidden("#problem")


def test_a_hidden_tab_holds_the_arm_at_once(open_page: Callable[..., Page], running: CorrectionServer):
    page = open_page("Hana")
    next_episode(page)
    page.keyboard.press("t")
    wait_for_mode(page, "human")
    page.keyboard.down("Shift")
    page.keyboard.down("r")
    robot = running.robot
    wait_until(page, "document.getElementById('strip').getAttribute('aria-label').match(/, [3-9] of/)")
    hidden_at = page.evaluate(
        """() => {
            Object.defineProperty(document, 'hidden', {value: true});
            const at = Number(document.getElementById('rewind-step').max);
            document.dispatchEvent(new Event('visibilitychange'));
            return at;
        }"""
    )
    assert wait_for_mode(page, "hold") == "The arm holds: the tab is hidden"
    page.wait_for_timeout(500)
    steps = robot.session.attempt.steps
    moving = [step.actor for step in steps[hidden_at:] if abs(step.action[:6]).max() > 0]
    # 200 ms of simulated time are 4 steps: those under way, and the ramp to rest
    assert len(moving) <= 4
    assert not steps[-1].action[:6].any()
    assert POLICY not in [step.actor for step in steps[hidden_at:]]


def test_of_two_browsers_one_moves_the_robot(open_page: Callable[..., Page], running: CorrectionServer):
    first, second = (open_page(name) for name in ("Uma", "Vito"))
    next_episode(first)
    first.keyboard.press("t")
    wait_for_mode(first, "human")
    assert wait_for_mode(second, "human") == "Uma drives"
    second.keyboard.press("t")
    wait_until(second, "document.getElementById('problem').textContent.includes('another browser')")
    before = running.robot.session.attempt.length
    second.keyboard.down("Shift")
    second.keyboard.down("r")
    second.wait_for_timeout(500)
    assert running.robot.session.attempt.length - before <= 2  # at most the way to rest
    assert HUMAN not in [step.actor for step in running.robot.session.attempt.steps]
    first.keyboard.press("Escape")
    assert "let go" in wait_for_mode(second, "hold")
    second.keyboard.press("t")
    assert wait_for_mode(second, "human") == "You drive"


def lines_drawn(page: Page) -> list[int]:
    """Of each camera, how many of the pixels over its image are drawn on."""
    counted: list[int] = page.evaluate(
        """[...document.querySelectorAll('canvas.lines')].map((canvas) =>
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
                .filter((value, i) => i % 4 === 3 && value > 0).length)"""
    )
    return counted


def test_plan_and_path_are_drawn_over_the_images_and_can_be_switched_off(open_page: Callable[..., Page]):
    page = open_page("Dora")
    next_episode(page)
    wait_until(page, "Number(document.getElementById('rewind-step').max) >= 8")
    page.keyboard.press("p")
    wait_for_mode(page, "hold")
    page.wait_for_timeout(300)
    assert min(lines_drawn(page)) > 0
    page.uncheck("#show-paths")
    assert lines_drawn(page) == [0, 0]
    page.check("#show-paths")
    assert min(lines_drawn(page)) > 0


def test_the_training_page_shows_versions_and_rolls_back(open_page: Callable[..., Page], running: CorrectionServer):
    page = open_page("Tove")
    page.click("#link-training")
    wait_until(page, "document.querySelectorAll('#t-versions tbody tr').length === 1")
    assert page.is_disabled("#t-rollback")
    before = page.text_content("#t-versions tbody tr td") or ""
    write_bundle(running.folder / "bundle", seed=5)
    wait_until(page, "document.querySelectorAll('#t-versions tbody tr').length === 2")
    newest = "#t-versions tbody tr:first-child"
    assert "drives" in (page.text_content(newest) or "")
    assert (page.text_content("#t-versions tbody tr:last-child") or "").startswith(before)
    page.click("#t-rollback")
    wait_until(page, "document.querySelector('#t-versions tbody tr:first-child').textContent.includes('rolled back')")
    assert page.is_disabled("#t-rollback")
    assert running.robot.session.versions.current.hello.fingerprint.startswith(before)


FAST_MOVES = """() => {
    const pad = document.getElementById('pad');
    const box = pad.getBoundingClientRect();
    const at = {pointerId: 1, clientX: box.left + 0.9 * box.width, clientY: box.top + box.height / 2};
    for (let i = 0; i < 400; i++) pad.dispatchEvent(new PointerEvent('pointermove', at));
    if (!pad.hasPointerCapture(1)) throw new Error('nothing holds the pad');
}"""


def test_on_a_phone_the_page_fits_and_the_pad_drives(open_page: Callable[..., Page], running: CorrectionServer):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    page = open_page("Piet", **phone)
    next_episode(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tap("#take_over")
    wait_for_mode(page, "human")
    before = running.robot.session.env.observe().state[0, :3].clone()
    pad = page.locator("#pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2, steps=4)
    page.evaluate(FAST_MOVES)  # more than the server reads in a second
    wait_until(page, "document.getElementById('strip').getAttribute('aria-label').match(/, [3-9] of/)")
    page.wait_for_timeout(500)
    assert running.robot.states.newest["mode"] == "human"
    page.mouse.up()
    page.keyboard.press("p")
    wait_for_mode(page, "hold")
    moved = running.robot.session.env.observe().state[0, :3] - before
    assert moved[1] > 0.005  # to the right in the image is +y
    page.goto(page.url.split("#")[0] + "#episodes")
    page.wait_for_selector("#episodes:not([hidden])")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Callable[..., Page], running: CorrectionServer, scheme: str):
    with EpisodeStore(running.folder / "episodes") as store:
        store.add(make_episode())  # also where this test runs alone
    page = open_page("Axel", color_scheme=scheme)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for name in ("robot", "episodes", "training"):
        page.click(f"#link-{name}")
        page.wait_for_selector(f"#{name}:not([hidden])")
        if name == "episodes":
            page.click("#list tbody tr:first-child button")
            page.wait_for_selector("#detail:not([hidden])")
        found = Axe().run(page).response["violations"]
        serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert serious == []
    assert all(url.startswith((running.origins.origins[0], "data:", "blob:")) for url in requests)


def test_everything_can_be_reached_and_done_by_keyboard(open_page: Callable[..., Page], running: CorrectionServer):
    page = open_page("Kira")
    next_episode(page)
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    for id in ("rewind-step", "rewind", "take_over", "success", "instruction", "pad", "gripper"):
        assert id in reached
    page.focus("#instruction")
    page.keyboard.press("Control+a")
    page.keyboard.type("reach it by 1 or 2 trials")  # keys that are commands elsewhere
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert running.robot.session.attempt.instruction == "reach it by 1 or 2 trials"
    assert running.robot.session.mode == "policy"
    page.keyboard.press("p")
    wait_for_mode(page, "hold")
    page.focus("#rewind-step")
    page.keyboard.press("Home")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_until(page, "document.getElementById('mode').textContent.includes('rewound to step 0')")
    assert running.robot.session.attempt.length == 0
