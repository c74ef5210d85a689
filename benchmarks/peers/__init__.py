"""Speed of one PPO iteration beside other libraries: ``python -m benchmarks.peers``."""
