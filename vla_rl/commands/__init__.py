"""Commands of ``vla-rl`` that have a room of their own."""
