"""Engines: runtimes of single devices. `engine` has the protocol, `xla_cpu` and `null` those of stretto."""
