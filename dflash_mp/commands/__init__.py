"""The commands of `dflash-mp`, one thin function each; `dflash_mp.cli` puts them together.

A function here imports what does the work when it is called, and reads the configuration before anything slow: `--help` and a mistake in
the configuration show at once.
"""
