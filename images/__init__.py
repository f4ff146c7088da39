"""Container images without a container engine, and the Python environment of Ray pods."""
