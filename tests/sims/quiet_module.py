"""Imported by the process that workers are forked from."""
