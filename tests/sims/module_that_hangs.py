"""A module whose import does not end, to test simulators that hang while they are loaded."""

import time

time.sleep(1000)
