"""ros2 launch real_robot/ros/launch/deploy.launch.py robot_file:=my_arm.yaml policy_url:=URL instruction:="..." ...

The policy node of one arm, configured and activated as soon as joints, cameras and policy server are there. Everything
that differs between robots is in the robot file; ``vla-rl serve BUNDLE`` runs apart, perhaps on another machine.
"""

import sys

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction
from launch.substitutions import LaunchConfiguration

from real_robot.ros.commands import ros_arguments

ARGUMENTS = {
    "robot_file": "YAML file of the robot, see configs/robots/",
    "policy_url": "address of the policy server, for example ws://127.0.0.1:8720",
    "token_file": "file that holds the policy server's token",
    "instruction": "what the policy is asked to do",
    "store": "episode store for every episode; '' records nothing",
}
OPTIONAL = ("store",)


def start_node(context: LaunchContext) -> list[ExecuteProcess]:
    values = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    node = ExecuteProcess(
        cmd=[sys.executable, "-m", "real_robot.ros.node", "--autostart", "120", *ros_arguments(values)],
        output="screen",
        # the node brakes before it ends
        sigterm_timeout="15",
        sigkill_timeout="30",
    )
    return [node]


def generate_launch_description() -> LaunchDescription:
    declared = [
        DeclareLaunchArgument(name, description=text, **({"default_value": ""} if name in OPTIONAL else {}))
        for name, text in ARGUMENTS.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=start_node)])
