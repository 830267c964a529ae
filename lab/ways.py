"""How many functions, files and messages a trajectory and a weight version pass through, counted in a real run of any checkout.

    python -m lab.ways [--repo FOLDER] [--python FOLDER/.venv/bin/python] RECIPE [KEY=VALUE]...

Each process of the run records which functions of the checkout are entered while steps are made (from the end of the first step to that of
the last), and each call to a Ray actor or task. A function is the weights' if its file or its name says so, the trajectories' otherwise;
what writes the run down, saves it or watches it (record, metrics, checkpoints, processes) is counted apart. Functions are counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

HOOK = """
import atexit, json, os, sys, threading, time
ROOT, OUT, GO = (os.environ["EVENKEEL_WAYS_" + name] for name in ("ROOT", "OUT", "GO"))
seen, calls, skip = set(), {}, (os.sep + ".venv" + os.sep, os.sep + "tests" + os.sep, os.sep + "lab" + os.sep)

def entered(frame, event, _):
    if event == "call":
        code = frame.f_code
        if code not in seen and os.path.exists(GO):
            name = code.co_filename
            if name.startswith(ROOT) and not any(part in name for part in skip):
                seen.add(code)

def patched():
    import ray.actor, ray.remote_function
    for kind, attribute in ((ray.actor.ActorMethod, "_remote"), (ray.remote_function.RemoteFunction, "_remote")):
        def remote(self, *args, _real=getattr(kind, attribute), **options):
            if os.path.exists(GO):
                name = getattr(self, "_method_name", None) or getattr(self, "_function_name", "task").rpartition(".")[2]
                calls[name] = calls.get(name, 0) + 1
            return _real(self, *args, **options)
        setattr(kind, attribute, remote)

def told():
    is_patched = False
    while True:
        time.sleep(1)
        if not is_patched and "ray.actor" in sys.modules and hasattr(sys.modules["ray.actor"], "ActorMethod"):
            patched(); is_patched = True
        if seen or calls:
            lines = [[code.co_filename, code.co_qualname, code.co_firstlineno] for code in list(seen)]
            with open(f"{OUT}/{os.getpid()}.new", "w") as file:
                json.dump({"command": " ".join(sys.argv[:3]), "functions": lines, "calls": dict(calls)}, file)
            os.replace(f"{OUT}/{os.getpid()}.new", f"{OUT}/{os.getpid()}.json")

threading.setprofile(entered)
sys.setprofile(entered)
threading.Thread(target=told, daemon=True).start()
"""
WEIGHTS = re.compile(r"weight|publish|broadcast|bucket|export|convert|receipt|checksum|version_|/sync", re.I)
APART = re.compile(
    r"/(record|metrics|checkpoints|processes|reports?|early_warning|diagnostics|commands|settings)/|stacks|heartbeat|errors\.py"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    options = parser.parse_args()
    repo = options.repo.resolve()
    with tempfile.TemporaryDirectory(prefix="ways-") as folder:
        out, go, hook = Path(folder) / "out", Path(folder) / "go", Path(folder) / "hook"
        out.mkdir()
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        run_dir = Path(folder) / "run"
        environment = {
            **os.environ, "PYTHONPATH": f"{hook}{os.pathsep}{repo}", "EVENKEEL_WAYS_ROOT": f"{repo}{os.sep}", "EVENKEEL_WAYS_OUT": str(out),
            "EVENKEEL_WAYS_GO": str(go),
        }  # fmt: skip
        module = "evenkeel" if (repo / "evenkeel" / "__main__.py").exists() else "actors.commands.cli"
        words = [options.recipe.resolve(), f"run_dir={run_dir}", "steps=6", *options.settings]
        command = [options.python, "-P", "-m", module, "train", *words]
        process = subprocess.Popen(command, cwd=repo, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if line.startswith("step 1/"):
                go.touch()
            elif line.startswith("step 6/"):
                go.unlink(missing_ok=True)
        if process.wait():
            sys.exit(f"the run has ended with exit status {process.returncode}")
        found = [json.loads(path.read_text()) for path in out.glob("*.json")]
        groups = sum(1 for _ in (run_dir / "ledger.jsonl").open())
    report(found, repo, groups)


def report(found: list[dict[str, object]], repo: Path, groups: int) -> None:
    """Print the two ways: functions and files by folder; and calls by name."""
    ways: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    calls: Counter[str] = Counter()
    for one in found:
        for file, name, line in one["functions"]:  # type: ignore[attr-defined]
            path = os.path.relpath(os.path.realpath(file), repo)
            way = "apart" if APART.search(f"/{path}") else "weights" if WEIGHTS.search(f"{path} {name}") else "trajectory"
            if not name.endswith(">"):  # <lambda>, <genexpr>, <module>
                ways[way].add((path, name, line))
        calls.update(one["calls"])  # type: ignore[arg-type]
    for way in ("trajectory", "weights", "apart"):
        files = Counter(path for path, _, _ in ways[way])
        print(f"{way:<11} {len(ways[way]):>4} functions {len(files):>4} files")
        for folder, its in sorted(Counter({os.path.dirname(path): 0 for path in files}).items()):
            inside = {path: count for path, count in files.items() if os.path.dirname(path) == folder}
            print(f"    {folder:<28} {sum(inside.values()) + its:>4} functions {len(inside):>4} files")
    print(f"{sum(calls.values())} calls by Ray, {groups} prompts settled in the run:")
    for name, count in calls.most_common():
        print(f"    {name:<36} {count:>6}")


if __name__ == "__main__":
    main()
