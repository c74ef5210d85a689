"""Names of the formats that episodes are exported in, apart so that the command line imports nothing else."""

from typing import Literal

ExportFormat = Literal["lerobot", "lerobot-images", "robomimic", "mcap"]
