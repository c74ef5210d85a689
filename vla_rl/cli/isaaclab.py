"""The ``vla-rl`` command inside Isaac Lab 2.x, whose application has to start before torch is imported.

    ./isaaclab.sh -p -m vla_rl.cli.isaaclab train CONFIG

``ISAACLAB_DEVICE`` (default cuda:0) is the application's device. In 3.x, which starts what a task needs by itself, this
is the ordinary command.
"""

import os

from sims.adapters.isaaclab_app import is_version_3, start_app


def main() -> None:
    if not is_version_3():
        start_app(device=os.environ.get("ISAACLAB_DEVICE", "cuda:0"), cameras=True)
    from vla_rl.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
