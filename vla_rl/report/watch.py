"""``vla-rl watch``: the report of a run as a live page of a local server; it loads nothing from elsewhere."""

from __future__ import annotations

import threading
import time
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from real_robot.corrections.access import Origins
from sims.errors import UserError
from vla_rl.report.page import run_page
from vla_rl.report.pieces import document
from vla_rl.report.run_data import read_run
from vla_rl.runs.listing import read_stats, state_of, summarize
from vla_rl.runs.watchdog import WATCHDOG_FILE

RELOAD = """<script>
setInterval(async () => {
  const answer = await fetch("/version").catch(() => null);
  const version = answer && answer.ok ? await answer.text() : null;
  const note = document.getElementById("watch");
  note.style.opacity = version === null ? 0.4 : 1;
  if (version !== null && version !== note.dataset.version) location.reload();
}, 2000);
</script>"""
MESSAGES = ("traceback.txt", WATCHDOG_FILE, "failures.jsonl")
SHOWN = (
    *("metrics.jsonl", "stages.json", "result.json", "videos", "imitation/metrics.jsonl", *MESSAGES),
    *("imagination/round_*/metrics.jsonl", "imagination/round_*/videos"),
)
TAIL = 30  # lines of a message that are shown


def live_page(run_dir: Path) -> str:
    """The report with the run's state and messages on top; the browser asks for news every two seconds."""
    run = summarize(run_dir)
    success = "" if run.success is None else f" &middot; success {100 * run.success:.0f} %"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - run.age_s))
    state = _watched(
        run_dir,
        f"<b>{run.state}</b> &middot; last complete stage: {escape(run.stage or 'none')} &middot; "
        f"{run.iterations} iterations{success} &middot; last written at {written}",
    )
    return run_page(read_run(run_dir)).replace("</header>", f"</header>{state}{_messages(run_dir)}", 1)


def _watched(run_dir: Path, line: str) -> str:
    """HTML that loads its page again when there is news."""
    return f'<p class="lead" id="watch" data-version="{version(run_dir)}">{line}</p>{RELOAD}'


def version(run_dir: Path) -> str:
    """Changes whenever the run's state or a file of the page does."""
    times = [stat.st_mtime_ns for stat in read_stats(path for one in SHOWN for path in run_dir.glob(one))]
    return f"{state_of(run_dir)}-{len(times)}-{max(times, default=0)}"


def _messages(run_dir: Path) -> str:
    found = [run_dir / name for name in MESSAGES if (run_dir / name).is_file()]
    texts = [(path.name, path.read_text(encoding="utf-8").splitlines()[-TAIL:]) for path in found]
    return "".join(f"<h2>{name}</h2><pre>{escape(chr(10).join(lines))}</pre>" for name, lines in texts)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, run_dir: Path, *arguments: object) -> None:
        self.run_dir = run_dir
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        server = cast(ThreadingHTTPServer, self.server)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if refusal := Origins(host="127.0.0.1", port=server.server_port).refusal(headers, changes=False):
            self.send_error(403, refusal)
        elif self.path == "/version":
            self._answer(version(self.run_dir), "text/plain")
        elif self.path == "/":
            try:
                page = live_page(self.run_dir)
            except UserError as error:  # a file that is damaged, perhaps until it is written again
                page = document(self.run_dir.name, [_watched(self.run_dir, escape(str(error)))])
            self._answer(page, "text/html")
        else:
            self.send_error(404)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed per request."""


def make_server(run_dir: Path, *, port: int) -> ThreadingHTTPServer:
    """On loopback; ``port`` 0 takes a free one. Raises UserError if there is no run or the port is taken."""
    read_run(run_dir)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, run_dir))
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for a free one") from None


def serve(server: ThreadingHTTPServer) -> None:
    """Until Ctrl-C."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()
