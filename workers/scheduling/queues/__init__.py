"""Requests from their arrival to their slot and back.

admission       refuses requests that cannot run, or if the queue is full; estimates the wait
waiting_queue   requests that wait for a slot, by deadline
grammar_queue   requests whose grammar or mask is not ready
request_queues  waiting and active requests, and the moves between them
"""
