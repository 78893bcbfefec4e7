"""The choice of each step's tree shape by acceptance and time.

shape_choice   chooses the shape that rounds verify and draft; steps of other shapes, to measure their acceptance and
               time
shape_rates    expected tokens and milliseconds of each shape
draft_fit      whether the draft guesses an adapter's texts
acceptance     expected accepted drafts of each shape, with their error
"""
