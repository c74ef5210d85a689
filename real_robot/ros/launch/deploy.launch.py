"""ros2 launch real_robot/ros/launch/deploy.launch.py robot_file:=my_arm.yaml policy_url:=ws://127.0.0.1:8720 ...

The policy node of one arm, configured and activated as soon as joints, cameras and policy server are there. Everything
that differs between robots is in the robot file; ``vla-rl serve BUNDLE`` runs apart, perhaps on another machine.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess
from launch.substitutions import LaunchConfiguration

ARGUMENTS = {
    "robot_file": "YAML file of the robot, see configs/robots/",
    "policy_url": "address of the policy server, for example ws://127.0.0.1:8720",
    "token_file": "file that holds the policy server's token",
    "instruction": "what the policy is asked to do",
    "store": "episode store for every episode; '' records nothing",
}
OPTIONAL = {"instruction": "", "store": ""}


def generate_launch_description() -> LaunchDescription:
    declared = [
        DeclareLaunchArgument(
            name, description=text, **({} if name.endswith(("file", "url")) else {"default_value": ""})
        )
        for name, text in ARGUMENTS.items()
    ]
    flags = [part for name in ARGUMENTS for part in ("-p", [f"{name}:='", LaunchConfiguration(name), "'"])]
    node = ExecuteProcess(
        cmd=["python3", "-m", "real_robot.ros.node", "--autostart", "120", "--ros-args", *flags],
        output="screen",
        # the node brakes before it ends
        sigterm_timeout="15",
        sigkill_timeout="30",
    )
    return LaunchDescription([*declared, node])
