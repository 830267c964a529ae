"""How a recipe names a model of the Hugging Face hub: hf:ORGANISATION/NAME, with @REVISION where it isn't the newest."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from correction.errors import ConfigError

_SCHEME = "hf:"
_FORM = re.compile(r"hf:/{0,2}(?P<repository>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, at a branch, a tag or a commit."""

    repository: str
    revision: str | None = None
    """None: the hub's own branch, main."""

    @classmethod
    def of(cls, model: Path | str) -> HubName | None:
        """None for a folder. Raises: ConfigError for what begins as a name of the hub and is none."""
        text = str(model)
        if not text.startswith(_SCHEME):
            return None
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(f"model = {text}: no name of the hub; write hf:ORGANISATION/NAME, or hf:ORGANISATION/NAME@REVISION")
        return cls(form["repository"], form["revision"])

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes its meaning as a branch does."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubName:
        return replace(self, revision=commit)

    @property
    def path(self) -> Path:
        """The name as a recipe's `model` holds it. It has no //, because a path would make one slash of two."""
        return Path(str(self))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def absolute(model: Path) -> Path:
    """The folder by its absolute path; a name of the hub as it is."""
    return model if HubName.of(model) else model.absolute()
