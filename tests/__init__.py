"""A package, because verl's wheel installs one of the same name, which would hide this folder."""
