"""``vla-rl runs`` and ``watch``: the state of a run, and its page while it goes on."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sims.errors import UserError
from tests.vla_rl.run_folder import make_imagined_run, make_run
from vla_rl.config.experiment import Experiment
from vla_rl.report.watch import live_page, make_server, version
from vla_rl.runs.listing import list_runs, read_stats, state_of
from vla_rl.runs.run_dir import Run, open_run


def unfinished(path: Path) -> Path:
    make_run(path, videos=False)
    (path / "result.json").unlink()
    return path


def test_the_state_of_a_run(tmp_path: Path) -> None:
    finished, stopped = make_run(tmp_path / "a" / "finished", videos=False), unfinished(tmp_path / "stopped")
    assert [state_of(finished), state_of(stopped)] == ["finished", "stopped"]
    with (stopped / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(stopped) == "running"
    (stopped / "quarantine").mkdir()
    (stopped / "quarantine" / "iteration_000003.safetensors").touch()
    assert state_of(stopped) == "failed"
    found = {Path(run.path).name: run for run in list_runs(tmp_path)}
    assert set(found) == {"finished", "stopped"}
    assert found["finished"].success == json.loads((finished / "result.json").read_text())["rl"]["success"]
    assert found["stopped"].success == pytest.approx(0.8, abs=0.1)  # of its latest validation
    assert found["stopped"].iterations == 80


def start(path: Path, *, resume: bool) -> Run:
    return open_run(Experiment(device="cpu"), path, resume=resume, command="vla-rl train quickstart")


def test_a_run_that_failed_and_was_resumed_has_not_failed(tmp_path: Path) -> None:
    """The quarantined batch of the failed attempt is kept."""
    start(tmp_path, resume=False).lock.close()
    batch = tmp_path / "quarantine" / "iteration_000003.safetensors"
    batch.parent.mkdir()
    batch.touch()
    assert state_of(tmp_path) == "failed"
    start(tmp_path, resume=True).lock.close()
    assert batch.exists()
    assert state_of(tmp_path) == "stopped"
    (tmp_path / "traceback.txt").write_text("ValueError\n")
    assert state_of(tmp_path) == "failed"
    start(tmp_path, resume=True).lock.close()
    assert state_of(tmp_path) == "stopped"


def test_a_run_starts_while_somebody_looks_at_it_and_not_while_it_is_written(tmp_path: Path) -> None:
    start(tmp_path, resume=False).lock.close()
    looking = (tmp_path / ".lock").open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.3, looking.close).start()
    with start(tmp_path, resume=True).lock:
        assert state_of(tmp_path) == "running"
        with pytest.raises(UserError, match="is being written by another process"):
            start(tmp_path, resume=True)


LOCKED = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_the_page_is_loaded_again_when_the_run_is_killed(tmp_path: Path) -> None:
    """Nothing is written then."""
    run = unfinished(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", LOCKED, str(run / ".lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        before = version(run)
        assert "<b>running</b>" in live_page(run)
        process.send_signal(signal.SIGKILL)
    assert version(run) != before
    assert "<b>stopped</b>" in live_page(run)


def test_iterations_in_imagination_are_news_and_counted(tmp_path: Path) -> None:
    run = make_imagined_run(tmp_path / "run")
    (run / "result.json").unlink()
    before = version(run)
    assert "10 iterations &middot;" in live_page(run)
    with (run / "imagination" / "round_1" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 5, "success": 0.5, "kl": 0.02}) + "\n")
    assert version(run) != before
    assert "11 iterations &middot;" in live_page(run)
    assert "No final evaluation yet: 11 iterations" in live_page(run)


def test_a_stage_that_hangs_is_shown(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run")
    before = version(run)
    (run / "watchdog.txt").write_text("stage 'reinforce' has not moved for 900 s\n")
    assert version(run) != before
    assert "has not moved for 900 s" in live_page(run)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    run = unfinished(tmp_path / "run")
    server = make_server(run, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield run, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def text(url: str) -> str:
    with urlopen(url) as answer:
        return answer.read().decode()


def test_the_page_shows_what_is_new_and_loads_nothing_from_elsewhere(page: tuple[Path, str]) -> None:
    run, url = page
    before, version = text(url), text(url + "/version")
    assert f'data-version="{version}"' in before
    assert "<b>stopped</b>" in before
    assert "80 iterations" in before
    assert not re.findall(r"""(?:src|href)=["']?(?!data:|#)|url\((?!["']?data:)|https?://""", before)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 80, "wall_s": 1000.0, "success": 0.9}) + "\n")
    (run / "traceback.txt").write_text("ValueError: <wrong>\n")
    assert text(url + "/version") != version
    after = text(url)
    assert "81 iterations" in after
    assert "ValueError: &lt;wrong&gt;" in after
    with pytest.raises(HTTPError, match="404"):
        text(url + "/../etc/passwd")


def test_a_page_of_another_name_reads_nothing(page: tuple[Path, str]) -> None:
    for headers in ({"Host": "rebound.example"}, {"Origin": "http://rebound.example"}):
        with pytest.raises(HTTPError, match="403"):
            urlopen(Request(page[1], headers=headers))


def test_files_that_come_and_go_are_not_counted(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("one")
    assert [stat.st_size for stat in read_stats([tmp_path / "gone", there])] == [3]


def test_a_damaged_file_is_a_page_that_says_so_until_it_is_repaired(page: tuple[Path, str]) -> None:
    run, url = page
    (run / "stages.json").write_text("{")
    damaged = text(url)
    assert "stages.json is damaged" in damaged
    assert f'data-version="{text(url + "/version")}"' in damaged and "location.reload" in damaged
    (run / "stages.json").unlink()
    assert "80 iterations" in text(url)


def test_wrong_folders_and_ports_are_one_message(page: tuple[Path, str], tmp_path: Path) -> None:
    run, url = page
    with pytest.raises(UserError, match="is not the folder of a run"):
        make_server(tmp_path, port=0)
    with pytest.raises(UserError, match="choose another, or 0 for a free one"):
        make_server(run, port=int(url.rpartition(":")[2]))
