"""Rollouts in other processes, by Ray. Nothing else in the project imports ray (docs/scaling.md)."""
