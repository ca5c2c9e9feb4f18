"""From a function to a command: flags, gin files, and errors of one sentence."""

from jaxir.cli.command import (
    STOPPED,
    TYPED,
    also_called,
    bound_as,
    build_parser,
    end,
    gives_way,
    hands_over,
    main,
    one_of,
    run,
    takes,
)

__all__ = [
    "STOPPED",
    "TYPED",
    "also_called",
    "bound_as",
    "build_parser",
    "end",
    "gives_way",
    "hands_over",
    "main",
    "one_of",
    "run",
    "takes",
]
