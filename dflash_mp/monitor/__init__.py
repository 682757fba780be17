"""Seeing what a run does: figures for Prometheus from every process (`endpoint`), a live view of them (`top`), and a page about a
run directory (`page`). What trains or serves hands snapshots in; nothing here can slow it or stop it.
"""
