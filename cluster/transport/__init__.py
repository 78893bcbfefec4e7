"""Communication between ingresses, engine replicas, coordinators and ranks: ZeroMQ and msgpack, never pickle.

messages   the messages
admin      what administrators ask of an engine
encoding   messages as bytes
channel    the connections, each with its high-water mark
sockets    binding and securing sockets; noticing a peer's death
listener   a socket in an asyncio loop
reactor    a thread that waits for sockets and for work from other threads
folders    private folders of processes, and what killed ones left
discovery  coordinators by name, the transport of a process, and the application's keys, shared through Ray
"""
