"""What a run has still to do when its last step is made and saved: it evaluates once more, and writes its report."""

from __future__ import annotations

from actors.record.run_folder import RunFolder

EVALUATION, REPORT = "the evaluation after training", "its report"


def left_after_training(folder: RunFolder, steps: int) -> tuple[str, ...]:
    """EVALUATION and REPORT, those that the folder of a run of so many steps lacks. A report that is older than its numbers counts as
    missing. Raises: OSError."""
    is_evaluated = any(metrics.step == steps for metrics in folder.read_evaluations())
    return ((EVALUATION,) if not is_evaluated else ()) + ((REPORT,) if not _is_reported(folder) else ())


def _is_reported(folder: RunFolder) -> bool:
    if not folder.report_path.exists():
        return False
    numbers = [path.stat().st_mtime for path in (folder.metrics_path, folder.evaluations_path) if path.exists()]
    return folder.report_path.stat().st_mtime >= max(numbers, default=0.0)
