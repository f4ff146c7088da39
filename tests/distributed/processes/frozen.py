"""Imported last by the server of `forked`, which then has what its forks need."""

from tests.forking import prepare_for_forks

prepare_for_forks()
