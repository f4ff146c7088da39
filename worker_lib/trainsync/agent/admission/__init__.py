"""Decides whether a server has the weights of its version.

Begin at `proving`; `reading` and `stored` read a version with its proof, `judgement` keeps the
verdicts.
"""
