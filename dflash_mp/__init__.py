"""dflash-mp: train DFlash drafters, one process per drafter GPU, from hidden states streamed by feeders."""

__version__ = "0.1.0"
