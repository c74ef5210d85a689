"""Software that only some work needs: ROS 2, a browser, Ray, transformers, readers of recorded data."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess

from vla_rl.doctor.check import Check, attempt, in_process
from vla_rl.memory import host_memory

ROS = """
import importlib, rclpy
from rclpy.utilities import get_rmw_implementation_identifier
names = ("builtin_interfaces", "diagnostic_msgs", "geometry_msgs", "rcl_interfaces", "sensor_msgs", "std_msgs",
         "std_srvs", "trajectory_msgs")
for name in names:
    importlib.import_module(name)
print(f"rclpy with {len(names)} message packages, RMW {get_rmw_implementation_identifier()}")
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
PYTHON_PACKAGES = {  # name of the check: (modules, next step)
    "ray": (("ray",), "pip install ray; only for several machines"),
    "transformers": (("transformers",), "pip install transformers; only for pretrained language models"),
    "sweep": (("optuna",), "pip install 'vla-rl[sweep]'"),
    "import": (("h5py", "pyarrow"), "pip install 'vla-rl[import]'"),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), "pip install 'vla-rl[onnx]'"),
}


def check_optional() -> list[Check]:
    return [_ros(), _browser(), *(_packages(name) for name in PYTHON_PACKAGES), _memory()]


def _ros() -> Check:
    fix = "source /opt/ros/<distribution>/setup.bash, or make ros for .venv-ros, which has it from wheels"
    if importlib.util.find_spec("rclpy") is None:
        return {"name": "ros2", "status": "missing", "detail": "this Python has no rclpy", "fix": fix}
    return attempt("ros2", lambda: in_process(ROS, timeout_s=60), fix=fix)


def _browser() -> Check:
    """Chromium and its relatives render a page; of Firefox only the version is asked."""
    fix = "for vla-rl watch and report pages on this machine: sudo apt-get install chromium"
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        return {"name": "browser", "status": "missing", "detail": "none found", "fix": fix}

    def render() -> str:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        page = ["--headless", "--disable-gpu", *sandbox, "--dump-dom", "data:text/html,<p>rendered</p>"]
        command = [found, *(["--version"] if "firefox" in found else page)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        if "firefox" not in found and "rendered" not in done.stdout:
            raise RuntimeError("it did not render a page")
        return found

    return attempt("browser", render, fix=fix)


def _packages(name: str) -> Check:
    modules, fix = PYTHON_PACKAGES[name]
    if absent := [module for module in modules if importlib.util.find_spec(module) is None]:
        return {"name": name, "status": "missing", "detail": f"not installed: {', '.join(absent)}", "fix": fix}
    shown = ", ".join(f"f'{module} {{{module}.__version__}}'" for module in modules)
    code = f"import {', '.join(modules)}; print(', '.join([{shown}]))"
    return attempt(name, lambda: in_process(code, timeout_s=120), fix=fix)


def _memory() -> Check:
    """Of the machine and, where there is one, of the GPU: free and in all."""

    def measure() -> str:
        import torch

        free, total = (size / 2**30 for size in host_memory())
        parts = [f"{free:.1f} of {total:.1f} GiB free"]
        for index in range(torch.cuda.device_count()):
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
            parts.append(f"cuda:{index} {free:.1f} of {total:.1f} GiB free")
        return ", ".join(parts)

    return attempt("memory", measure, fix="this check reads /proc/meminfo")
