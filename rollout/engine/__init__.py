"""One SGLang engine: its processes, its answers, and new weights meanwhile."""
