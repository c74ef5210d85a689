"""Learned video models: they predict camera images and robot state for given actions."""
