"""A fuzzer of the ways into the front end: mutated HLO, as text and as protos.

    python -m fuzz -n 100000 --seed 1 --workers 2        (in the folder tests/)

`corpus` has the modules, `mutate` changes them, `judge` runs one input through everything that a user can
do with a file, `campaign` runs many in processes that may crash or hang. Input i of a seed is always the
same bytes.
"""
