"""Search for settings: many runs of an experiment, chosen by Optuna from their validation."""
