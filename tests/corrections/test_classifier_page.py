"""A success classifier is fitted from the page to labeled episodes, and its doubts about labels are reviewed there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Browser

from episodes.store import EpisodeStore, Selection
from tests import dot_episodes
from tests.corrections.small_server import server
from tests.rewards.test_fit import SMALL

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
FIT_S = 180


@pytest.mark.slow
def test_a_classifier_is_fitted_and_its_doubts_lead_to_wrong_labels(chromium: Browser, tmp_path: Path):
    settings = tmp_path / "small.yaml"
    settings.write_text(yaml.safe_dump(dataclasses.asdict(dataclasses.replace(SMALL, precision=0.0))))
    with dot_episodes.store(tmp_path / "out" / "episodes", 60) as store:
        successes = [entry.id for entry in store.select(Selection(success=True))]
        for id in successes[:8]:
            store.label(id, "success", False, author="a hasty person")
    with server(tmp_path, classifier=settings, pace=0.01) as one:
        page = chromium.new_page()
        page.goto(one.invite("Rita", "labeller"))
        page.click("#link-episodes")
        page.locator("#list tbody tr", has_text="success").first.locator("button").click()
        page.wait_for_selector("#detail:not([hidden])")
        assert page.is_disabled("#d-from")  # nothing has been done before the first observation
        page.locator("#d-step").fill("3")
        page.click("#d-from")
        page.wait_for_selector("#d-history >> text=success_from: 3 (Rita")
        page.click("#link-training")
        page.click("#c-fit")
        page.wait_for_selector("#c-state >> text=fit-001, under way")
        page.click("#c-fit")
        page.wait_for_selector("#problem >> text=a fit is under way; wait for it to end")
        page.wait_for_selector("#c-state >> text=classifiers/fit-001: on", timeout=1000 * FIT_S)
        report = json.loads((one.folder / "classifiers" / "fit-001" / "report.json").read_text())
        doubts = report["disagreements"]
        recall = round(100 * report["episodes"]["recall"]["value"])
        assert f"recall {recall} %" in (page.text_content("#c-state") or "")
        shown = page.locator("#c-list tbody tr")
        assert shown.count() == len(doubts) > 0
        assert {one["episode"] for one in doubts if not one["labeled"]} & set(successes[:8])
        shown.first.locator("button").click()
        page.wait_for_selector("#episodes:not([hidden])")
        page.click("#d-success")
        page.wait_for_selector("#d-history >> text=success: true (Rita")
    with EpisodeStore(tmp_path / "out" / "episodes") as store:
        assert store.labels(doubts[0]["episode"])["success"] is True


def test_a_fit_that_cannot_be_made_says_why(chromium: Browser, tmp_path: Path):
    with server(tmp_path, pace=0.01) as one:
        page = chromium.new_page()
        page.goto(one.invite())
        page.click("#link-training")
        page.click("#c-fit")
        page.wait_for_selector("#c-state >> text=fit-001 ended without a classifier", timeout=1000 * FIT_S)
        assert "no episodes; record some with" in (page.text_content("#c-state") or "")
        viewer = chromium.new_page()
        viewer.goto(one.invite("Vera", "viewer"))
        viewer.click("#link-training")
        viewer.wait_for_selector("#c-state >> text=fit-001 ended")
        assert viewer.is_disabled("#c-fit")
