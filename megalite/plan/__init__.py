"""What a run needs before there is a cluster for it: memory, time, money.

A plan is made of the same config that training takes and of the same action lists that the executor runs;
nothing here imports torch but `calibrate`.
"""
