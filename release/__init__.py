"""What a release consists of, built and checked: ``make release-check``."""
