"""A package, because verl's wheel installs a package ``tests`` that would hide this folder."""
