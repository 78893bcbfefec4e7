"""Communication between ingresses, engine replicas, coordinators and ranks: ZeroMQ and msgpack, never pickle.

messages   the messages
admin      what administrators ask of an engine
encoding   messages as bytes
channel    the connections, each with its high-water mark; a socket in an asyncio loop
sockets    binding and securing sockets; noticing a peer's death; private folders of processes, and what killed ones
           left
reactor    a thread that waits for sockets and for work from other threads
discovery  coordinators by name, the transport of a process, and the application's keys, shared through Ray
"""
