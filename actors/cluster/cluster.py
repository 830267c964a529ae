"""The Ray cluster of a run: a private one on this machine, or one that is running already."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.cluster.address import NoClusterError, check_ray
from evenkeel.actors.cluster.head_watch import OwnDaemon
from evenkeel.actors.config import RayConfig, RunConfig
from evenkeel.actors.processes import signals
from evenkeel.actors.processes.children import adopted_orphans, command_of, descendants, end, end_new
from evenkeel.actors.processes.part_heartbeat import CONCURRENCY_GROUPS
from evenkeel.actors.settings.devices import check_gpus_to_come, check_rollout_resource, visible_gpus
from evenkeel.actors.settings.resolve import asks_for_gpus
from evenkeel.correction.errors import ConfigError, EngineError, counted, one_line
from evenkeel.engines.machine import environment
from evenkeel.rollout.module_path import SAFE_PATH, checkout

log = logging.getLogger("evenkeel.cluster")

# Python warnings of third parties are about things that a user of evenkeel can't change.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore"}
_JOINED_ENVIRONMENT = {
    "RAY_gcs_server_port_wait_time_s": "1",  # one attempt, which takes Ray up to 40 s; its own 20 take a quarter of an hour
    "RAY_BACKEND_LOG_LEVEL": "error",  # what failed is said in the error
}
_TRIES = 3
_PAUSE_S = 2.0
# Added to the niceness of all actors but the learner's ranks. They then get at most a tenth of a core that the learner wants as well.
_NICER_BY = 10
_NICEST = 19
# Longest wait for other runs on this machine that are starting their Ray.
_TURN_S = 120.0
# Seconds after which processes that Ray leaves behind are killed.
_ENDED_S = 5.0
# Longest wait for Ray's shutdown, which usually takes a few seconds. For a raylet that is stopped (SIGSTOP) it would wait for ever.
_SHUTDOWN_S = 20.0


class Cluster:
    """Connects on entry, leaves on exit; a private cluster ends with this process, however it ends."""

    def __init__(self, config: RunConfig, *, tries: int = _TRIES) -> None:
        """Args: tries: most attempts to start or join it."""
        self._config, self._tries = config, tries
        self._before = descendants()

    def __enter__(self) -> Cluster:
        """Raises: ConfigError for an address or a folder that can't be used; EngineError when Ray does not start, with what to do."""
        self._start()
        return self

    @adopted_orphans()
    def _start(self) -> None:
        try:
            self._start_or_join()
        except BaseException:  # a signal may come between any two lines, and __exit__ is not called then
            end_new(self._before)
            raise

    def _start_or_join(self) -> None:
        settings = self._config.ray
        check_ray(settings)
        os.environ.update(_ENVIRONMENT)
        common: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": False,  # engines say much; what matters comes as an event or an error, and log_folder has the rest
            "runtime_env": {"env_vars": _ENVIRONMENT | SAFE_PATH},
            "namespace": "evenkeel",
        }
        # Ray also prints what its daemons report, such as the death of a worker, in hundreds of characters: supervision says that better.
        ray._private.worker._worker_logs_enabled = False
        if not (settings.address or "").startswith("ray://"):  # whose driver is a process on the head
            common["job_config"] = _own_path_alone()
        start_s = self._config.deadlines.start_s
        if settings.address is not None:
            with environment({name: os.environ.get(name, value) for name, value in _JOINED_ENVIRONMENT.items()}):
                self._try(lambda: ray.init(address=settings.address, **common), f"joining ray.address = {settings.address}", start_s)
            try:
                require_authentication(settings)
                self._check_rollout_resource()
            except BaseException:
                ray.shutdown()
                raise
            return
        os.environ.setdefault("RAY_worker_niceness", "0")  # not Ray's 15: the others lower theirs themselves, see lower_priority
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # or Ray's control service keeps 100,000 calls
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes that no actor can use: these have an environment
        workers = self._config.rollout.most_workers
        arguments: dict[str, Any] = {
            "address": "local",  # not RAY_ADDRESS, nor the last one that `ray start` has left a note of on this machine
            "num_cpus": self._config.logical_cpus,
            "resources": {settings.rollout_resource: workers},
            "include_dashboard": settings.include_dashboard,
            "_temp_dir": str(settings.temp_dir.resolve()) if settings.temp_dir else None,
        }
        have_token()
        with _own_turn(), loopback_only(), _daemons_apart():
            self._try(lambda: ray.init(**arguments, **common), "starting a private Ray", start_s)
        protect_token()

    def _try(self, start: Callable[[], object], what: str, deadline_s: float) -> None:
        """Call `start` until it succeeds, `tries` times at most, and not again after `deadline_s`."""
        began = time.monotonic()
        for left in reversed(range(self._tries)):
            try:
                with _signals_stay_ours():
                    start()
                signals.check()
                return
            except (ValueError, PermissionError, ray.exceptions.AuthenticationError) as error:  # trying again changes nothing
                self._clear()
                reason = f"{what}: {one_line(error, named=True)}"
                raise ConfigError(f"{reason}; `evenkeel config --section ray` explains the settings") from error
            except Exception as error:
                logs = self._clear()
                signals.check()
                took_s = time.monotonic() - began
                reason = f"{what} failed after {took_s:.0f} s: {one_line(error, named=True)} ({_load()})"
                if not left or took_s > deadline_s:
                    remedy = (
                        "Start it (deploy/README.md), or leave ray.address empty for a private one"
                        if self._config.ray.address
                        else "Start the run again when the machine has less to do, or join a running cluster with ray.address"
                    )
                    failed = NoClusterError if self._config.ray.address else EngineError
                    raise failed(f"{reason}; tried {counted(self._tries - left, 'time')}. {remedy}.{logs}") from error
                log.warning("%s; trying again, %d of %d", reason, self._tries - left + 1, self._tries)
                time.sleep(_PAUSE_S)

    def _clear(self) -> str:
        """End what a failed start has left. Returns: a sentence with the place of its logs, if known."""
        left = [process for process in descendants() if process not in self._before]
        session = next((match[0] for process in left if (match := re.search(r"/\S*/session_[0-9_-]+", command_of(process)))), None)
        end_new(self._before)
        with contextlib.suppress(Exception):  # it may not be up far enough to be shut down
            ray.shutdown()
        return f" Ray's own logs: {session}/logs" if session else ""

    def _check_rollout_resource(self) -> None:
        """Raises: ConfigError if no node, nor any that an autoscaler may start, can take a rollout worker, or all of them too few ranks."""
        resource = self._config.ray.rollout_resource
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        try:
            possible = ray._private.state.state.get_max_resources_from_cluster_config()
        except Exception as error:  # not given in this form: then it is not known
            log.debug("node types of the cluster: %s", error)
            possible = None
        check_gpus_to_come(self._config, there.get("GPU", 0.0), None if possible is None else possible.get("GPU", 0))
        if note := check_rollout_resource(self._config, there.get(resource, 0.0), None if possible is None else possible.get(resource, 0)):
            log.warning(note)

    @property
    def log_folder(self) -> Path:
        """Folder of the output of every actor of this node."""
        node = ray._private.worker._global_node
        return Path(node.get_logs_dir_path()) if node is not None else Path("/tmp/ray/session_latest/logs")

    @property
    def own_daemons(self) -> Mapping[str, OwnDaemon]:
        """A private Ray's control service and raylet, by name: they are children of this process. Empty for a joined cluster."""
        node: Any = ray._private.worker._global_node
        if node is None or self._config.ray.address is not None:
            return {}
        here = next(one for one in ray.nodes() if one["NodeID"] == ray.get_runtime_context().get_node_id())  # type: ignore[no-untyped-call]
        raylet_at = f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}"
        addresses = {"gcs_server": ray.get_runtime_context().gcs_address, "raylet": raylet_at}
        return {name: OwnDaemon(node.all_processes[name][0].process, address) for name, address in addresses.items()}

    @property
    def head_address(self) -> str | None:
        """host:port of a joined cluster's control service; None for a private one, and for one that is joined by ray://."""
        address = self._config.ray.address
        if address is None or address.startswith("ray://"):
            return None
        return str(ray.get_runtime_context().gcs_address) if address == "auto" else address

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        node: Any = ray._private.worker._global_node
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos] if node is not None else []
        daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        ours = [*daemons, *(child for daemon in daemons for child in descendants(daemon))]
        late = threading.Timer(_SHUTDOWN_S, end, (ours,))
        late.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can start: shut down without the timer
            late.start()
        try:
            ray.shutdown()
        finally:
            late.cancel()
            end(ours, grace_s=_ENDED_S)  # Ray's agents outlive a daemon that had to be killed


def gpus_there(config: RunConfig, *, tries: int = _TRIES) -> float:
    """GPUs for the run: of this machine, or of all nodes of the cluster that it joins, which is asked only if a device is `auto`.

    Args: tries: as of Cluster. Raises: EngineError if the cluster can't be joined.
    """
    if config.ray.address is None:
        return visible_gpus()
    if not asks_for_gpus(config):
        return 0.0
    with Cluster(config, tries=tries):
        return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def on_drivers_node(actor: type, *, max_concurrency: int, environment: Mapping[str, str] | None = None) -> Any:
    """A HeartbeatActor, to be started on the driver's node: a rollout node may leave, and must not take the run's state with it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    variables = {"env_vars": dict(environment or {})}
    made = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(actor)  # type: ignore[call-overload]
    return made.options(num_cpus=0, max_concurrency=max_concurrency, scheduling_strategy=here, runtime_env=variables)


def lower_priority(actor: Any) -> None:
    """Have an actor, and what it starts from now on, leave a core to the learner's ranks when they want one.

    On a machine with few cores the learner is what a step waits for, and whoever shares a core with it delays the whole run: at equal
    priority a training step of the nano recipe took a sixth longer with rollouts than alone. On a cluster that was started elsewhere
    actors are at Ray's 15 already, which leaves little room; start its nodes with RAY_worker_niceness=0 if learner and rollouts share one.
    """
    actor.__ray_call__.remote(_raise_niceness)


def _raise_niceness(_: Any) -> None:
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), min(_NICEST, os.getpriority(os.PRIO_PROCESS, int(thread)) + _NICER_BY))


@contextlib.contextmanager
def _own_turn() -> Iterator[None]:
    """One private Ray starts at a time on this machine.

    Ray's daemon gives its two agents 15 s to start, and ends itself if they are later (ray-project/ray issue 65983); where several runs
    start at once on a few cores, that is too short.
    """
    lock = filelock.FileLock(Path(tempfile.gettempdir()) / f"evenkeel-ray-start-{os.getuid()}.lock")
    try:
        lock.acquire(timeout=5.0)
    except filelock.Timeout:
        log.info("another run is starting its Ray on this machine; this one is next, in %.0f s at the latest", _TURN_S)
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=_TURN_S)
    except OSError as error:  # a folder that can't be written to, or locked
        log.debug("no lock for starting one Ray at a time: %s", error)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _signals_stay_ours() -> Iterator[None]:
    """ray.init puts a handler of its own in the place of what is there, and its core one below Python's."""
    replace = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = replace
        signals.rearm()


@contextlib.contextmanager
def _daemons_apart() -> Iterator[None]:
    """Within it, ray.init starts its daemons in sessions of their own, with SIGHUP ignored. What they start inherits both.

    A signal to this process's whole group (of `timeout`, of `kill -- -PGID`, of a terminal that is lost) is then for this process alone:
    the checkpoint that it saves needs Ray. By itself Ray keeps no signal but Ctrl-C from its daemons. The kernel still ends them with this
    process; where it can't (on a Mac) Ray does so by their group, and they stay in it.
    """
    of_ray: Any = ray._private
    plain = of_ray.services.ConsolePopen
    if not of_ray.utils.detect_fate_sharing_support():
        yield
        return

    def start(command: list[str], *, preexec_fn: Callable[[], object], **options: Any) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            preexec_fn()

        started: subprocess.Popen[bytes] = plain(command, preexec_fn=prepare, start_new_session=True, **options)
        return started

    of_ray.services.ConsolePopen = start
    try:
        yield
    finally:
        of_ray.services.ConsolePopen = plain


def _own_path_alone() -> ray.job_config.JobConfig:
    """A job whose workers find this evenkeel first. Ray would put the folders of the driver's script and of its start before all others."""

    class Path(list[str]):
        def extend(self, _: object) -> None:
            pass

    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = Path(checkout())
    return job


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


# Who may reach a run's Ray: this machine alone if it is private, and who has the token if it is joined (docs/security.md).

# Longest wait for a task that finds out whether the joined cluster asks for a token.
_ASKED_S = 60.0
_TOKEN = "RAY_AUTH_TOKEN"


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Within it, ray.init starts a cluster that listens on 127.0.0.1 alone.

    Ray does so by itself on a Mac, where it supports no clusters of several machines; the variable that turns them on there turns them
    off here. Left alone, its control service, daemon and every worker listen on all interfaces of a laptop.
    """
    enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def have_token() -> None:
    """Where Ray could neither read its owner's token nor write a new one, as where HOME is / and the user isn't root: a token of this
    process's, which what it starts inherits."""
    if not any(name in os.environ for name in (_TOKEN, f"{_TOKEN}_PATH", "RAY_AUTH_MODE")):
        token = _token_file()
        there = next(path for path in (token, *token.parents) if os.path.exists(path))
        if not os.access(there, os.R_OK if there == token else os.W_OK | os.X_OK):
            os.environ[_TOKEN] = generate_new_authentication_token()


def protect_token() -> None:
    """Let nobody else on this machine read the token by which Ray knows its owner; Ray itself leaves that to the umask."""
    with contextlib.suppress(OSError):  # there is none: authentication is off, or the token is elsewhere
        _token_file().chmod(0o600)


def _token_file() -> Path:
    """File in which Ray keeps the token if RAY_AUTH_TOKEN_PATH doesn't say otherwise."""
    return Path(os.path.expanduser("~")) / ".ray" / "auth_token"


def require_authentication(settings: RayConfig) -> None:
    """Ask the cluster that was joined whether it lets everybody in.

    Raises: ConfigError if it does, unless ray.allow_unauthenticated says that this is known.
    """
    if settings.allow_unauthenticated:
        return
    try:
        asks_for_token = ray.get(ray.remote(num_cpus=0)(_asks_for_token).remote(), timeout=_ASKED_S)
    except ray.exceptions.RayError as error:
        raise EngineError(f"ray.address = {settings.address}: joined, but the first task failed there: {type(error).__name__}") from error
    if not asks_for_token:
        raise ConfigError(
            f"ray.address = {settings.address}: that cluster doesn't ask for a token, so whoever reaches it can run code as you. "
            "Start it with RAY_AUTH_MODE=token on every node (deploy/README.md), or, if its network is closed, "
            "set ray.allow_unauthenticated=true"
        )


def _asks_for_token() -> bool:
    """Whether this worker's cluster asks for a token. Ray's workers get RAY_AUTH_MODE from the daemon of their node."""
    return os.environ.get("RAY_AUTH_MODE", "disabled").lower() == "token"
