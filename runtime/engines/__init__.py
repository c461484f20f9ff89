"""Engines: runtimes of single devices. `engine` has the protocol, the others are stretto's own."""
