"""Training of block drafts.

head         a DFlash head over whole sequences, with a block after each anchor
conditional  the DSpark and DFlash2 heads, whose rows depend on the token before
loss         draws anchors, and compares their blocks with the target
files        published folder layouts
"""
