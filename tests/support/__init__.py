"""What the tests share: launching ranks, and judging programs against JAX's CPU backend."""
