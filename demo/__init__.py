"""`make demo`: a real TrainingRun on a real cluster, with a killed trainer and checked promises."""
