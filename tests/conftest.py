"""Settings that all tests share: hypothesis without deadlines (first calls compile), with the same cases each run."""

from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")
