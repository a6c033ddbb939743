"""What `watchword experiment` does with its options: picks the kind of run."""

from __future__ import annotations

import sys
from dataclasses import replace

from rich.console import Console

from cluster.api.errors import InvalidRequestError, UnavailableError
from cluster.api.terminal import width_of
from cluster.experiment.options import ExperimentOptions, plan_of
from cluster.experiment.replay import draw_seed
from cluster.experiment.report_text import LiveProgress
from cluster.experiment.reports import report
from cluster.experiment.runner import run_experiment
from cluster.experiment.state_file import seed_of
from cluster.experiment.targets.url import UrlTarget


async def run_command(options: ExperimentOptions) -> int:
    """The exit status. Raises WatchwordError for what the caller got wrong."""
    console = Console(width=width_of(sys.stdout))
    kept = seed_of(options.state_file) if options.seed is None else options.seed
    seed = draw_seed() if kept is None else kept
    if options.url is not None:
        return await _against_url(console, options, seed)
    # Torch takes seconds to import, and nothing above needs it.
    from cluster.experiment.embedded_command import run_embedded

    return await run_embedded(console, replace(options, seed=seed))


async def _against_url(console: Console, options: ExperimentOptions, seed: int) -> int:
    if options.bisect or options.planted or options.fault or options.matrix or options.timing:
        raise InvalidRequestError("--matrix, --bisect, --planted, --fault and --timing need an engine in this process")
    assert options.url is not None
    target = UrlTarget(options.url, options.api_key, options.model)
    plan = plan_of(options, seed)
    try:
        await target.connect()
        with LiveProgress(console, "rounds", len(plan.rounds)) as progress:
            result = await run_experiment(target, plan, requirements=options.requirements, progress=progress)
    except ConnectionError as error:
        raise UnavailableError(str(error)) from None
    finally:
        await target.close()
    return report(console, options, [result], ())
