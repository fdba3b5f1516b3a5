"""Bring a checkpoint from a model hub to a directory: resumable, hash-checked, one fetch per directory at a time.

``files``      what a repository holds, path rules, content hashes
``hub``        the few requests made to the hub, and what its refusals mean
``selection``  which files a set of groups or one expert-parallel rank needs
``manifest``   what the destination knows about itself (listing of the commit, stamps of checked files)
``partial``    half-fetched files that survive the process
``lock``       one fetch per destination
``transfer``   the downloader: ranges, retries, stall watchdog, final check
``job``        survey, plan, run

Everything the destination remembers lies in its folder ``.fetch``; the rest of it is the checkpoint.
"""
