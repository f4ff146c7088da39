"""Decides whether a server has the weights of its version.

Begin at `proving`; `reading` reads a version's proof, `judgement` keeps the verdicts.
"""
