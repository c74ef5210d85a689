#!/usr/bin/env bash
# .venv-ros: the project with pinned rclpy wheels (ROS 2 Jazzy), the independent witness and pytest, for machines
# without ROS.
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -f .venv-ros/.installed
"${PYTHON:-python3}" -m venv .venv-ros
.venv-ros/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/ros/requirements.txt -e .
.venv-ros/bin/pip check
.venv-ros/bin/python -c "import rclpy, cyclonedds, rosbags, mujoco"
touch .venv-ros/.installed
echo "install: .venv-ros is ready"
