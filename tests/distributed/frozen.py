"""Imported last by the server of `tests.distributed.forked`, which then has what its forks need."""

from tests.forking import prepare_for_forks

prepare_for_forks()
