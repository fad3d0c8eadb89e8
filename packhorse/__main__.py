"""``python -m packhorse demo | doctor``."""

import argparse
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "replay a rollout that vLLM sampled through a Megatron model, without and with replay",
    "doctor": "what is installed, what runs here, and what is missing for what",
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
    parser.add_argument("command", choices=COMMANDS, help="one of those below; takes --help too")
    command = parser.parse_args(given[:1]).command

    parser = argparse.ArgumentParser(
        prog=f"python -m packhorse {command}", description=COMMANDS[command]
    )
    if command == "doctor":
        from packhorse import doctor

        parser.parse_args(given[1:])
        return doctor.run()

    from packhorse.replay import demo

    demo.add_arguments(parser)
    return demo.run(parser.parse_args(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
