"""Fixtures that several test files share."""

from site_build import node_modules, site  # noqa: F401
