"""Attacks on any server with plain streams beside them, and whether these notice.

grammars       requests with generated grammars
requests       generated requests on all routes
generated      what these requests are made of
plain_streams  the neighbours: their gaps and texts
"""
