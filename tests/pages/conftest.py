"""The built site, for the tests of its pages."""

from site_build import node_modules, site  # noqa: F401  (fixtures)
