"""``vla-rl doctor``: checks of this machine.

Every check steps, renders or writes something. Renderers run in processes of their own, because MuJoCo selects its
OpenGL platform once per process and a broken driver crashes the process.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vla_rl.doctor.check import Check, attempt, in_process
from vla_rl.doctor.journeys import check_journeys
from vla_rl.doctor.optional import check_optional

BALL = (
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='1 1 .1' rgba='.2 .3 .8 1'/>"
    "<body pos='0 0 .5'><freejoint/><geom size='.1' rgba='1 0 0 1'/></body></worldbody></mujoco>"
)
STEP_WARP = f"""
import mujoco, mujoco_warp, warp
warp.config.quiet = True
model = mujoco.MjModel.from_xml_string({BALL!r})
data = mujoco.MjData(model)
m, d = mujoco_warp.put_model(model), mujoco_warp.put_data(model, data, nworld=2)
for _ in range(10):
    mujoco_warp.step(m, d)
height = d.qpos.numpy()[1, 2]
assert height < 0.5, height
print("stepped 2 environments on", warp.get_device())
"""
RENDER = f"""
import time, mujoco
model = mujoco.MjModel.from_xml_string({BALL!r})
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    image = renderer.render()
    started = time.perf_counter()
    for _ in range(10):
        renderer.render()
    milliseconds = (time.perf_counter() - started) * 100
assert image.std() > 1, "the image is blank"
print(f"64 x 64 pixels in {{milliseconds:.1f}} ms")
"""
PACKAGES = {"egl": "libegl1 libegl-mesa0 libgl1-mesa-dri", "osmesa": "libosmesa6"}
SIMULATOR_FIXES = {  # where the next step is not to install it
    "maniskill": "without an NVIDIA GPU it needs Mesa 25 or newer for Vulkan: see docs/simulators/maniskill.md",
    "isaaclab": "follow the Isaac Lab installation guide; it needs an NVIDIA RTX GPU",
}


def run_checks(run: Path | None) -> list[Check]:
    """Every check in order; with ``run``, also the log-probability audit of that run's policy.

    Raises UserError where ``run`` is not the folder of a run with a policy.
    """
    if run is not None:
        from vla_rl.runs.run_dir import experiment_of, locate

        experiment_of(run)
        locate(run)
    checks = [_python(), _torch(), _cuda(), _physics(), *check_renderers(), _warp(), _video(), *_simulators(), _disk()]
    checks += check_optional()
    checks += check_journeys(checks)
    return [*checks, check_log_probs(run)] if run is not None else checks


def print_checks(checks: Sequence[Check]) -> None:
    """A table, and below it the next step for everything that is not ok."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colors = {"ok": "green", "missing": "yellow", "failed": "red"}
    table = Table("check", "status", "detail", box=None, pad_edge=False)
    for check in checks:
        color = colors[check["status"]]
        table.add_row(check["name"], f"[{color}]{check['status']}[/]", escape(check["detail"]))
    console = Console()
    console.print(table, "")
    for check in checks:
        if check["fix"] and check["status"] != "ok":
            console.print(f"[bold]{check['name']}[/]: {escape(check['fix'])}", soft_wrap=True, highlight=False)


def _python() -> Check:
    detail = f"{platform.python_version()}, {os.cpu_count()} CPUs"
    return {"name": "python", "status": "ok", "detail": detail, "fix": ""}


def _torch() -> Check:
    def multiply() -> str:
        import torch

        a = torch.full((64, 64), 0.5)
        if not torch.equal(a @ a, torch.full((64, 64), 16.0)):
            raise ArithmeticError("a 64 x 64 matrix product was wrong")
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        bfloat16 = "computed here" if fast else "emulated here, many times slower than float32"
        return f"{torch.__version__}, {torch.get_num_threads()} threads, bfloat16 is {bfloat16}"

    return attempt("torch", multiply, fix="pip install -c constraints.txt torch")


def _cuda() -> Check:
    def multiply() -> str:
        import torch

        a = torch.full((64, 64), 0.5, device="cuda")
        if (a @ a).sum().item() != 64 * 64 * 16:
            raise ArithmeticError("a matrix product on the GPU was wrong")
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} device(s)"

    try:
        import torch

        if not torch.cuda.is_available():
            fix = "not needed; for a GPU, install its driver and a CUDA build of torch"
            return {"name": "cuda", "status": "missing", "detail": "torch finds no CUDA device", "fix": fix}
    except ImportError:
        return {"name": "cuda", "status": "missing", "detail": "torch is not installed", "fix": "install torch first"}
    return attempt("cuda", multiply, fix="check that the driver fits the CUDA version of torch: nvidia-smi")


def _physics() -> Check:
    def drop() -> str:
        import mujoco

        model = mujoco.MjModel.from_xml_string(BALL)
        data = mujoco.MjData(model)
        for _ in range(100):
            mujoco.mj_step(model, data)
        fallen = 0.5 - data.qpos[2]
        expected = 0.5 * 9.81 * data.time**2
        if abs(fallen - expected) > 0.01:
            raise ArithmeticError(f"a ball fell {fallen:.3f} m in {data.time:.1f} s instead of {expected:.3f} m")
        return f"{mujoco.__version__}, a ball falls as expected"

    return attempt("mujoco", drop, fix="pip install -c constraints.txt mujoco")


def check_renderers() -> list[Check]:
    """One working renderer is enough; the other one then counts as missing."""
    checks = [
        attempt(
            f"render-{name}",
            lambda name=name: in_process(RENDER, timeout_s=60, MUJOCO_GL=name),  # type: ignore[misc]
            fix=f"install the system packages: sudo apt-get install {packages}",
        )
        for name, packages in PACKAGES.items()
    ]
    if any(check["status"] == "ok" for check in checks):
        for check in checks:
            if check["status"] == "failed":
                check["status"] = "missing"
    return checks


def _warp() -> Check:
    fix = "pip install 'vla-rl[warp]'; the first step compiles its kernels, which can take minutes"
    if importlib.util.find_spec("mujoco_warp") is None:
        return {"name": "mujoco-warp", "status": "missing", "detail": "optional, not installed", "fix": fix}
    return attempt("mujoco-warp", lambda: in_process(STEP_WARP, timeout_s=600), fix=fix)


def _video() -> Check:
    def write() -> str:
        import numpy as np

        from sims.video import write_video

        with tempfile.TemporaryDirectory() as folder:
            path = write_video(Path(folder) / "test.mp4", np.zeros((4, 64, 64, 3), dtype=np.uint8), fps=10)
            return f"wrote an mp4 of {path.stat().st_size} bytes"

    return attempt("video", write, fix="pip install -c constraints.txt imageio-ffmpeg")


def _simulators() -> list[Check]:
    """Each installed one is started, stepped and observed."""
    from sims.examples import EXAMPLES

    return [*(_simulator(name) for name in EXAMPLES), *_physx_gpu()]


def _simulator(name: str) -> Check:
    from sims.examples import check_simulator, is_installed

    fix = SIMULATOR_FIXES.get(name, f"vla-rl sims install {name}")
    if not is_installed(name):
        install = fix if name == "isaaclab" else f"vla-rl sims install {name}"
        return {"name": name, "status": "missing", "detail": "optional, not installed", "fix": install}
    return attempt(name, lambda: check_simulator(name), fix=fix)


def _physx_gpu() -> list[Check]:
    """Where ManiSkill could use a GPU: SAPIEN downloads this library at its first use."""
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("sapien") is None:
        return []
    found = sorted((Path.home() / ".sapien" / "physx").glob("*/libPhysXGpu_64.so"))
    fix = "on a machine without a network, copy ~/.sapien/physx from one where backend: physx_cuda has run"
    detail = str(found[-1]) if found else "SAPIEN will download it at its first use"
    return [{"name": "physx-gpu", "status": "ok" if found else "missing", "detail": detail, "fix": fix}]


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    detail = f"{free:.1f} GiB free in {Path.cwd()}"
    if free < 2:
        return {"name": "disk", "status": "failed", "detail": detail, "fix": "a run needs about 2 GiB: free some space"}
    return {"name": "disk", "status": "ok", "detail": detail, "fix": ""}


def check_log_probs(run: Path) -> Check:
    """Of the run's policy, by a rollout in its simulator."""
    from policies.audit import LogProbMismatch
    from vla_rl.runners.reinforce import audit_run
    from vla_rl.runs.run_dir import experiment_of

    fix = "the log-probs could not be compared: the detail says what keeps this run's policy from acting here"
    try:
        if experiment_of(run).without_simulator:
            return _not_audited("the run was made without a simulator, in which log-probs could be audited")
        differences = audit_run(run)
    except LogProbMismatch as error:
        fix = "sampling and training compute different log-probs: do not continue training; report it with this output"
        return {"name": "log-prob", "status": "failed", "detail": str(error), "fix": fix}
    except Exception as error:
        return {"name": "log-prob", "status": "failed", "detail": f"{type(error).__name__}: {error}", "fix": fix}
    if differences is None:
        return _not_audited("the algorithm of this run has no importance ratios to audit")
    largest = max(one.max for one in differences)
    detail = f"recomputed log-probs differ from the rollout's by at most {largest:.1e} nats"
    return {"name": "log-prob", "status": "ok", "detail": detail, "fix": ""}


def _not_audited(detail: str) -> Check:
    return {"name": "log-prob", "status": "missing", "detail": detail, "fix": "nothing to do"}
