"""Training of block drafts.

head   the DFlash head over whole sequences, a block after each of some positions
files  z-lab's folder layout of a DFlash head
"""
