"""Pushes a merged model to a Hugging Face repository. Needs no torch.

Begin at `repository`; `model_files` says whether a directory holds a whole model, and `failures`
turns what huggingface_hub raises into one sentence. It is imported when it is needed.
"""
