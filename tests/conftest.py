"""Machines are shared and slow at times: a property is judged by its truth, not by its speed."""

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
