"""Triton's LLVM is loaded before that of Mesa's software renderer, or the first optimizer crashes the process."""

import os
import subprocess
import sys
from pathlib import Path


def test_triton_is_loaded_before_a_renderer(tmp_path: Path) -> None:
    """With a module of that name that says when it is imported, since a CPU build of PyTorch brings none."""
    (tmp_path / "triton.py").write_text("import sys\nprint('triton', 'mujoco.egl' in sys.modules, flush=True)\n")
    program = (
        "from sims.tabletop import TabletopConfig, TabletopEnv\n"
        "from sims.starts import StartSequence\n"
        "env = TabletopEnv(TabletopConfig(num_envs=1))\n"
        "env.reset(start=StartSequence('train', seed=0, num_tasks=1).take(1))\n"
        "print('rendered', env.observe().images.shape)\n"
        "env.close()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "triton False"
    assert done.stdout.splitlines()[-1].startswith("rendered")
