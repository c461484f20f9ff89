"""The commands of `stretto`, one a file. Each has `run(arguments) -> exit code`."""
