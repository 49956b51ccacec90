"""`python -m tests.simulation`: repeat one seed, or run many."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import closing
from itertools import count, islice

import click

from tests.simulation.campaign import campaign, run
from tests.simulation.checks import told
from tests.simulation.disk import Now
from tests.simulation.faults import draw


@click.command()
@click.option("--seed", type=int, help="The one run to repeat, or the first of many.")
@click.option("--runs", type=int, default=1, show_default=True, help="How many seeds, one after the other.")
@click.option("--verbose", is_flag=True, help="Tell what happens, event by event.")
def main(seed: int | None, runs: int, verbose: bool) -> None:
    """Simulated clusters in which things go wrong; each must end with the weights of the undisturbed run."""
    first = int(time.time()) if seed is None else seed
    if runs == 1:
        click.echo(str(draw(first)))
        with closing(Now()) as now:
            try:
                click.echo(str(run(first, now, verbose)[1]))
            except Exception:  # noqa: BLE001 - shown to whoever looks for the reason
                click.echo(traceback.format_exc(), err=True)
                sys.exit(1)
        return
    start = time.monotonic()
    tally = campaign(islice(count(first), runs), float("inf"), lambda failure: click.echo(str(failure)))
    rate = tally.runs / (time.monotonic() - start)
    click.echo(f"{tally.runs} runs from seed {first}: {told(tally.seen)}; {len(tally.failures)} failed, {rate:.1f} runs a second")
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
