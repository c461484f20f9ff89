"""Runs JAX's own tests on stretto and compares them, test by test, with JAX's CPU backend.

Needs nothing but the standard library: JAX, stretto and pytest live in an environment of their own, which
`environment` makes. Each test file runs in its own process (`single`), those for several processes in
several (`several`); what their tests did is told while they run, by `inside/jax_suite_recorder.py`. `judge`
compares the results and knows the accepted failures.
"""
