"""Training of block drafts.

head         a DFlash head over whole sequences, a block after each of some positions
conditional  the DSpark and DFlash2 heads, whose rows depend on the token before
loss         random positions, and what their blocks are judged by
files        published folder layouts
"""
