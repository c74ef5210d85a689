#!/usr/bin/env bash
# .venv-ros: the project with pinned rclpy wheels (ROS 2 Jazzy) and the independent witness, for machines without ROS.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m venv .venv-ros
.venv-ros/bin/pip install --quiet -r tests/ros/requirements.txt
.venv-ros/bin/pip install --quiet -e .
.venv-ros/bin/python -c "import rclpy, cyclonedds, rosbags, mujoco; print('.venv-ros is ready')"
