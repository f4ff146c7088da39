"""What a release consists of, built and checked: ``make release-check``.

Begin at `build`; `contents` says what must be inside.
"""
