"""From a function to a command: flags, gin files and error messages."""

from jaxir.cli.command import (  # noqa: F401
    STOPPED,
    TYPED,
    also_called,
    bound_as,
    build_parser,
    command_lines,
    end,
    gives_way,
    hands_over,
    main,
    one_of,
    run,
    start,
    takes,
    takes_typed,
)
