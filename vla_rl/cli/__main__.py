"""``python -m vla_rl.cli``"""

from vla_rl.cli.main import main

main()
