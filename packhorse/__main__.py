"""``python -m packhorse demo | capture | doctor | warmup``."""

import argparse
import os
import sys
from collections.abc import Sequence

from packhorse import __version__

#: The reader of stdout left before the end.
EXIT_UNREAD = 1
#: A package that the command needs is not installed.
EXIT_REFUSED = 2

COMMANDS = {
    "demo": "replay a rollout that vLLM sampled through a Megatron model, without and with replay",
    "capture": "sample from vLLM with routes and support, into a file that the demo replays",
    "doctor": "what is installed, what runs here, and what is missing for what",
    "warmup": "compile what a training run will launch, before its first step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its module is imported only then, so ``--help`` stays fast."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m packhorse",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["commands:", *(f"  {name:8s} {does}" for name, does in COMMANDS.items())]
        ),
    )
    parser.add_argument("--version", action="version", version=f"packhorse {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="one of those below; takes --help too")
    command = parser.parse_args(given[:1]).command

    parser = argparse.ArgumentParser(
        prog=f"python -m packhorse {command}", description=COMMANDS[command]
    )
    if command == "doctor":
        from packhorse import doctor

        parser.parse_args(given[1:])
        return doctor.run()

    try:
        import numpy  # noqa: F401  before torch, which warns where it is absent

        if command == "warmup":
            from packhorse.replay import warmup

            warmup.add_arguments(parser)
            return warmup.run(parser.parse_args(given[1:]))
        if command == "capture":
            from packhorse.replay import capture_cli

            capture_cli.add_arguments(parser)
            parser.set_defaults(given=given[1:])
            return capture_cli.run(parser.parse_args(given[1:]))
        from packhorse.replay import demo

        demo.add_arguments(parser)
        return demo.run(parser.parse_args(given[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "packhorse") or package in sys.stdlib_module_names:
            raise  # a broken installation, not an absent package
        sys.stderr.write(
            f"packhorse {command}: {package} is not installed: pip install {package}\n"
        )
        return EXIT_REFUSED


def _run_to_the_end_of_stdout() -> int:
    """``main``, quiet where the reader of stdout leaves early, as ``head`` does."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # what is written at exit is past every handler
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD


if __name__ == "__main__":
    sys.exit(_run_to_the_end_of_stdout())
