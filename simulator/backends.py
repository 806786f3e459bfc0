"""Where the groups of a sweep run: on the cores of this machine (joblib), or on a cluster (Ray).

Every backend hands the groups' rows back in the order in which they were given, so that results do not depend on it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from joblib import Parallel, delayed

from nosa_sys.errors import ConfigError

BACKENDS = ("joblib", "ray")
Job = TypeVar("Job")
Result = TypeVar("Result")
# Tasks handed to a cluster before the first result is waited for, a worker: enough to keep all of them busy.
_AHEAD = 4


def check_backend(backend: str) -> None:
    """ConfigError for an unknown backend, or one whose package is not installed."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if backend == "ray":
        _ray()


def run_jobs(work: Callable[[Job], Result], jobs: Iterable[Job], *, backend: str, workers: int) -> Iterator[Result]:
    """``work`` of every job, results in order. ``workers``: processes; on a running Ray cluster its own CPUs count."""
    jobs = list(jobs)
    if backend == "ray":
        return _on_ray(work, jobs, workers)
    return iter(Parallel(n_jobs=min(workers, len(jobs)), return_as="generator")(delayed(work)(job) for job in jobs))


def _on_ray(work: Callable[[Job], Result], jobs: list[Job], workers: int) -> Iterator[Result]:
    """A cluster named by RAY_ADDRESS, or one that is already connected to, or a local one for the time of the sweep."""
    ray = _ray()
    own = not ray.is_initialized()
    if own:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, configure_logging=False, **local)
    try:
        task = ray.remote(lambda job: work(job))  # Ray takes plain functions alone
        most = _AHEAD * max(workers, int(ray.cluster_resources().get("CPU", 1)))
        running: collections.deque[Any] = collections.deque()
        for job in jobs:
            running.append(task.remote(job))
            if len(running) >= most:
                yield _result(ray, running.popleft())
        while running:
            yield _result(ray, running.popleft())
    finally:
        if own:
            ray.shutdown()


def _result(ray: Any, reference: Any) -> Any:
    """A task's result; what it raised is raised here as it was."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("backend ray needs the package ray: pip install 'nosa-sys[ray]'") from None
    return ray
