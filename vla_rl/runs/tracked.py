"""What a run's result can be checked, compared and repeated by, in small text files for version control (``track``)."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from episodes.files import write_json
from policies.bundle import MANIFEST
from sims.errors import UserError
from vla_rl.runs.failures import FAILURES_FILE
from vla_rl.runs.metrics import METRICS_FILE
from vla_rl.runs.result import RESULT_FILE
from vla_rl.runs.run_dir import COMMAND_FILE, CONFIG_FILE, STAGES_FILE

LIST_FILE = "files.json"
# Wherever they are in a run; MANIFEST: of a bundle, with the hash of its weights, revision and versions.
KEPT = (CONFIG_FILE, COMMAND_FILE, "device.txt", STAGES_FILE, METRICS_FILE, RESULT_FILE, FAILURES_FILE, MANIFEST)


def track_run(run_dir: Path, out: Path) -> dict[str, Any]:
    """Copy the files of KEPT to ``out``/<name of the run>, with their sha256 in files.json; {folder, files, bytes}.

    Weights, episodes, videos and checkpoints stay where they are. ``vla-rl report`` and ``compare`` read the copy,
    which replaces an earlier one. UserError where the run is not complete, or something else is in the place.
    """
    if not (run_dir / RESULT_FILE).is_file():
        raise UserError(f"{run_dir} has no {RESULT_FILE}: it is no run, or not complete; go on with --resume first")
    folder = out / run_dir.resolve().name
    if folder.resolve() == run_dir.resolve():
        raise UserError(f"{run_dir} would be replaced by its copy; choose another --out")
    if folder.exists() and not (folder / LIST_FILE).is_file():
        raise UserError(f"{folder} exists and is no copy of a run; choose another --out")
    found = (path for name in KEPT for path in run_dir.rglob(name) if path.is_file())
    known = (path for path in found if "wandb" not in path.relative_to(run_dir).parts)
    copies = (out if run_dir.resolve() in out.resolve().parents else folder).resolve()
    files = sorted(path for path in known if copies not in path.resolve().parents)
    unfinished, hashes = folder.with_name(f".{folder.name}.partial"), {}
    shutil.rmtree(unfinished, ignore_errors=True)
    for path in files:
        name, data = path.relative_to(run_dir), path.read_bytes()
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_bytes(data)
        hashes[str(name)] = hashlib.sha256(data).hexdigest()
    write_json(unfinished / LIST_FILE, hashes)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return {"folder": str(folder), "files": len(files), "bytes": sum(path.stat().st_size for path in files)}
