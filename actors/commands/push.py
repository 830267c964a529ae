"""`evenkeel push`: the best checkpoint of a run to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.hub_name import HubName
from actors.metrics.step_metrics import shown
from correction.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from actors.record.run_folder import Checkpoint, RunFolder

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_CARD = "README.md"


def push(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run with a checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="ORGANISATION/NAME", help="Model repository of the hub; made if it isn't there.")],
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step. Default: the best one, or the newest.")] = None,
    public: Annotated[bool, typer.Option("--public", help="A new repository is for everybody to see; otherwise for you alone.")] = False,
) -> None:
    """Push the best checkpoint of a run to the Hugging Face hub: weights, config, tokenizer, and a model card if there is none.

    Best is the checkpoint with the highest held-out accuracy (the lower end of its interval); if none was evaluated, the newest. Log in
    first (hf auth login), or set HF_TOKEN. Files that are there already are not sent again: repeat a push that was interrupted.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"evenkeel push: {repository} is no name of a repository; write ORGANISATION/NAME")
    from actors.record.run_folder import RunFolder

    folder = RunFolder.view(run_dir)
    checkpoint = _chosen(folder, step)
    typer.echo(f"pushing {checkpoint.hf} to {repository}")
    typer.echo(f"pushed: {_upload(checkpoint.hf, repository, _card(folder, checkpoint, repository), is_public=public)}")


def _chosen(folder: RunFolder, step: int | None) -> Checkpoint:
    saved = folder.checkpoints()
    if not saved:
        raise DataError(f"{folder.path}: it has no checkpoint to push; one comes with checkpoint.every_steps, and at the end of a run")
    if step is None:
        return folder.best_checkpoint() or saved[-1]
    found = next((one for one in saved if one.step == step), None)
    if found is None:
        raise DataError(f"--step {step}: {folder.path} has checkpoints of steps {', '.join(str(one.step) for one in saved)}")
    return found


def _card(folder: RunFolder, checkpoint: Checkpoint, repository: str) -> str:
    """The model card: what it was trained from, how, and how well it does."""
    from huggingface_hub import ModelCardData

    config = folder.read_config()
    base = HubName.of(str(config.get("model", "")))
    data = ModelCardData(
        library_name="transformers", tags=["evenkeel", "reinforcement-learning"], base_model=base.repository if base else None
    )
    measured = next((one for one in reversed(folder.read_evaluations()) if one.step == checkpoint.step), None)
    lines = [f"Step {checkpoint.step} of the run `{config.get('name')}`, trained by asynchronous reinforcement learning with evenkeel."]
    if base is not None:
        lines.append(f"It began with `{base}`.")
    if measured is not None and "held_out/accuracy" in measured:
        lines.append(f"Held-out accuracy: {shown(measured, 'held_out/accuracy')}.")
    text = "\n\n".join(lines)
    return f"---\n{data.to_yaml()}\n---\n\n# {repository.rpartition('/')[2]}\n\n{text}\n"


def _upload(folder: Path, repository: str, card: str, *, is_public: bool) -> str:
    """Returns: where it is. Raises: DataError naming what the hub refuses."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        url = api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"evenkeel: {folder.parent.name}")
        if not api.file_exists(repository, _CARD):
            api.upload_file(repo_id=repository, path_or_fileobj=card.encode(), path_in_repo=_CARD, commit_message="Model card")
    except HFValidationError as error:
        raise ConfigError(f"evenkeel push: {repository} is no name of a repository: {error}") from error
    except (httpx.HTTPError, OfflineModeIsEnabled, LocalTokenNotFoundError) as error:
        reason = one_line(error)
        raise DataError(
            f"{repository}: {api.endpoint} doesn't take it ({reason}). Log in with a token that may write there (hf auth login, or "
            "HF_TOKEN), and see that HF_HUB_OFFLINE isn't set; what was sent by then stays there"
        ) from error
    return str(url)
