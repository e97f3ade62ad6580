"""The `shardwise` command."""

from __future__ import annotations

import errno
import sys

import typer

from shardwise.cli import config_command, plan_command, probe_command, train_command, validate_command
from shardwise.spec.problems import BadInput

app = typer.Typer(
    name="shardwise",
    help="Which FSDP configuration fits my GPUs and hides its communication? Plan it, run it, prove it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("config")(config_command.config)
app.command("plan")(plan_command.plan)
app.command("probe")(probe_command.probe)
app.command("train")(train_command.train)
app.command("validate")(validate_command.validate)


def run() -> None:
    """Run the command line; bad input, unusable paths included, ends with one text and exit code 2."""
    try:
        app()
    except BadInput as error:
        from shardwise.report.terminal import problems_text

        print(problems_text(error), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{error.filename or 'file system'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(4 if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT) else 2)


if __name__ == "__main__":
    run()
