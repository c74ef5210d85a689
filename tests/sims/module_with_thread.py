"""A module that starts a thread, which a fork would not copy."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000.0,), daemon=True).start()
