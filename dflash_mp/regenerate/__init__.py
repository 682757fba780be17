"""`dflash-mp regenerate`: the answers that a drafter should learn to guess, written by the target itself."""
