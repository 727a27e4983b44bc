"""The subcommands: one module each, with `command` for the command line and, where there is something to see, `pictures`."""
