"""What a fork would leave without its thread."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000.0,), daemon=True).start()
