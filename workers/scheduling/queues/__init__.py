"""Requests from their arrival to their slot and back.

admission       refuses requests that cannot run, or if the queue is full
expected_wait   when a new request would start; how long answers will be, from those that have ended and those that
                run
wait_forecast   simulates the queue for `expected_wait`, many steps at a time
waiting_queue   requests that wait for a slot: tenants in turn, each one's by deadline; requests whose grammar or mask
                is not ready
tenants         whose turn it is, by the tokens computed for each
shares          slots and pages that each tenant has, and may take
request_queues  waiting and active requests, and the moves between them
"""
