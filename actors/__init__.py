import importlib.util
import os
import sys

# At a call outside a session Ray would start a cluster by itself, or join the last one of this machine: a late `ray.kill` among them.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# `python -m` puts the working folder first: a file of the user's called socket.py would be imported in place of Python's own.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] != _ROOT:
    del sys.path[0]
_FOUND = (importlib.util.find_spec(name) for name in ("correction", "learner", "rollout"))
if not all(spec and (spec.origin or "").startswith(_ROOT + os.sep) for spec in _FOUND):  # PYTHONPATH has a rollout.py of the user's
    sys.path.insert(0, _ROOT)
