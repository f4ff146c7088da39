"""Pushes a merged model to a Hugging Face repository. Needs no torch.

Begin at `repository`; `model_files` says whether a directory holds a whole model, and `failures`
turns what huggingface_hub raises into one sentence. It is imported when it is needed. Uploads were
tried as LFS does them, to a local server of the hub's contract, not as Xet does.
"""
