"""Attacks on any server with plain streams beside them, and whether these notice.

grammars       requests with generated grammars
requests       generated requests on all routes
generated      generators of these requests
drawing        values of a generator, from a seed
plain_streams  the neighbours: their gaps and texts
priority       most of the cores for what is under test
"""
