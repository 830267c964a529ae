"""One root and a few kinds; every message names the place, the value, the reason and the remedy. And words for numbers in them."""

import signal


def counted(number: int, what: str) -> str:
    """A number and its noun, for messages: "1 rollout worker", "2 rollout workers"."""
    return f"{number} {what}{'s' * (number != 1)}"


def signal_name(number: int) -> str:
    """A signal, for messages: "SIGKILL", or "SIG40" where Python has no name for it, as for most real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"SIG{number}"


def one_line(error: BaseException, *, last: bool = False, named: bool = False) -> str:
    """The first line of an error's text, for a sentence that gives it as the reason; the name of its class if it has no text.

    Args:
        last: the last line instead: of a traceback as text, Ray's for instance, the one with the error.
        named: the name of the class, a colon and the line.
    """
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return name
    line = lines[-1 if last else 0]
    return f"{name}: {line}" if named else line


def with_remedy(reason: str, remedy: str) -> str:
    """A sentence, and what to do: a clause of it after a semicolon or, with a capital, another sentence. Args: remedy: empty: none."""
    return f"{reason}{'; ' if remedy[0].islower() else '. '}{remedy}" if remedy else reason


class EvenkeelError(Exception):
    """Root of all errors that evenkeel raises on purpose. Picklable: it crosses processes."""

    remedy: str = ""
    """What to change, apart from what is wrong, for callers that show the two separately. Empty: the message says it, or nobody knows."""

    def __init__(self, *message: object, remedy: str = "") -> None:
        """
        Args:
            message: what is wrong, without a full stop.
            remedy: a clause that ends the message after a semicolon, or, with a capital, its last sentence.
        """
        super().__init__(*message)
        if remedy:
            self.remedy = remedy

    @property
    def reason(self) -> str:
        """The message without the remedy."""
        return super().__str__()

    def __str__(self) -> str:
        return with_remedy(self.reason, self.remedy)


class ConfigError(EvenkeelError, ValueError):
    """A setting that can't be honoured."""


def require_utf8(what: str, path: object) -> None:
    """Args: what: begins the sentence. Raises: ConfigError for a path whose bytes are not UTF-8, which Python has as half characters."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="backslashreplace").decode().replace("\\udc", "\\x")
        reason = f"{what}{shown}: not UTF-8, the only form in which settings, Ray and tokenizers take names"
        raise ConfigError(reason, remedy="Rename that folder or file (convmv does it for all names of an old archive)") from None


class DataError(EvenkeelError, ValueError):
    """A prompt, row, model folder or batch that can't be used."""


class NoRoomError(DataError):
    """A prompt that is too long for an engine."""


def not_read(path: object, error: BaseException, reason: str, *, remedy: str) -> DataError:
    """Why a file can't be used: this user may not read it, if that is the error, and else the reason with its remedy."""
    if isinstance(error, PermissionError):
        return DataError(f"{path}: this user may not read it", remedy="Allow it (chmod a+r; folders above it need a+x)")
    return DataError(f"{path}: {reason}", remedy=remedy)


class EngineError(EvenkeelError, RuntimeError):
    """The rollout engine refused or failed."""


class EngineDirty(EngineError):
    """The engine runs, but a weight update failed half-way: its weights belong to no single version. A complete update repairs it."""


class EngineReplaced(EngineDirty):
    """The engine was lost while this ran, and another one without weights takes its place in the same worker."""


class ActorLost(EngineError):
    """The process behind a call is gone, or cannot be reached: the call may or may not have run."""


class ActorUnavailable(ActorLost):
    """The process can't be reached just now, but may be again in a moment. A call that may run twice can be repeated."""


class RankFailed(ActorLost):
    """A learner rank's process is there, but its device or a collective has failed in the middle of a call: it has to be ended."""

    def __init__(self, *message: object, remedy: str = "", rank: str = "") -> None:
        """Args: rank: its name in messages."""
        super().__init__(*message, remedy=remedy)
        self.rank = rank


class RequestError(EvenkeelError, RuntimeError):
    """One request got no usable answer. The engine goes on: it has answered others."""


class LateError(EvenkeelError, TimeoutError):
    """Something that another part should have delivered is late or lost. Whoever waited for it is not to blame."""


class StepAborted(EvenkeelError, RuntimeError):
    """A step was ended before its optimizer update, because the run has to end at once. The weights are those of the step before."""


class SyncError(EvenkeelError, RuntimeError):
    """Weights of the learner and of an engine do not agree."""


class LedgerError(EvenkeelError, RuntimeError):
    """A prompt is missing or was counted twice."""


class DeadlineExceeded(EvenkeelError, TimeoutError):
    """A wait reached its deadline; the message names phase, actor and version."""

    def __init__(self, *message: object, what: str = "", seconds: float = 0.0, setting: str = "") -> None:
        """
        Args:
            what: name of the wait and of both its sides, as in its notices; empty: the message says it.
            seconds: how long it has waited.
            setting: the setting that bounds the wait, shown as the remedy; empty: the message names it.
        """
        super().__init__(*message, remedy=f"the deadline is set under {setting}" if setting else "")
        self.what, self.seconds = what, seconds
