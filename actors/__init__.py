"""The runtime: Ray actors, what connects them, and the driver that asks them."""

import os

# At a call outside a session Ray would start a cluster by itself, or join the last one of this machine: a late `ray.kill` among them.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
