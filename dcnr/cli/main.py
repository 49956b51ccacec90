"""The program `dcnr`: finds the command and imports only that.

Rule 1: help of the whole program reads this table and imports no command, so it is there at once.
Rule 2: a command is imported when it runs; each noun has a file of its own.
Rule 3: a wrong call is answered like every other error: in one line, with exit code 2.
"""

from __future__ import annotations

import importlib
from typing import IO, Any

import click

from dcnr import __version__

COMMANDS = {
    "demo": ("dcnr.cli.demo:demo", "A whole story in minutes: cluster, text, network, training, a sample."),
    "up": ("dcnr.cli.up:up", "Run a whole local cluster in the foreground."),
    "orchestrator": ("dcnr.orchestrator.main:orchestrator", "Run an orchestrator."),
    "network": ("dcnr.cli.network:network", "Check, register, analyze and draw network files."),
    "tokenizer": ("dcnr.cli.tokenizer:tokenizer", "Train and use tokenizers."),
    "dataset": ("dcnr.cli.dataset:dataset", "Make and look at datasets."),
    "train": ("dcnr.cli.train:train", "Train a network and watch it learn."),
    "generate": ("dcnr.cli.generate:generate", "Let a trained network go on with a text."),
    "chat": ("dcnr.cli.chat:chat", "Talk to a trained network, line by line."),
    "session": ("dcnr.cli.session:session", "List, watch, suspend, resume, divide anew and delete training runs."),
    "pnode": ("dcnr.cli.pnode:pnode", "List and drain the processes that host VNodes."),
    "metrics": ("dcnr.cli.metrics:metrics", "Follow live metrics."),
    "checkpoint": ("dcnr.cli.checkpoint:checkpoint", "List, verify, prune, export and import checkpoints, and see what they give."),
    "chaos": ("dcnr.cli.chaos:chaos", "Break parts of a running cluster, and watch it recover."),
    "doctor": ("dcnr.cli.doctor:doctor", "Say what works here, and what to do about what does not."),
}


class WrongCall(click.ClickException):
    """An option or command that does not exist, or a value that does not fit."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        path = error.ctx.command_path if error.ctx else "dcnr"
        super().__init__(f"{error.format_message().rstrip('.')} (see `{path} --help`)")

    def show(self, file: IO[Any] | None = None) -> None:
        """Write `error: …`."""
        click.echo(f"error: {self.message}", file=file, err=True)


class LazyGroup(click.Group):
    """A group over COMMANDS."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A noun without a command still shows its help."""
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise WrongCall(error) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    "dcnr", cls=LazyGroup, epilog="\b\nExample:\n  dcnr train networks/tiny.yml --text book.txt --local 3\n  dcnr COMMAND --help"
)
@click.version_option(__version__, prog_name="dcnr")
def main() -> None:
    """Neural networks written in YAML, trained as graphs of small agents over NATS."""


if __name__ == "__main__":
    main(prog_name="dcnr")
