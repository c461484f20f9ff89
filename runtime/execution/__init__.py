"""What executes programs: an `executor` loads them, a `loaded` program is executed.

An `execution` has its turn from `dispatch` and walks the operations that `walk` made: `compute` runs
segments, `communication` starts and awaits collectives, each a `call` on a `lane`. `negotiation` agrees on a
program with other processes before its first run.
"""
